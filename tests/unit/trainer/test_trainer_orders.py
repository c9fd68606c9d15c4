"""What a worker is told, what it decides from that before any device is touched, and what it refuses."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.plan import memory
from muster.plan.layouts import ModelLayout
from muster.recipe.architecture import PRESETS, Architecture
from muster.recipe.training import TrainingConfig
from muster.trainer.config import DataParallel, RankPosition, WorkerRun, data_parallel, read_ranks, read_run
from muster.trainer.errors import OutOfMemory, UserError, exit_code
from muster.trainer.models import sharding
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.train import origin
from muster.words.base import dump
from muster.words.checkpoint import Commit, DataCursor
from muster.words.names import Env, ExitCode

GIB = 2**30


def document(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "model": {"preset": "muster-1m"},
        "data": {"train": [{"source": "x"}], "sequenceLength": 64},
        "batch": {"tokensPerStep": 512, "microBatch": 2},
        "length": {"steps": 5},
    }
    return base | changes


def config(**changes: Any) -> TrainingConfig:
    return TrainingConfig.model_validate(document(**changes))


def environment(**changes: str) -> dict[str, str]:
    base = {
        Env.JOB_UID: "uid-1",
        Env.ATTEMPT: "3",
        Env.RESUME_STEP: "40",
        Env.CHECKPOINT_URI: "file:///c/uid-1",
        Env.CONFIG: json.dumps({"training": document(), "checkpoint": {"every": 20}}),
    }
    return base | changes


def run_of(training: TrainingConfig, resume_step: int = 0, folder: str = "file:///nowhere/uid-1") -> WorkerRun:
    given = environment(**{Env.CONFIG: json.dumps({"training": dump(training), "checkpoint": {}})})
    return read_run({**given, Env.RESUME_STEP: str(resume_step), Env.CHECKPOINT_URI: folder})


def ranks(world: int, local_world: int | None = None) -> RankPosition:
    return RankPosition(rank=0, local_rank=0, world=world, local_world=local_world or world)


def test_orders_are_read() -> None:
    run = read_run(environment(MUSTER_WORKER_DIR="/w"))
    assert (run.job, run.job_uid, run.attempt, run.worker, run.resume_step) == ("job", "uid-1", 3, 0, 40)
    assert (run.folder, run.fence, run.worker_dir, run.cache_dir) == (
        "file:///c/uid-1",
        None,
        Path("/w"),
        Path("/w/cache"),
    )
    assert run.checkpoint.every == 20
    assert run.document["seed"] == 0  # defaults are filled in


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({Env.CONFIG: ""}, "MUSTER_CONFIG is not set"),
        ({Env.CONFIG: "{"}, "MUSTER_CONFIG is not JSON"),
        ({Env.CONFIG: "[]"}, "must be a JSON object"),
        ({Env.JOB_UID: ""}, "MUSTER_JOB_UID is not set"),
        ({Env.ATTEMPT: "two"}, "MUSTER_ATTEMPT must be a whole number, not 'two'"),
        ({Env.CONFIG: json.dumps({"training": document(sede=3)})}, "training.sede: unknown key. Did you mean 'seed'?"),
        ({Env.CONFIG: json.dumps({"training": document(seed="3")})}, "training.seed: must be a whole number"),
        ({Env.CONFIG: json.dumps({"training": document(), "checkpoint": {"evry": 1}})}, "checkpoint.evry"),
    ],
)
def test_bad_orders_name_the_place(changes: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        read_run(environment(**changes))
    assert message in str(refused.value)


def test_ranks_as_torchrun_says() -> None:
    told = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert read_ranks(told) == RankPosition(rank=5, local_rank=1, world=8, local_world=4)
    assert read_ranks(told).nodes == 2
    assert read_ranks({}) == RankPosition(rank=0, local_rank=0, world=1, local_world=1)


def test_a_batch_that_cannot_be_divided_says_what_to_change() -> None:
    assert data_parallel(config(), ranks(2)) == DataParallel(size=2, shares=(0,))
    with pytest.raises(UserError, match=r"can't be divided over 3 ranks.*change tokensPerStep or microBatch"):
        data_parallel(config(), ranks(3))


# --- sharding ---


def model(preset: str) -> DecoderModel:
    return DecoderModel(PRESETS[preset])


def test_sharding_lowers_the_need_in_order() -> None:
    training = config(data={"train": [{"source": "x"}], "sequenceLength": 4096}, batch={"tokensPerStep": 2**19})
    needs = [
        memory.estimate(model("llama-8b").size(), training, ModelLayout.of(shard, 8), 16).total
        for shard in ("ddp", "zero2", "fsdp")
    ]
    assert needs == sorted(needs, reverse=True)
    assert needs[0] > 128 * GIB  # 8 G weights: 16 bytes each without activations


def test_the_need_of_a_known_model() -> None:
    """Llama-3.1-8B, bf16, FSDP over 8, full checkpointing: 12 bytes per weight sharded 8 ways, and gradients 4."""
    training = config(precision="bf16", parallel={"activationCheckpointing": "full"})
    need = memory.estimate(model("llama-8b").size(), training, ModelLayout.of("fsdp", 8), 1)
    weights = PRESETS["llama-8b"].parameters
    assert need.optimizer == pytest.approx(8 * weights / 8, rel=1e-6)
    assert need.weights == pytest.approx(4 * weights / 8, rel=1e-6)
    assert need.gradients == pytest.approx(4 * weights / 8, rel=1e-6)
    assert need.buffers > 2 * 2 * 128_256 * 4096  # the embedding and the head, gathered in bf16


@pytest.mark.parametrize(("capacity", "expected"), [(80 * GIB, "ddp"), (12 * GIB, "zero2"), (7 * GIB, "fsdp")])
def test_auto_takes_the_lowest_that_fits(capacity: int, expected: str) -> None:
    training = config(precision="bf16", batch={"tokensPerStep": 1024, "microBatch": 2})
    layout = sharding.plan(model("llama-1b"), training, ranks(8), capacity)
    assert layout.shard == expected
    assert layout.need.total <= capacity * memory.USABLE


def test_auto_that_fits_nowhere_shows_the_arithmetic() -> None:
    with pytest.raises(OutOfMemory) as refused:
        sharding.plan(model("llama-8b"), config(batch={"tokensPerStep": 2**16, "microBatch": 2}), ranks(2), 16 * GIB)
    text = str(refused.value)
    for part in (
        "needs about",
        "has 16.00 GiB",
        "8030.3 M parameters",
        "precision bf16 (now fp32)",
        "ranks in place of 2",
    ):
        assert part in text


def test_hsdp_lays_copies_over_nodes() -> None:
    layout = sharding.plan(model("muster-1m"), config(parallel={"shard": "hsdp"}), ranks(4, 2), 64 * GIB)
    assert layout.describe() == {"shard": "hsdp", "replicas": 2, "shards": 2}
    asked = config(parallel={"shard": "hsdp", "replicas": 4}, batch={"tokensPerStep": 512, "microBatch": 1})
    assert sharding.plan(model("muster-1m"), asked, ranks(8), 64 * GIB).shards == 2


@pytest.mark.parametrize(
    ("replicas", "world", "local", "message"),
    [(None, 4, 4, "there is one node: set parallel.replicas"), (3, 4, 2, "replicas 3 does not divide the 4 ranks")],
)
def test_impossible_hsdp(replicas: int | None, world: int, local: int, message: str) -> None:
    asked = config(parallel={"shard": "hsdp"} | ({"replicas": replicas} if replicas else {}))
    with pytest.raises(UserError, match=message):
        sharding.plan(model("muster-1m"), asked, ranks(world, local), 64 * GIB)


def test_gradients_are_held_whole_only_where_they_fit() -> None:
    accumulating = config(batch={"tokensPerStep": 1024, "microBatch": 1}, parallel={"shard": "fsdp"})
    small, large = model("muster-1m"), model("llama-1b")
    assert sharding.plan(small, accumulating, ranks(2), 8 * GIB).hold_gradients
    assert not sharding.plan(large, accumulating, ranks(2), 16 * GIB).hold_gradients


def test_a_device_for_each_rank() -> None:
    assert sharding.choose_device(ranks(2), {Env.DEVICE: "cpu"}) == torch.device("cpu")
    with pytest.raises(UserError, match="must be cpu or cuda, not 'tpu'"):
        sharding.choose_device(ranks(2), {Env.DEVICE: "tpu"})


# --- origin ---


@dataclass
class Words:
    """A tokenizer of so many words."""

    vocab_size: int
    kind: str = "words"

    def describe(self) -> dict[str, Any]:
        return {"kind": self.kind, "size": self.vocab_size}


def commit(training: TrainingConfig, architecture: Architecture, tokenizer: dict[str, Any]) -> Commit:
    return Commit(
        job="j",
        job_uid="u",
        attempt=1,
        step=40,
        committed_at=1.0,
        world_size=2,
        files=(),
        tensors={},
        cursor=DataCursor(seed=0, epoch=0, sample=640),
        config=dump(training),
        architecture=dump(architecture),
        tokenizer=tokenizer,
    )


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> list[Commit]:
    """The commits that can be read: the first of this list."""
    found: list[Commit] = []
    monkeypatch.setattr(origin, "read_commit", lambda folder, step: found[0])
    monkeypatch.setattr(origin, "newest_readable", lambda folder, at_most, report, check: found[0])
    monkeypatch.setattr(origin, "tokenizer_from_commit", lambda saved, beside=None: Words(saved["size"]))
    monkeypatch.setattr(origin, "load_tokenizer", lambda spec: Words(int(spec.split("-")[1]) if "-" in spec else 260))
    return found


def test_a_fresh_start(there: list[Commit]) -> None:
    found = origin.find_origin(run_of(config()), print)
    assert (found.model, found.resume, found.weights) == (model("muster-1m"), None, None)


def test_resume_takes_shape_and_tokenizer_from_the_commit(there: list[Commit]) -> None:
    there.append(commit(config(), PRESETS["muster-1m"], {"size": 260}))
    found = origin.find_origin(run_of(config(), resume_step=40), print)
    assert found.resume == there[0]
    assert found.tokenizer.vocab_size == 260


def test_what_may_change_between_attempts(there: list[Commit]) -> None:
    there.append(commit(config(), PRESETS["muster-1m"], {"size": 260}))
    later = config(
        parallel={"shard": "fsdp", "activationCheckpointing": "full"},
        length={"steps": 50},
        batch={"tokensPerStep": 512, "microBatch": 1},
        evaluation={"every": 3, "data": [{"source": "y"}]},
    )
    assert origin.find_origin(run_of(later, resume_step=40), print).resume == there[0]


def test_what_may_not_change_is_listed(there: list[Commit]) -> None:
    there.append(commit(config(), PRESETS["muster-1m"], {"size": 260}))
    later = config(
        optimizer={"lr": 0.5, "schedule": {"warmupSteps": 7}},
        precision="bf16",
        seed=9,
        evaluation={"every": 3, "holdout": 0.1},
    )
    with pytest.raises(UserError) as refused:
        origin.find_origin(run_of(later, resume_step=40), print)
    text = str(refused.value)
    assert "checkpoint at step 40 in file:///nowhere/uid-1" in text
    for line in (
        "training.optimizer.lr: 0.0003 → 0.5",
        "training.optimizer.schedule.warmupSteps: 0 → 7",
        "training.precision: 'fp32' → 'bf16'",
        "training.seed: 0 → 9",
        "training.evaluation.holdout: 0.0 → 0.1",
    ):
        assert line in text
    assert "training.evaluation.every" not in text


@pytest.mark.parametrize(
    ("later", "line"),
    [
        ({"model": {"preset": "muster-4m"}}, "training.model.preset: 'muster-1m' → 'muster-4m'"),
        (
            {"data": {"train": [{"source": "x"}], "sequenceLength": 64, "tokenizer": "words-999"}},
            "training.data.tokenizer: 'bytes' → 'words-999'",
        ),
    ],
)
def test_another_model_or_vocabulary_is_no_resume(there: list[Commit], later: dict[str, Any], line: str) -> None:
    there.append(commit(config(), PRESETS["muster-1m"], {"size": 260}))
    with pytest.raises(UserError) as refused:
        origin.find_origin(run_of(config(**later), resume_step=40), print)
    assert line in str(refused.value)
    assert "submit a new job with model.from to start from this checkpoint's weights" in str(refused.value)


def from_commit(**data: Any) -> TrainingConfig:
    return config(
        model={"from": {"uri": "file:///base/u", "step": "best"}},
        data={"train": [{"source": "x"}], "sequenceLength": 64, **data},
        batch={"tokensPerStep": 8 * data.get("sequenceLength", 64)},
    )


def test_weights_from_another_job(there: list[Commit]) -> None:
    there.append(commit(config(), PRESETS["muster-4m"], {"size": 260}))
    found = origin.find_origin(run_of(from_commit()), print)
    assert (found.model, found.weights, found.resume) == (
        model("muster-4m"),
        ("file:///base/u", 40),
        None,
    )


@pytest.mark.parametrize(
    ("training", "saved", "message"),
    [
        (from_commit(tokenizer="words-999"), {"size": 260}, r"vocabulary of 999 tokens, but the checkpoint .* has 260"),
        (from_commit(tokenizer="words-200"), {"size": 260}, r"not the tokenizer that .* \(vocabularies 200 and 260\)"),
        (from_commit(sequenceLength=4160), {"size": 260}, "4160 is longer than the position limit 4096"),
        (
            config(model={"from": {"job": "base"}}),
            {"size": 260},
            "model.from.job 'base' was not resolved to a checkpoint folder",
        ),
        (
            config(data={"train": [{"source": "x"}], "sequenceLength": 64, "tokenizer": "words-300"}),
            {},
            "data.tokenizer words-300 has a vocabulary of 300 tokens, but the model has 260",
        ),
    ],
)
def test_origins_that_do_not_fit(
    there: list[Commit], training: TrainingConfig, saved: dict[str, Any], message: str
) -> None:
    there.append(commit(config(), PRESETS["muster-1m"], saved))
    with pytest.raises(UserError, match=message):
        origin.find_origin(run_of(training), print)


def test_a_folder_without_commits_is_no_reason_to_try_again(tmp_path: Path) -> None:
    """It was a failure of storage, and the job tried five times."""
    nothing = config(model={"from": {"uri": tmp_path.as_uri()}})
    with pytest.raises(UserError, match=r"model\.from: .* holds no checkpoint; give the folder") as raised:
        origin.find_origin(run_of(nothing), print)
    assert exit_code(raised.value) == ExitCode.USER_ERROR


MEASURE = r"""
import re, sys
from pathlib import Path
import torch
from muster.recipe.architecture import PRESETS
from muster.trainer.models.decoder import build
from muster.trainer.models.init import initialize
from muster.recipe.optimizer_config import OptimizerConfig
from muster.trainer.train.optimizer import make_optimizer

