"""Sharding and accumulation change how the work is done, never what comes out."""

from pathlib import Path
from typing import Any

import pytest
from tests.integration.trainer.gangs import Job, Part, train_many, training, write_corpus

from muster.words.signals import StepRecord

# Real ranks on a machine that may be busy with others: the bound is for broken code only.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 30
TOLERANCE = 1e-5
# Sharding and micro-batch. 16 samples: 8 and 2 on two ranks are accumulation 1 and 4.
TWO_RANKS = [("ddp", 8), ("ddp", 2), ("zero2", 2), ("fsdp", 2)]


def variant(root: Path, name: str, source: str, shard: str, micro_batch: int, **parallel: Any) -> Job:
    document = training(
        source,
        batch={"tokensPerStep": 512, "microBatch": micro_batch},
        length={"steps": STEPS},
        parallel={"shard": shard, **parallel},
    )
    return Job(root / name, document, uid=name)


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[StepRecord]]:
    """The same steps of 16 samples in many ways."""
    root = tmp_path_factory.mktemp("same-losses")
    source = write_corpus(root / "corpus")
    two = {f"{shard}-{size}": variant(root, f"{shard}-{size}", source, shard, size) for shard, size in TWO_RANKS}
    two["selective"] = variant(root, "selective", source, "fsdp", 8, activationCheckpointing="selective")
    two["full"] = variant(root, "full", source, "ddp", 8, activationCheckpointing="full")
    one = {"alone": variant(root, "alone", source, "ddp", 16)}
    for ranks, jobs in ((1, one), (2, two)):
        train_many(root, ranks, [Part(job) for job in jobs.values()])
    return {name: job.steps(1) for name, job in {**one, **two}.items()}


@pytest.mark.parametrize(
    "name",
    [
        *(f"{shard}-{size}" for shard, size in TWO_RANKS),
        "selective",
        "full",
    ],
)
def test_the_losses_are_those_of_one_rank(losses: dict[str, list[StepRecord]], name: str) -> None:
    must_be_alike(losses[name], losses["alone"])


def test_the_losses_of_four_ranks_in_two_replicas_are_the_same(
    losses: dict[str, list[StepRecord]], tmp_path: Path
) -> None:
    replicated = variant(tmp_path, "hsdp", write_corpus(tmp_path / "corpus"), "hsdp", 2, replicas=2)
    train_many(tmp_path, 4, [Part(replicated)])
    must_be_alike(replicated.steps(1), losses["alone"])


def test_the_losses_of_a_compiled_model_are_the_same(losses: dict[str, list[StepRecord]], tmp_path: Path) -> None:
    """On one rank, because each rank compiles the same for half a minute of one core."""
    compiled = variant(tmp_path, "compiled", write_corpus(tmp_path / "corpus"), "fsdp", 8, compile=True)
    train_many(tmp_path, 1, [Part(compiled)])
    must_be_alike(compiled.steps(1), losses["alone"])


def must_be_alike(found: list[StepRecord], reference: list[StepRecord]) -> None:
    assert [record.step for record in found] == list(range(1, STEPS + 1))
    assert [record.loss for record in found] == pytest.approx([record.loss for record in reference], rel=TOLERANCE)
    assert [record.grad_norm for record in found] == pytest.approx([r.grad_norm for r in reference], rel=1e-3)


def test_the_loss_falls(losses: dict[str, list[StepRecord]]) -> None:
    alone = losses["alone"]
    assert alone[-1].loss < 0.8 * alone[0].loss
