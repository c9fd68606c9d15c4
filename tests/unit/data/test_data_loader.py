"""The loader: one order for any number of ranks, exact resumption, a thread that ends and errors that arrive."""

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.polling import WAIT_SECONDS_MAX, eventually

from muster.trainer.config import DataParallel
from muster.trainer.data import PackedSample, RankLoader, StepBatch
from muster.trainer.data.loader import advanced, dealt
from muster.trainer.errors import UserError
from muster.words.checkpoint import DataCursor

T = 4
ONE = DataParallel(1, (0,))


@dataclass
class Numbered:
    """Sample (epoch, index) is filled with its id; every third has one token of padding."""

    samples_per_epoch: int
    seed: int = 5
    fails_at: int | None = None
    gate: threading.Event | None = None
    asked: list[int] = field(default_factory=list)

    def sample(self, epoch: int, index: int) -> PackedSample:
        number = epoch * self.samples_per_epoch + index
        self.asked.append(number)
        if self.gate:
            self.gate.wait(60)
        if number == self.fails_at:
            raise OSError(5, "Input/output error")
        documents = np.array([0, 0, 1, -1 if number % 3 == 0 else 1], np.int32)
        return PackedSample(
            np.full(T, number, np.int32), np.full(T, -number, np.int32), np.arange(T, dtype=np.int32), documents
        )


def start() -> DataCursor:
    return DataCursor(seed=5, epoch=0, sample=0)


def steps(loader: RankLoader, count: int) -> list[StepBatch]:
    try:
        return [loader.next() for _ in range(count)]
    finally:
        loader.close()


