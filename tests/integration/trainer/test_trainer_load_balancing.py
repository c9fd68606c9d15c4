"""A mixture with its load-balancing loss: the same on two ranks that share it as on one that has it whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.trainer.gangs import Job, Part, train_many, training, write_corpus
from tests.model_families import write_model

from muster.words.names import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.long
def test_the_load_balancing_loss_is_the_same_however_the_model_is_shared(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "corpus")
    jobs: dict[int, list[Job]] = {1: [], 2: []}
    for coefficient in (0.0, 0.5):
        folder = tmp_path / f"model-{coefficient}"
        write_model(folder, "mixtral", output_router_logits=True, router_aux_loss_coef=coefficient)
        document = training(
            source,
            model={"source": folder.as_uri()},
            batch={"tokensPerStep": 256, "microBatch": 2},
            length={"steps": 4},
            parallel={"shard": "fsdp", "activationCheckpointing": "full"},
        )
        for ranks, each in jobs.items():
            each.append(Job(tmp_path / f"{coefficient}-{ranks}", document, uid=f"{coefficient}-{ranks}"))
    for ranks, each in jobs.items():
        assert train_many(tmp_path / f"on-{ranks}", ranks, [*map(Part, each)]) == [ExitCode.DONE] * 2
    alone, shared = ([[record.loss for record in job.steps(1)] for job in jobs[ranks]] for ranks in (1, 2))
    for one, two in zip(alone, shared, strict=True):
        assert two == pytest.approx(one, abs=1e-5)
    assert alone[1][0] - alone[0][0] > 0.5  # half of at least 1


@pytest.mark.long
def test_ranks_without_an_expert_learn_and_commit_like_one_that_has_all(tmp_path: Path) -> None:
    """Two experts on three ranks: the last one holds none. Stopped after two steps, and gone on with."""
    source = write_corpus(tmp_path / "corpus")
    write_model(tmp_path / "model", "mixtral", num_local_experts=2)
    alone, shared = (
        Job(
            tmp_path / shard,
            training(
                source,
                model={"source": (tmp_path / "model").as_uri()},
                batch={"tokensPerStep": 384, "microBatch": 2},
                length={"steps": 4},
                parallel={"shard": shard},
            ),
            uid=shard,
        )
        for shard in ("ddp", "zero2")
    )
    assert train_many(tmp_path / "one", 1, [Part(alone)]) == [ExitCode.DONE]
    assert train_many(tmp_path / "three", 3, [Part(shared, stop_after=2)]) == [ExitCode.PREEMPTED_COMMITTED]
    assert train_many(tmp_path / "again", 3, [Part(shared, 2, 2)]) == [ExitCode.DONE]
    losses = [record.loss for record in shared.steps(1, 2)]
    assert losses == pytest.approx([record.loss for record in alone.steps(1)], rel=1e-5)