def status(what):  # getrusage would count what pytest held when it forked
    return int(re.search(what + r":\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def train(shape):
    model = build(shape, recompute=sys.argv[1])
    model.to_empty(device="cpu")
    initialize(model, shape, 0)
    optimizer = make_optimizer(model, OptimizerConfig())
    tokens = torch.randint(0, 256, (4, 256))
    documents = (torch.arange(256) // 150).expand(4, 256)
    for _ in range(2):
        model(tokens, torch.arange(256).expand(4, 256), documents, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

train(PRESETS["muster-1m"])  # libraries, threads and kernels are not the model's
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
train(PRESETS["muster-15m"])
print(status("VmHWM") - before)
"""


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.long), "full"])
def test_the_estimate_is_near_what_a_rank_takes(recompute: str) -> None:
    """A rank alone, in a process of its own; the process's own share is left out on both sides."""
    training = config(
        model={"preset": "muster-15m"},
        data={"train": [{"source": "x"}], "sequenceLength": 256},
        batch={"tokensPerStep": 1024, "microBatch": 4},
        parallel={"activationCheckpointing": recompute},
    )
    estimated = memory.estimate(model("muster-15m").size(), training, ModelLayout.of("ddp", 1), 1)
    estimated = estimated.total - estimated.framework
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # large blocks are given back: no fragments
    command = [sys.executable, "-c", MEASURE, recompute]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert estimated == pytest.approx(int(done.stdout), rel=0.1)