def in_dealt_order(per_rank: list[StepBatch], micro_batch: int) -> list[int]:
    """The ids of one step in global order, from what the ranks got: micro-step by micro-step, rank by rank."""
    accumulation = len(per_rank[0].micro)
    return [
        sample_id
        for micro in range(accumulation)
        for batch in per_rank
        for sample_id in batch.sample_ids[micro * micro_batch : (micro + 1) * micro_batch]
    ]


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Attempts of one job: (ranks, micro_batch, steps), all of the same samples per step."""
    divisors = [1, 2, 3, 4, 6, 12, 24]
    ranks = draw(st.lists(st.sampled_from(divisors), min_size=1, max_size=4))
    return [
        (r, draw(st.sampled_from([m for m in divisors if 24 % (r * m) == 0])), draw(st.integers(0, 3))) for r in ranks
    ]


@settings(max_examples=40)
@given(attempts=runs(), per_epoch=st.integers(1, 100), first=st.integers(0, 250))
def test_any_ranks_and_any_restarts_use_every_sample_once_in_one_order(
    attempts: list[tuple[int, int, int]], per_epoch: int, first: int
) -> None:
    dataset = Numbered(per_epoch)
    cursor = advanced(start(), first, per_epoch)
    used: list[int] = []
    for ranks, micro_batch, count in attempts:
        got = [
            steps(
                RankLoader(dataset, cursor, 24, micro_batch, DataParallel(ranks, (rank,)), "cpu", prefetch=rank % 3),
                count,
            )
            for rank in range(ranks)
        ]
        for per_rank in zip(*got, strict=True):
            used += in_dealt_order(list(per_rank), micro_batch)
            assert len({str(batch.cursor) for batch in per_rank}) == 1
            for batch in per_rank:
                filled = [int(row) for micro in batch.micro for row in micro.tokens[:, 0]]
                assert filled == list(batch.sample_ids)
        cursor = got[0][-1].cursor if count else cursor
    assert used == list(range(first, first + len(used)))
    assert cursor == advanced(start(), first + len(used), per_epoch)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_the_deal_is_the_agreed_one(accumulation: int, micro_batch: int, size: int) -> None:
    total = accumulation * micro_batch * size
    for share in range(size):
        mine = dealt(total, micro_batch, DataParallel(size, (share,)))
        assert len(mine) == total // size
        for place, number in enumerate(mine):
            assert number // (micro_batch * size) == place // micro_batch
            assert (number // micro_batch) % size == share


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5))
def test_every_sample_is_dealt_once_whoever_holds_the_shares(
    data: st.DataObject, accumulation: int, micro_batch: int, size: int
) -> None:
    """Also where a rank has taken over a lost rank's share; its micro-batches stay those of one share each."""
    holder = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    held = [tuple(share for share in range(size) if holder[share] == rank) for rank in range(3)]
    total = accumulation * micro_batch * size
    dealt_out = [dealt(total, micro_batch, DataParallel(size, shares)) for shares in held]
    assert sorted(number for numbers in dealt_out for number in numbers) == list(range(total))
    for numbers in dealt_out:
        rows = [numbers[i : i + micro_batch] for i in range(0, len(numbers), micro_batch)]
        assert all(len({number // micro_batch for number in row}) == 1 for row in rows)


def test_ranks_that_hold_unequal_shares_make_equally_many_passes() -> None:
    """What fills up scores nothing, counts no tokens and has no sample id."""
    held = [DataParallel(3, shares, shares_per_rank=2) for shares in ((0, 2), (1,), ())]
    got = [steps(RankLoader(Numbered(100), start(), 12, 2, division, "cpu"), 1)[0] for division in held]
    assert [len(batch.micro) for batch in got] == [4, 4, 4]
    assert [batch.sample_ids for batch in got] == [(0, 1, 4, 5, 6, 7, 10, 11), (2, 3, 8, 9), ()]
    assert [[bool((micro.labels != -100).any()) for micro in batch.micro] for batch in got] == [
        [True] * 4,
        [True, True, False, False],
        [False] * 4,
    ]
    assert (
        sum(batch.tokens for batch in got) == steps(RankLoader(Numbered(100), start(), 12, 12, ONE, "cpu"), 1)[0].tokens
    )


def test_a_batch_is_int64_tensors_with_the_padding_counted() -> None:
    (batch,) = steps(RankLoader(Numbered(100), start(), 8, 2, DataParallel(2, (1,)), "cpu"), 1)
    assert batch.sample_ids == (2, 3, 6, 7)
    assert [tuple(micro.tokens.shape) for micro in batch.micro] == [(2, T), (2, T)]
    assert torch.equal(batch.micro[0].labels, torch.tensor([[-2] * T, [-3] * T]))
    assert {t.dtype for t in (batch.micro[1].tokens, batch.micro[1].positions, batch.micro[1].documents)} == {
        torch.int64
    }
    assert all(t.is_contiguous() for t in (batch.micro[1].tokens, batch.micro[1].documents))
    assert batch.tokens == 4 * T - 2
    assert batch.wait_seconds >= 0
    assert batch.cursor == DataCursor(seed=5, epoch=0, sample=8)


def test_a_step_may_cross_several_epochs() -> None:
    first, second = steps(RankLoader(Numbered(3), start(), 8, 8, ONE, "cpu"), 2)
    assert first.sample_ids == tuple(range(8))
    assert first.cursor == DataCursor(seed=5, epoch=2, sample=2)
    assert second.sample_ids == tuple(range(8, 16))


def test_a_cursor_at_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    at_end = DataCursor(seed=5, epoch=1, sample=3)
    (batch,) = steps(RankLoader(Numbered(3), at_end, 3, 1, ONE, "cpu"), 1)
    assert batch.sample_ids == (6, 7, 8)
    assert batch.cursor == DataCursor(seed=5, epoch=3, sample=0)


def test_prefetching_is_bounded() -> None:
    dataset = Numbered(1000)
    loader = RankLoader(dataset, start(), 2, 1, ONE, "cpu", prefetch=3)
    loader.next()
    loader.close()
    assert len(dataset.asked) <= 2 * 4


def test_what_fails_on_the_thread_is_raised_by_next() -> None:
    loader = RankLoader(Numbered(100, fails_at=5), start(), 2, 1, ONE, "cpu")
    assert loader.next().sample_ids == (0, 1)
    assert loader.next().sample_ids == (2, 3)
    with pytest.raises(OSError, match="Input/output error"):
        loader.next()
    loader.close()


def test_close_ends_the_thread() -> None:
    before = set(threading.enumerate())
    loader = RankLoader(Numbered(100), start(), 2, 1, ONE, "cpu")
    (thread,) = set(threading.enumerate()) - before
    loader.close()
    loader.close()
    assert not thread.is_alive()


def test_close_does_not_wait_for_steps_that_have_not_begun() -> None:
    gate = threading.Event()
    dataset = Numbered(100, gate=gate)
    loader = RankLoader(dataset, start(), 1, 1, ONE, "cpu", prefetch=3)
    closing = threading.Thread(target=loader.close)
    try:
        eventually(lambda: dataset.asked, "the thread to begin")
        closing.start()
        eventually(lambda: loader._waiting[-1].cancelled(), "the steps that wait to be dropped")
    finally:
        gate.set()
        closing.join(WAIT_SECONDS_MAX)
    assert dataset.asked == [0]


def test_a_step_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(UserError, match="a step of 8 samples can't be divided over 3 shares × microBatch 2"):
        RankLoader(Numbered(100), start(), 8, 2, DataParallel(3, (0,)), "cpu")


def test_a_cursor_of_another_seed_is_refused() -> None:
    with pytest.raises(UserError, match="seed 6, the configuration's of seed 5"):
        RankLoader(Numbered(100), DataCursor(seed=6, epoch=0, sample=0), 8, 2, ONE, "cpu")
