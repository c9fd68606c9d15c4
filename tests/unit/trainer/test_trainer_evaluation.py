"""The metrics of held-out data are the same however many ranks share the work."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from muster.recipe.objectives import VALUES
from muster.trainer.config import DataParallel
from muster.trainer.data import PackedSample
from muster.trainer.train.evaluation import HeldOutEvaluator, HeldOutResult, HeldOutSet
from muster.trainer.train.tasks.choice import MAKERS
from muster.trainer.train.tasks.next_token import NextToken

LENGTH = 6


class HeldOut:
    """Sample i has i % 4 + 1 scored labels."""

    def __init__(self, samples: int, *names: str) -> None:
        self.samples_per_epoch, self.names = samples, names or ("0",)

    def source_of(self, epoch: int, index: int) -> int:
        return index % len(self.names)

    def sample(self, epoch: int, index: int) -> PackedSample:
        labels = np.full(LENGTH, -100, np.int32)
        labels[: index % 4 + 1] = index
        tokens = np.full(LENGTH, index, np.int32)
        return PackedSample(tokens, labels, np.arange(LENGTH, dtype=np.int32), np.zeros(LENGTH, np.int32))


class Scores(nn.Module):
    """A loss of (index + 1) per scored label; remembers the samples that it saw scored."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[int]] = []

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        assert smoothing == 0.0
        assert not self.training
        assert not torch.is_grad_enabled()
        assert all(part.dtype == torch.int64 for part in (tokens, positions, documents, labels))
        scored = labels != -100
        self.calls.append([int(row[0]) for row, any_scored in zip(tokens, scored.any(1), strict=True) if any_scored])
        return ((tokens + 1) * scored).sum().float()


@pytest.mark.parametrize(("held_out", "asked_for", "micro_batch"), [(10, 256, 2), (10, 7, 3), (1, 5, 4), (16, 16, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_sample_is_scored_once(held_out: int, asked_for: int, micro_batch: int, ranks: int) -> None:
    vectors: list[Tensor] = []
    calls: list[list[list[int]]] = []

    def remember(vector: Tensor) -> list[float]:
        vectors.append(vector)
        return [1.0, 1.0, 0.0, 0.0]

    for rank in range(ranks):
        model: Any = Scores()
        evaluator = HeldOutEvaluator(
            [HeldOutSet("", HeldOut(held_out), asked_for)],
            micro_batch,
            DataParallel(ranks, (rank,)),
            NextToken(0.1),
            torch.device("cpu"),
        )
        evaluator.run(model, remember, lambda rank=rank: rank == 0)  # type: ignore[misc]
        calls.append(model.calls)
        assert model.training

    count = min(held_out, asked_for)
    assert sorted(index for rank in calls for batch in rank for index in batch) == list(range(count))
    assert len({len(rank) for rank in calls}) == 1  # a sharded forward pass needs all ranks
    loss = sum((index + 1) * (index % 4 + 1) for index in range(count))
    tokens = sum(index % 4 + 1 for index in range(count))
    assert sum(vectors).tolist() == [loss, tokens, 0.0, 1.0]  # type: ignore[union-attr]


def test_the_mean_is_weighted_by_tokens_and_wishes_are_heard() -> None:
    evaluator = HeldOutEvaluator(
        [HeldOutSet("", HeldOut(4), 4)], 2, DataParallel(1, (0,)), NextToken(0.1), torch.device("cpu")
    )
    assert evaluator.run(Scores(), lambda vector: vector.tolist(), lambda: True) == HeldOutResult(30 / 10, {}, True)
    assert evaluator.run(Scores(), lambda vector: vector.tolist(), lambda: False) == HeldOutResult(30 / 10, {}, False)


def measured(sets: list[HeldOutSet], ranks: int) -> HeldOutResult:
    """What `ranks` ranks find together; token n stands for n bytes."""
    vectors: list[Tensor] = []
    for adding in (True, False):
        for rank in range(ranks):
            division = DataParallel(ranks, (rank,))
            evaluator = HeldOutEvaluator(
                sets, 2, division, NextToken(), torch.device("cpu"), by_token=True, token_bytes=np.arange(20)
            )

            def total(vector: Tensor, adding: bool = adding) -> list[float]:
                if adding:
                    vectors.append(vector)
                return [float(value) for value in sum(vectors)]  # type: ignore[union-attr]

            found = evaluator.run(Scores(), total, lambda: False)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_each_set_and_each_source_has_metrics_of_its_own(ranks: int) -> None:
    sets = [HeldOutSet("", HeldOut(8, "wiki", "code"), 6), HeldOutSet("chat", HeldOut(3), 9)]
    found = measured(sets, ranks)
    # Of sample i, i % 4 + 1 tokens are scored, each at a loss of i + 1, and each stands for i bytes.
    tokens = [index % 4 + 1 for index in range(6)]
    losses = [(index + 1) * count for index, count in enumerate(tokens)]
    text = [index * count for index, count in enumerate(tokens)]
    loss, chat = sum(losses) / sum(tokens), sum(losses[:3]) / sum(tokens[:3])
    assert found.loss == pytest.approx(loss)
    assert found.values == pytest.approx(
        {
            "perplexity": math.exp(loss),
            "bits_per_byte": sum(losses) / math.log(2) / sum(text),
            "sources/wiki/loss": sum(losses[::2]) / sum(tokens[::2]),
            "sources/code/loss": sum(losses[1::2]) / sum(tokens[1::2]),
            "chat/loss": chat,
            "chat/perplexity": math.exp(chat),
            "chat/bits_per_byte": sum(losses[:3]) / math.log(2) / sum(text[:3]),
        }
    )


def test_without_a_nameless_set_the_loss_is_that_of_all() -> None:
    both = measured([HeldOutSet("one", HeldOut(2), 2), HeldOutSet("two", HeldOut(4), 4)], 2)
    assert both.loss == pytest.approx((1 + 4 + 1 + 4 + 9 + 16) / (1 + 2 + 1 + 2 + 3 + 4))
    assert {"one/loss", "two/loss"} <= both.values.keys()


def test_the_contract_knows_what_each_objective_reports() -> None:
    settings: Any = SimpleNamespace(
        label_smoothing=0.0, adapter=None, dpo=None, orpo=None, simpo=None, kto=None, reward=None
    )
    assert {task: MAKERS[task](settings).names for task in VALUES} == VALUES
    assert {task for task in MAKERS if task not in VALUES} <= {"pretrain", "sft", "grpo"}
