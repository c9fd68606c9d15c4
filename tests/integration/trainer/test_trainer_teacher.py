"""Distillation keeps the trainer's promises: the same bits after a stop, every sample once, and one teacher."""

from pathlib import Path
from typing import Any

import pytest
from tests.integration.trainer.bases import write_base
from tests.integration.trainer.gangs import ARCHITECTURE, Job, Part, samples, train_many, training, write_corpus

from muster.words.names import ExitCode
from muster.words.signals import StepRecord

# Real ranks on a machine that may be busy with others: the bound is for broken code only.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 9


def learning(root: Path, name: str, teacher: Job, shard: str) -> Job:
    document = training(
        write_corpus(root / "corpus"),
        model={"architecture": {**ARCHITECTURE, "dim": 16, "ffnDim": 32}},
        distillation={
            "teacher": {"from": {"uri": f"file://{teacher.folder}", "step": "last"}},
            "temperature": 2.0,
            "weight": 0.6,
        },
        length={"steps": STEPS},
        evaluation={"every": 4, "holdout": 0.1, "samples": 8},
        parallel={"shard": shard},
        deterministic=True,
    )
    return Job(root / name, document, uid=name)


def computed(records: list[StepRecord]) -> list[tuple[Any, ...]]:
    return [(r.step, r.loss, r.grad_norm, r.values, r.evaluation_loss, r.evaluation_values) for r in records]


@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_a_stopped_job_goes_on_bit_for_bit_and_on_other_ranks(tmp_path: Path, shard: str) -> None:
    teacher = Job(tmp_path / "teacher", {}, uid="teacher")
    write_base(teacher)
    whole, stopped, calm, moved = (
        learning(tmp_path, name, teacher, shard) for name in ("whole", "stopped", "calm", "moved")
    )
    stop = ExitCode.PREEMPTED_COMMITTED
    parts = [Part(whole), Part(stopped, 1, 0, 4), Part(stopped, 2, 4), Part(moved, 1, 0, 3)]
    assert train_many(tmp_path, 2, parts) == [ExitCode.DONE, stop, ExitCode.DONE, stop]
    assert train_many(tmp_path, 1, [Part(calm), Part(moved, 2, 3, 6)]) == [ExitCode.DONE, stop]
    assert train_many(tmp_path, 2, [Part(moved, 3, 6)]) == [ExitCode.DONE]
    assert computed(stopped.steps(1, 2)) == computed(whole.steps(1))
    first, last = whole.steps(1)[0], whole.steps(1)[-1]
    assert last.values["teacher_kl"] < first.values["teacher_kl"]
    assert last.loss < first.loss
    found = {step: ids for n, ranks in ((1, 2), (2, 1), (3, 2)) for step, ids in samples(moved, n, ranks, 4).items()}
    assert found == samples(calm, 1, ranks=1, micro_batch=4)
    assert [r.loss for r in moved.steps(1, 2, 3)] == pytest.approx([r.loss for r in calm.steps(1)], rel=1e-4)
    told = whole.commit(STEPS)["state"]["teacher"]
    assert (told["address"], told["step"]) == (f"file://{teacher.folder}", 8)
    assert not any("teacher" in name for name in whole.commit(STEPS)["tensors"])  # by its address, never a copy
