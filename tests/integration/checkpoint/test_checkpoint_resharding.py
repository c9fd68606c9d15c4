"""Saved at one world size and sharding, loaded at another: the same bits, and the next sample is the next one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.drills.checkpoint.faulty_proxy import Plan, faulty_proxy
from tests.integration.checkpoint.gang import SAMPLES_PER_EPOCH, SAMPLES_PER_STEP, run_gang
from tests.s3_servers import BUCKET, S3Server

from muster.words.names import Env

STEPS = 7  # more than an epoch's samples, so that the cursor has wrapped


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict]]:
    folder = (tmp_path_factory.mktemp("checkpoints") / "uid").as_uri()
    return folder, run_gang(4, "fsdp", "train", folder, steps=STEPS)


def test_every_save_is_committed_on_every_rank(saved: tuple[str, list[dict]]) -> None:
    for said in saved[1]:
        assert [(o["step"], o["committed"], o["error"]) for o in said["outcomes"]] == [
            (step, True, None) for step in range(1, STEPS + 1)
        ]


@pytest.mark.parametrize(
    ("world", "shard"),
    [
        (1, "none"),
        (3, "zero2"),
        pytest.param(2, "ddp", marks=pytest.mark.long),
        pytest.param(4, "fsdp", marks=pytest.mark.long),
        pytest.param(8, "hsdp", marks=pytest.mark.long),
    ],
)
def test_the_same_bits_under_any_sharding(saved: tuple[str, list[dict]], world: int, shard: str) -> None:
    folder, trained = saved
    ranks = run_gang(world, shard, "load", folder, step=STEPS)
    for said in ranks:
        assert said["step"] == STEPS
        assert said["digest"] == trained[0]["digests"][str(STEPS)]
        assert said["next_digest"] == ranks[0]["next_digest"]
        assert said["state"] == {"step": STEPS, "nothing": None}
        assert said["rng"] == [{"rank": rank} for rank in range(4)]
    first = STEPS * SAMPLES_PER_STEP
    for step in range(2):
        ids = sorted(i for said in ranks for i in said["ids"][step])
        assert ids == list(range(first + step * SAMPLES_PER_STEP, first + (step + 1) * SAMPLES_PER_STEP))
    assert first > SAMPLES_PER_EPOCH


def test_weights_split_in_two_dimensions_have_the_same_bits_on_any_layout(tmp_path: Path) -> None:
    """Tensor parallelism splits columns or rows of a weight, and FSDP what is left of it. State and weights are named
    by the block that they are, and the state is split as its weight is."""
    folder = (tmp_path / "uid").as_uri()
    trained = run_gang(4, "tensor", "train", folder, steps=2, ours=True)
    for world, shard in ((4, "tensor"), (1, "none")):
        for said in run_gang(world, shard, "load", folder, step=2, ours=True):
            assert said["digest"] == trained[0]["digests"]["2"]


def test_every_byte_is_written_once(saved: tuple[str, list[dict]]) -> None:
    folder = Path(saved[0].removeprefix("file://"))
    commit = json.loads((folder / f"commits/step-{STEPS:08d}.json").read_text())
    written = 0
    for file in commit["files"]:
        with safe_open(str(folder / file["key"]), framework="pt") as shard:
            written += sum(shard.get_tensor(name).nbytes for name in shard.keys())  # noqa: SIM118
    elements = {name: torch.Size(entry["shape"]).numel() for name, entry in commit["tensors"].items()}
    sizes = {"F32": 4, "I64": 8}
    assert written == sum(count * sizes[commit["tensors"][name]["dtype"]] for name, count in elements.items())
    assert not any("head.weight" in name for name in elements), "the tied weight is there twice"
    assert not any("not_kept" in name for name in elements)


@pytest.mark.long
def test_replicated_weights_are_spread_over_the_ranks(tmp_path: Path) -> None:
    folder = (tmp_path / "uid").as_uri()
    run_gang(2, "ddp", "train", folder, steps=1)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "uid").glob("step-*/attempt-1/*"))]
    assert len(sizes) == 2
    assert max(sizes) < 1.2 * min(sizes), "one rank wrote far more than the other"
    assert run_gang(1, "none", "load", folder, step=1)[0]["step"] == 1


def test_another_model_is_refused_with_every_difference(saved: tuple[str, list[dict]]) -> None:
    for said in run_gang(2, "ddp", "load", saved[0], step=STEPS, extra=True):
        assert said["kind"] == "CheckpointMismatch"
        assert said["untouched"]
        assert "(5 differences)" in said["error"]
        for name in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"):
            assert f"model/blocks.3.{name}: the model has it" in said["error"]


def test_weights_alone_for_a_fine_tune(saved: tuple[str, list[dict]]) -> None:
    said = run_gang(1, "none", "load", saved[0], step=STEPS, weights_only=True)[0]
    weights = {name: bits for name, bits in saved[1][0]["digests"][str(STEPS)].items() if name.startswith("model/")}
    assert said["digest"] == weights


def test_all_ranks_fall_back_to_the_same_commit(saved: tuple[str, list[dict]], tmp_path: Path) -> None:
    """One bit of one shard: the rank that reads it finds it, and no rank has changed a tensor or goes on alone."""
    shutil.copytree(saved[0].removeprefix("file://"), tmp_path / "uid")
    shard = sorted((tmp_path / "uid").glob(f"step-{STEPS:08d}/*/*"))[-1]
    data = bytearray(shard.read_bytes())
    data[-9] ^= 1
    shard.write_bytes(data)
    ranks = run_gang(2, "ddp", "resume", (tmp_path / "uid").as_uri(), step=STEPS)
    for said in ranks:
        assert (said["step"], said["digest"]) == (STEPS - 1, saved[1][0]["digests"][str(STEPS - 1)])
    assert [len(said["notes"]) for said in ranks] == [1, 0]
    assert f"{shard.name}: bytes 0 to {len(data)} do not have the checksum" in ranks[0]["notes"][0]


@pytest.mark.long
def test_each_byte_is_fetched_once_per_node_and_not_at_all_where_the_node_has_it(
    rclone_s3: S3Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, folder = Plan(), f"s3://{BUCKET}/fetched"
    with faulty_proxy(rclone_s3.url, plan) as url:
        for name, value in S3Server(url).environment().items():
            monkeypatch.setenv(name, value)
        trained = run_gang(2, "fsdp", "train", folder, steps=1)
        copies = sorted(cache.rglob("*.safetensors"))
        kept, lost = sum(path.stat().st_size for path in copies), copies[1].stat().st_size
        plan.done.clear()
        warm = run_gang(2, "ddp", "load", folder, step=1)
        assert plan.done["bytes of safetensors"] == 0
        copies[1].unlink()  # the node that had it is gone: its shard is read from afar, and nothing else
        replaced = run_gang(2, "ddp", "load", folder, step=1)
        assert plan.done["bytes of safetensors"] == lost < kept
        plan.done.clear()
        monkeypatch.delenv(Env.CACHE_DIR)
        cold = run_gang(2, "ddp", "load", folder, step=1)
        assert plan.done["bytes of safetensors"] == kept > 0
    for said in (*warm, *replaced, *cold):
        assert said["digest"] == trained[0]["digests"]["1"]
