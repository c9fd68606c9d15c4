"""AdamW in eight bits, weights in bf16 alone, the mean of weights and state in host memory: through whole jobs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.trainer.gangs import Job, Part, samples, train_many, training, write_corpus

from muster.storage.file_store import FileStore
from muster.trainer.checkpoint import read_commit
from muster.trainer.convert.export import export
from muster.trainer.convert.pieces import whole
from muster.words.names import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Rows of 64 and 128 values, so that most moments are in eight bits; norms are not.
SHAPE = {"dim": 64, "layers": 2, "heads": 4, "kvHeads": 2, "ffnDim": 128, "vocabSize": 260, "maxPositions": 32}
SMALL: dict[str, Any] = {"name": "adamw8bit", "masterWeights": False, "ema": {"decay": 0.9}}
STEPS = 12


def document(source: str, optimizer: dict[str, Any], precision: str = "bf16", **changes: Any) -> dict[str, Any]:
    common = {"lr": 1e-3, "schedule": {"warmupSteps": 3}}
    return training(
        source,
        model={"architecture": SHAPE},
        optimizer=common | optimizer,
        precision=precision,
        **({"length": {"steps": STEPS}, "parallel": {"shard": "fsdp"}, "deterministic": True} | changes),
    )


def computed(job: Job, *attempts: int) -> list[tuple[Any, ...]]:
    return [(r.step, r.loss, r.grad_norm, r.lr, r.tokens) for r in job.steps(*attempts)]


@pytest.mark.long
def test_small_state_is_committed_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    """Eight bits, weights in bf16 and their mean, all at once, sharded; the state goes to host memory on the way."""
    source = write_corpus(tmp_path / "corpus")
    calm, stopped = (Job(tmp_path / name, document(source, SMALL), uid=name) for name in ("calm", "stopped"))
    moved = Job(tmp_path / "stopped", document(source, SMALL | {"offload": True}), uid="stopped")
    parts = [Part(calm), Part(stopped, 1, 0, stop_after=5), Part(moved, 2, 5)]
    assert train_many(tmp_path, 2, parts) == [ExitCode.DONE, ExitCode.PREEMPTED_COMMITTED, ExitCode.DONE]
    assert computed(stopped, 1, 2) == computed(calm, 1)

    commit, store = read_commit(calm.folder.as_uri(), "last"), FileStore(calm.folder)
    name = "layers.0.feed_forward.gate_proj.weight"
    assert {full.rpartition("/")[2]: entry.dtype for full, entry in commit.tensors.items() if name in full} == {
        name: "BF16", "step": "F32", "exp_avg": "U8", "exp_avg_sq": "U8", "exp_avg_absmax": "F32",
        "exp_avg_sq_absmax": "F32", "ema": "F32",
    }  # fmt: skip
    assert export(store, "last", tmp_path / "mean", ema=True)["weights"] == "ema"
    export(store, "last", tmp_path / "last")
    held = whole(store, commit, [f"optimizer/{name}/ema"])[f"optimizer/{name}/ema"]
    mean, last = (load_file(tmp_path / f / "model.safetensors") for f in ("mean", "last"))
    theirs = next(n for n in mean if n.endswith("layers.0.mlp.gate_proj.weight"))
    assert torch.equal(mean[theirs].flatten(), torch.frombuffer(held, dtype=torch.float32))
    assert last[theirs].dtype == torch.bfloat16
    assert not torch.equal(last[theirs].float(), mean[theirs])
    assert torch.nn.functional.cosine_similarity(last[theirs].float().flatten(), mean[theirs].flatten(), 0) > 0.99


@pytest.mark.long
def test_small_state_is_resharded_from_two_ranks_to_one_and_back(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "corpus")
    calm, changed = (Job(tmp_path / name, document(source, SMALL), uid=name) for name in ("calm", "changed"))
    done, preempted = ExitCode.DONE, ExitCode.PREEMPTED_COMMITTED
    assert train_many(tmp_path, 2, [Part(calm), Part(changed, 1, 0, stop_after=4)]) == [done, preempted]
    assert train_many(tmp_path, 1, [Part(changed, 2, 4, stop_after=8)]) == [preempted]
    assert train_many(tmp_path, 2, [Part(changed, 3, 8)]) == [done]
    found = samples(changed, 1, 2, 4) | samples(changed, 2, 1, 4) | samples(changed, 3, 2, 4)
    assert found == samples(calm, 1, 2, 4)
    assert [r.loss for r in changed.steps(1, 2, 3)] == pytest.approx([r.loss for r in calm.steps(1)], rel=5e-3)


@pytest.mark.long
def test_what_takes_less_memory_learns_as_well(tmp_path: Path) -> None:
    """Over 60 steps the loss falls by more than a quarter, and ends within half a percent of that of fp32 masters with
    fp32 moments."""
    source = write_corpus(tmp_path / "corpus")
    eight, alone = {"name": "adamw8bit"}, {"masterWeights": False}
    ways: dict[str, dict[str, Any]] = {"masters": {}, "eight": eight, "alone": alone, "both": SMALL}
    jobs = {
        name: Job(tmp_path / name, document(source, way, length={"steps": 60}, parallel={"shard": "ddp"}), uid=name)
        for name, way in ways.items()
    }
    assert train_many(tmp_path, 1, [Part(job) for job in jobs.values()]) == [ExitCode.DONE] * len(jobs)
    ends = {name: sum(r.loss for r in job.steps(1)[-5:]) / 5 for name, job in jobs.items()}
    assert ends["masters"] < 0.75 * jobs["masters"].steps(1)[0].loss
    assert ends == {name: pytest.approx(ends["masters"], rel=0.005) for name in ends}
