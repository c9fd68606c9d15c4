"""Weights that are never trained are written once in a job, and every commit is whole all the same."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.checkpoint import gang
from tests.integration.checkpoint.gang import run_gang
from tests.integration.checkpoint.one_rank import fence, outcomes, saver, state
from tests.s3_servers import BUCKET, S3Server

from muster.storage.file_store import FileStore
from muster.trainer.checkpoint import CheckpointSaver, load, read_commit, resume
from muster.trainer.checkpoint.__main__ import main
from muster.trainer.checkpoint.commits import commit_in, list_commits
from muster.trainer.checkpoint.verify import verify
from muster.words.checkpoint import is_frozen_key
from muster.words.job import Keep

Model = tuple[Any, Any]


def frozen_files(folder: Path) -> dict[str, int]:
    """When each file of frozen weights was written."""
    found = {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("frozen-*")}
    return dict(sorted(found.items()))


def saved(saving: CheckpointSaver, model: Model, steps: range) -> None:
    for step in steps:
        gang.step_once(*model, step)
        saving.save(state(*model, step), emergency=True)
        assert outcomes(saving) == [(step, True, None)]


def is_whole(folder: Path, step: int, model: Model) -> bool:
    fresh = gang.build("none", seed=9, frozen=True)
    load(folder.as_uri(), step, *fresh)
    verify(FileStore(folder), commit_in(FileStore(folder), step))
    return gang.digest(*fresh) == gang.digest(*model)


def test_later_commits_cost_what_is_trained_and_are_whole(tmp_path: Path) -> None:
    folder, model = tmp_path / "uid", gang.build("none", seed=0, frozen=True)
    with saver(folder.as_uri(), Keep(last=1)) as saving:
        saved(saving, model, range(1, 2))
        (first,) = frozen_files(folder).items()
        saved(saving, model, range(2, 4))
    assert list_commits(folder.as_uri()) == (3,), "retention took the checkpoint that wrote the file"
    assert list(frozen_files(folder).items()) == [first]
    commit = read_commit(folder.as_uri(), 3)
    trained = sum(3 * p.numel() * 4 for p in model[0].parameters() if p.requires_grad)
    assert commit.added_bytes < trained + 4096 < commit.bytes
    assert sorted(path.name for path in folder.rglob("*.safetensors")) == [
        "frozen-00000-of-00001.safetensors", "shard-00000-of-00001.safetensors",
    ]  # fmt: skip
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "uid")
    shutil.rmtree(folder)
    assert is_whole(copy, 3, model)


@pytest.mark.parametrize("megabytes", [8, pytest.param(200, marks=pytest.mark.long)])
def test_a_commit_of_a_lora_costs_what_the_lora_costs(tmp_path: Path, megabytes: int) -> None:
    """After the first, each adds less than 1.1 x (adapter and moments) to the disk."""
    width = 1024 if megabytes < 100 else 2290
    rank = max(1, width // 256)
    base = [
        torch.nn.Parameter(torch.randn(width, width), False) for _ in range(megabytes * 10**6 // (4 * width**2) + 1)
    ]
    beside = [torch.nn.Parameter(torch.randn(*shape)) for _ in base for shape in ((rank, width), (width, rank))]
    model = torch.nn.ParameterList([*base, *beside])
    optimizer = torch.optim.AdamW(beside)
    cost, folder = 3 * sum(p.numel() * 4 for p in beside), tmp_path / "uid"
    assert sum(p.numel() * 4 for p in base) >= megabytes * 10**6
    sizes = [0]
    with saver(folder.as_uri(), Keep(last=9)) as saving:
        saving.prepare(model, optimizer)
        for step in range(1, 4):
            for parameter in beside:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            saving.save(state(model, optimizer, step), emergency=True)
            assert outcomes(saving) == [(step, True, None)]
            sizes.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
    first, *later = [after - before for before, after in itertools.pairwise(sizes)]
    assert first > megabytes * 10**6
    assert all(cost < added < 1.1 * cost for added in later), (cost, later)


def test_the_next_attempt_names_the_same_files(tmp_path: Path) -> None:
    folder, model = tmp_path / "uid", gang.build("none", seed=0, frozen=True)
    with saver(folder.as_uri()) as saving:
        saved(saving, model, range(1, 3))
    before = frozen_files(folder)
    again = gang.build("none", seed=5, frozen=True)
    with saver(folder.as_uri(), Keep(last=1), attempt=2) as saving:
        saving.prepare(*again)
        saving.resumed(resume(folder.as_uri(), 2, *again, print), again[0])
        saved(saving, again, range(3, 5))
    assert frozen_files(folder) == before
    assert is_whole(folder, 4, again)


def test_one_that_began_anew_writes_its_own_and_sweeps_the_remnant(tmp_path: Path) -> None:
    folder, model = tmp_path / "uid", gang.build("none", seed=0, frozen=True)
    with saver(folder.as_uri(), fence="file:///nowhere/at/all") as saving:
        gang.step_once(*model, 1)
        saving.save(state(*model, 1), emergency=True)
        ((_, committed, _),) = outcomes(saving)
        assert not committed
    (remnant,) = frozen_files(folder)
    with saver(folder.as_uri(), attempt=2) as saving:
        saved(saving, model, range(2, 4))  # what one listing calls a remnant goes when the next does, too
    (own,) = frozen_files(folder)
    assert own != remnant
    assert is_whole(folder, 3, model)


def test_what_a_save_wrote_that_was_not_committed_is_named_by_the_next(tmp_path: Path) -> None:
    folder, model = tmp_path / "uid", gang.build("none", seed=0, frozen=True)
    status = tmp_path / "status.db"
    with saver(folder.as_uri(), fence=status.as_uri()) as saving:
        gang.step_once(*model, 1)
        saving.save(state(*model, 1), emergency=True)
        assert not outcomes(saving)[0][1]
        before = frozen_files(folder)
        fence(status, 1)
        saved(saving, model, range(2, 4))
    assert len(before) == 1
    assert frozen_files(folder) == before
    assert is_whole(folder, 3, model)


def test_files_that_somebody_removed_are_written_again(tmp_path: Path) -> None:
    folder, model = tmp_path / "uid", gang.build("none", seed=0, frozen=True)
    with saver(folder.as_uri()) as saving:
        saved(saving, model, range(1, 2))
        for path in folder.rglob("frozen-*"):
            path.unlink()
        gang.step_once(*model, 2)
        saving.save(state(*model, 2), emergency=True)
        ((_, committed, error),) = outcomes(saving)
        assert not committed
        assert "written again with the next save" in str(error)
        saved(saving, model, range(3, 5))
    assert is_whole(folder, 4, model)


def test_an_upload_process_that_dies_knows_them_afterwards(tmp_path: Path) -> None:
    folder, model = tmp_path / "uid", gang.build("none", seed=0, frozen=True)
    with saver(folder.as_uri()) as saving:
        for step in range(1, 4):
            gang.step_once(*model, step)
            saving.save(state(*model, step), emergency=True)
            os.kill(saving._process.pid, signal.SIGKILL)
            assert outcomes(saving) == [(step, True, None)]
            assert is_whole(folder, step, model)
    assert len(frozen_files(folder)) == 1


@pytest.mark.long
def test_ranks_of_any_number_read_them_and_none_writes_them_again(tmp_path: Path) -> None:
    folder = tmp_path / "uid"
    two = run_gang(2, "fsdp", "train", folder.as_uri(), steps=2, frozen=True)
    before = frozen_files(folder)
    one = run_gang(1, "none", "train", folder.as_uri(), steps=4, frozen=True, attempt=2, resume=2)
    back = run_gang(2, "ddp", "train", folder.as_uri(), steps=6, frozen=True, attempt=3, resume=4, last=1)
    assert [o["committed"] for said in (*two, *one, *back) for o in said["outcomes"]] == [True] * 10
    assert len(before) == 2
    assert frozen_files(folder) == before
    loaded = gang.build("none", seed=9, frozen=True)
    load(folder.as_uri(), 6, *loaded)
    assert gang.digest(*loaded) == back[0]["digests"]["6"]
    seen = [i for said in (two, one, back) for step in said[0]["ids"] for rank in said for i in rank["ids"][step]]
    assert len(seen) == 6 * gang.SAMPLES_PER_STEP
    assert sorted(seen[: 4 * gang.SAMPLES_PER_STEP]) == list(range(4 * gang.SAMPLES_PER_STEP)), "one epoch has 100"


def test_the_node_keeps_its_copies(moto_s3: S3Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in moto_s3.environment().items():
        monkeypatch.setenv(name, value)
    folder, model = f"s3://{BUCKET}/copies/uid", gang.build("none", seed=0, frozen=True)
    with saver(folder) as saving:
        saved(saving, model, range(1, 4))
    names = sorted(path.name for path in cache.rglob("*.safetensors"))
    assert names == ["frozen-00000-of-00001.safetensors", "shard-00000-of-00001.safetensors"]
    for about in moto_s3.client().list_objects_v2(Bucket=BUCKET)["Contents"]:
        if about["Key"].endswith(".safetensors"):  # the truth is damaged, the copies are good
            moto_s3.client().put_object(Bucket=BUCKET, Key=about["Key"], Body=bytes(about["Size"]))
    fresh = gang.build("none", seed=9, frozen=True)
    load(folder, 3, *fresh)
    assert gang.digest(*fresh) == gang.digest(*model)


def test_removing_a_commit_by_hand_spares_what_others_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, model = tmp_path / "uid", gang.build("none", seed=0, frozen=True)
    with saver(folder.as_uri()) as saving:
        saved(saving, model, range(1, 4))
    assert main(["rm", str(folder), "1"]) == 0
    assert main(["ls", str(folder)]) == 0
    assert "of its own" in capsys.readouterr().out
    assert main(["verify", str(folder)]) == 0
    assert is_whole(folder, 3, model)
    assert main(["rm", str(folder), "2"]) == main(["rm", str(folder), "3", "--force"]) == 0
    assert not list(folder.rglob("*.safetensors"))


def test_a_commit_of_an_older_muster_has_them_among_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they are written once more, in files of their own."""
    from muster.trainer.checkpoint import staging

    folder, model = tmp_path / "uid", gang.build("none", seed=0, frozen=True)
    with monkeypatch.context() as older:
        older.setattr(staging, "is_frozen", lambda tensor: False)
        with saver(folder.as_uri()) as saving:
            saved(saving, model, range(1, 2))
    assert not frozen_files(folder)
    with saver(folder.as_uri(), attempt=2) as saving:
        saving.resumed(resume(folder.as_uri(), 1, *model, print), model[0])
        saved(saving, model, range(2, 4))
    assert len(frozen_files(folder)) == 1
    assert all(is_frozen_key(f.key) == (n == 1) for n, f in enumerate(read_commit(folder.as_uri(), 3).files))
    assert is_whole(folder, 3, model)
