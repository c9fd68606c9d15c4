"""Resume is exact: the same bits at the same world size, every sample once at any other."""

import random
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.integration.trainer.gangs import Job, Part, samples, train_many, training, write_corpus
from tests.integration.trainer.test_trainer_lora import write_chat

from muster.words.names import ExitCode
from muster.words.signals import StepRecord

# Real ranks on a machine that may be busy with others: the bound is for broken code only.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def deterministic(source: str, shard: str, steps: int) -> dict[str, Any]:
    return training(
        source,
        batch={"tokensPerStep": 32 * 12, "microBatch": 2},
        length={"steps": steps},
        parallel={"shard": shard},
        deterministic=True,
        evaluation={
            "every": 20,
            "holdout": 0.2,
            "samples": 8,
            "sets": {"again": {"data": [{"source": source}], "samples": 3}},
            "metric": "again/perplexity",
        },
    )


def computed(records: list[StepRecord]) -> list[tuple[Any, ...]]:
    """What must not change by a bit."""
    return [(r.step, r.loss, r.grad_norm, r.lr, r.tokens, r.evaluation_loss, r.evaluation_values) for r in records]


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    steps = 40
    document = deterministic(write_corpus(tmp_path / "corpus"), "fsdp", steps)
    calm = Job(tmp_path / "calm", document, {"every": 5}, uid="calm")
    assert train_many(tmp_path, 2, [Part(calm)]) == [ExitCode.DONE]
    expected = calm.steps(1)
    assert [record.step for record in expected] == list(range(1, steps + 1))

    job = Job(tmp_path / "killed", document, {"every": 1000})
    # At step 20 the evaluation's best is committed: nothing later need be in memory yet.
    moment = random.randint(8, 17)
    gang = job.start(attempt=1, workers=2, dies=(1, moment))
    bystander, killed = gang.ends()
    assert (killed.exit_code, killed.rank, killed.signal) == (137, 1, signal.SIGKILL)
    assert bystander.exit_code == ExitCode.PEER_LOST, gang.log()

    assert job.commits(), f"killed in step {moment}, and nothing was committed:\n{gang.log()}"
    resumed_from = job.commits()[-1]
    assert 0 < resumed_from < steps
    assert f"step {resumed_from} was committed from what the ranks left in memory" in gang.log()
    job.start(attempt=2, resume_step=resumed_from, workers=2, forked=True).ends_well()
    before, after = job.steps(1), job.steps(2)
    assert [record.step for record in before[:resumed_from]] == list(range(1, resumed_from + 1)), "none has no record"
    assert computed(before) == computed(expected[: len(before)])
    assert computed(after) == computed(expected[resumed_from:])


@pytest.mark.long
def test_three_ranks_go_on_bit_for_bit(tmp_path: Path) -> None:
    """From three ranks on, the order of a sum shows in its last bit: DDP must lay out its buckets as before."""
    source = write_corpus(tmp_path / "corpus")
    pairs, parts = [], []
    for shard in ("ddp", "zero2"):
        document = deterministic(source, shard, 15)
        calm = Job(tmp_path / f"{shard}-calm", document, uid=f"{shard}-calm")
        job = Job(tmp_path / f"{shard}-stopped", document, uid=f"{shard}-stopped")
        pairs.append((calm, job))
        parts += [Part(calm), Part(job, 1, 0, stop_after=6), Part(job, 2, 6)]
    assert train_many(tmp_path, 3, parts) == 2 * [ExitCode.DONE, ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE]
    for calm, job in pairs:
        assert computed(job.steps(1, 2)) == computed(calm.steps(1))


def test_two_ranks_then_one_then_two_use_every_sample_once_in_the_same_order(tmp_path: Path) -> None:
    """Of texts, with noise that is drawn, and of conversations, on one set of ranks: to start them takes most of the
    time."""
    chat = write_chat(tmp_path / "chat.jsonl")
    texts = training(
        write_corpus(tmp_path / "corpus"),
        batch={"tokensPerStep": 512, "microBatch": 4},
        length={"steps": 30},
        parallel={"shard": "fsdp"},
        neftuneNoiseAlpha=5.0,
    )
    chats = training(
        chat,
        task="sft",
        data={"train": [{"source": chat, "format": "openai-chat"}], "sequenceLength": 32},
        batch={"tokensPerStep": 4 * 32, "microBatch": 2},
        length={"steps": 8},
        parallel={"shard": "fsdp"},
    )
    runs = [Resized(tmp_path, "texts", texts, (7, 19, 30)), Resized(tmp_path, "chats", chats, (2, 5, 8))]
    stopped = len(runs) * [ExitCode.PREEMPTED_COMMITTED]
    assert train_many(tmp_path, 2, [Part(run.job, 1, 0, run.stops[0]) for run in runs]) == stopped
    calm = [Part(run.calm) for run in runs]
    second = [Part(run.job, 2, run.stops[0], run.stops[1]) for run in runs]
    assert train_many(tmp_path, 1, [*calm, *second]) == len(runs) * [ExitCode.DONE] + stopped
    assert train_many(tmp_path, 2, [Part(run.job, 3, run.stops[1]) for run in runs]) == len(runs) * [ExitCode.DONE]
    for run, micro_batch, rows in zip(runs, (4, 2), (16, 4), strict=True):
        run.used_every_sample_once(micro_batch, rows)


class Resized:
    """A job that stops twice, to go on with another number of ranks, and the same on one rank throughout."""

    def __init__(self, root: Path, name: str, document: dict[str, Any], stops: tuple[int, int, int]) -> None:
        self.calm = Job(root / f"{name}-calm", document, uid=f"{name}-calm")
        self.job = Job(root / name, document, uid=name)
        self.stops = stops

    def used_every_sample_once(self, micro_batch: int, rows: int) -> None:
        assert self.job.commits() == [*self.stops]
        found = {}
        for attempt, ranks in ((1, 2), (2, 1), (3, 2)):
            found |= samples(self.job, attempt, ranks, micro_batch)
        assert found == samples(self.calm, 1, 1, micro_batch)
        assert list(found) == list(range(1, self.stops[-1] + 1))
        ids = [sample for step in found.values() for sample in step]
        assert len(ids) == self.stops[-1] * rows == len(set(ids))
        losses = [record.loss for record in self.job.steps(1, 2, 3)]
        assert losses == pytest.approx([record.loss for record in self.calm.steps(1)], rel=1e-5)
