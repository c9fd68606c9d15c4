"""Two ranks that divide the tokens of their rows (parallel.context 2) learn what one rank learns, and go on bit for bit
after a kill. Each objective's losses and gradients: tests/unit/trainer/test_trainer_divided_tokens.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.integration.trainer.bases import write_base
from tests.integration.trainer.gangs import Job, Part, train_many, training, write_corpus
from tests.integration.trainer.test_trainer_preferences import LORA, computed, learning, write_pairs

from muster.words.names import ExitCode
from muster.words.signals import StepRecord

# Real ranks on a machine that may be busy with others: the bound is for broken code only.
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 6
UNDRAWN = {**LORA, "dropout": 0.0}  # what is drawn for a token depends on the ranks that divide its row
# What differs from a job of `learning`, by name: its task, the sharding of two ranks, and an adapter.
WAYS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "dpo": ("dpo", "fsdp", None),
    "dpo-adapter": ("dpo", "ddp", UNDRAWN),
}


def next_token(root: Path, name: str, source: str, parallel: dict[str, Any]) -> Job:
    document = training(
        source,
        batch={"tokensPerStep": 256, "microBatch": 2},
        length={"steps": STEPS},
        parallel=parallel,
        evaluation={"every": 3, "holdout": 0.2, "samples": 6},
        deterministic=True,
    )
    return Job(root / name, document, uid=name)


def must_be_alike(records: list[StepRecord], reference: list[StepRecord]) -> None:
    """Compare the first steps: later ones depend on the last bit of a gradient, of which AdamW has seen few."""
    assert [record.step for record in records] == [record.step for record in reference]
    assert [record.loss for record in records] == pytest.approx([record.loss for record in reference], rel=1e-5)
    assert [record.grad_norm for record in records] == pytest.approx([r.grad_norm for r in reference], rel=1e-4)
    assert [record.tokens for record in records] == [record.tokens for record in reference]


def test_two_ranks_of_one_share_learn_what_one_rank_does(tmp_path: Path) -> None:
    pairs, base = write_pairs(tmp_path), Job(tmp_path / "base", {}, uid="base")
    write_base(base)
    source = write_corpus(tmp_path / "corpus")
    divided: dict[str, Job] = {}
    alone: dict[str, Job] = {}
    for ranks, jobs in ((2, divided), (1, alone)):
        context = {"context": ranks}
        jobs["pretrain"] = next_token(tmp_path, f"pretrain-{ranks}", source, {"shard": "fsdp", **context})
        jobs["again"] = next_token(
            tmp_path, f"again-{ranks}", source, {"shard": "ddp", "activationCheckpointing": "selective", **context}
        )
        for name, (task, shard, adapter) in WAYS.items():
            settings: dict[str, Any] = {"length": {"steps": STEPS}, "parallel": {"shard": shard, **context}}
            if adapter is not None:
                settings["adapter"] = adapter
            jobs[name] = learning(tmp_path, f"{name}-{ranks}", base, task, pairs, **settings)
        assert train_many(tmp_path, ranks, [Part(job) for job in jobs.values()]) == [ExitCode.DONE] * len(jobs)
    for name, job in divided.items():
        must_be_alike(job.steps(1), alone[name].steps(1))
    assert divided["pretrain"].commit(STEPS)["mesh"] == {"shard": "fsdp", "replicas": 1, "shards": 2, "context": 2}


def test_a_killed_rank_of_a_share_goes_on_bit_for_bit_and_another_layout_takes_over(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "corpus")
    parallel = {"shard": "fsdp", "context": 2}
    calm, killed = (next_token(tmp_path, name, source, parallel) for name in ("calm", "killed"))
    for job in (calm, killed):
        job.checkpoint = {"every": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # the launcher would give its ranks another number
        gang = killed.start(ranks=2, dies=(1, 5), forked=True)
        assert gang.ends()[0].exit_code == 137, gang.log()
        resumed_from = killed.commits()[-1]
        parts = [Part(killed, 2, resumed_from), Part(calm)]
        assert train_many(tmp_path, 2, parts) == [ExitCode.DONE] * 2
        killed.training |= {"parallel": {"shard": "auto"}}
        assert train_many(tmp_path, 1, [Part(killed, 3, resumed_from)]) == [ExitCode.DONE]
    assert computed(killed.steps(2)) == computed(calm.steps(1)[resumed_from:])
    must_be_alike(killed.steps(3), calm.steps(1)[resumed_from:])
