"""200 of 200 random flips and truncations are caught before a tensor changes, and the commit before is found."""

import argparse
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.drills.checkpoint.damage import damage
from tests.integration.checkpoint import gang, one_rank
from tests.integration.checkpoint.one_rank import trained

from muster.storage.checksum import PART_BYTES
from muster.storage.errors import StoreError
from muster.storage.file_store import FileStore
from muster.storage.opening import open_store
from muster.storage.readers import being_read, reading
from muster.trainer.checkpoint import (
    CheckpointError,
    DamagedCommit,
    list_commits,
    load,
    loader,
    newest_readable,
    resume,
)
from muster.trainer.checkpoint.__main__ import ls
from muster.trainer.checkpoint.collect import CollectionState, collect
from muster.trainer.checkpoint.commits import commit_in, read_commit
from muster.trainer.checkpoint.failures import UnknownFormat
from muster.trainer.checkpoint.node_cache import NodeCache
from muster.trainer.errors import StorageError
from muster.words.checkpoint import QUARANTINE, canonical, commit_key, seal_of, step_name
from muster.words.job import Keep

DAMAGES = 200


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("damage") / "uid"
    return folder, trained(folder.as_uri(), steps=3)


@pytest.fixture
def folder(saved: tuple[Path, dict[int, dict[str, str]]], tmp_path: Path) -> Path:
    shutil.copytree(saved[0], tmp_path / "uid")
    return tmp_path / "uid"


def test_a_bit_that_is_lost_on_the_way_sets_no_commit_aside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice a bit of the COMMIT arrives wrong; the stored one is sound, and so it stays and is resumed from."""
    read, wrong = FileStore.read, [0, 0]

    def flipping(store: FileStore, key: str, *more: int) -> bytes:
        data = bytearray(read(store, key, *more))
        if key == commit_key(3) and wrong:
            wrong.pop()
            data[len(data) // 2] ^= 1
        return bytes(data)

    monkeypatch.setattr(FileStore, "read", flipping)
    said: list[str] = []
    model, optimizer = gang.build("none", seed=1)
    assert resume(folder.as_uri(), 99, model, optimizer, said.append).step == 3
    assert (wrong, said, list_commits(folder.as_uri())) == ([], [], (1, 2, 3))


def test_every_damage_is_caught_before_a_tensor_changes(
    saved: tuple[Path, dict[int, dict[str, str]]], tmp_path: Path
) -> None:
    dice, folder = random.Random(7), tmp_path / "uid"
    model, optimizer = gang.build("none", seed=1)
    untouched = gang.digest(model, optimizer)
    done = Counter[str]()
    while done.total() - done["remove"] < DAMAGES:  # what is lost altogether comes on top
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved[0], folder)
        files = [*folder.glob(f"{step_name(3)}/*/*"), folder / commit_key(3)]
        kind, path = damage(files, dice)
        done[kind] += 1
        with pytest.raises(CheckpointError):
            load(folder.as_uri(), 3, model, optimizer)
        assert gang.digest(model, optimizer) == untouched, f"{done}: {kind} of {path.name} changed a tensor"
        restarted, fresh = gang.build("none", seed=2)
        words: list[str] = []
        commit = resume(folder.as_uri(), 3, restarted, fresh, words.append)
        assert (commit.step, gang.digest(restarted, fresh)) == (2, saved[1][2]), f"{done}: {kind} of {path.name}"
        # A COMMIT that is gone altogether is no damage: then step 3 is not committed.
        expected = 0 if kind == "remove" and path == folder / commit_key(3) else 1
        assert len(words) == expected
        assert list_commits(folder.as_uri()) == (1, 2)
        assert (folder / QUARANTINE / f"{step_name(3)}.json").exists() == bool(expected)


def test_the_words_name_file_and_reason(folder: Path) -> None:
    shard = next(folder.glob(f"{step_name(3)}/*/*"))
    shard.unlink()
    model, optimizer = gang.build("none", seed=1)
    with pytest.raises(DamagedCommit, match=rf"{shard}: the COMMIT names this file, but it is not there"):
        load(folder.as_uri(), 3, model, optimizer)
    (folder / commit_key(3)).write_bytes(b'{"version": 99}')
    with pytest.raises(UnknownFormat, match="its format version is 99, and this Muster reads up to 2; upgrade"):
        load(folder.as_uri(), 3, model, optimizer)
    with pytest.raises(CheckpointError, match="step 9 is not committed"):
        load(folder.as_uri(), 9, model, optimizer)


@pytest.mark.parametrize("what", ["COMMIT", "shard", "commits"])
def test_what_is_read_of_a_commit_is_read_through_no_link(folder: Path, tmp_path: Path, what: str) -> None:
    """Tools that answer for a model or export it run with more rights than the job that wrote the folder."""
    shard = next(folder.glob(f"{step_name(3)}/*/*"))
    linked = {"COMMIT": folder / commit_key(3), "shard": shard, "commits": folder / "commits"}[what]
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    model, optimizer = gang.build("none", seed=1)
    with pytest.raises((CheckpointError, StoreError), match=r"is no (regular file|folder)"):
        load(folder.as_uri(), 3, model, optimizer)
    if what != "shard":
        with pytest.raises((CheckpointError, StoreError), match=r"is no (regular file|folder)"):
            read_commit(folder.as_uri(), "last" if what == "commits" else 3)


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_endless_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def as_deep_nesting(path: Path) -> None:
    path.write_bytes(b"[" * 200_000)


@pytest.mark.parametrize("make", [as_fifo, as_endless_link, as_folder, as_device])
@pytest.mark.parametrize("what", ["COMMIT", "shard"])
def test_what_is_no_file_is_passed_over_at_once(
    saved: tuple[Path, dict[int, dict[str, str]]], folder: Path, what: str, make: Callable[[Path], None]
) -> None:
    """Reading a FIFO waits for a writer, reading /dev/zero never ends; a saver that lists the folder must not wait."""
    make(folder / commit_key(3) if what == "COMMIT" else next(folder.glob(f"{step_name(3)}/*/*")))
    assert len(ls(open_store(folder.as_uri()), argparse.Namespace())["commits"]) in (2, 3)
    model, optimizer = gang.build("none", seed=1)
    said: list[str] = []
    assert resume(folder.as_uri(), 3, model, optimizer, said.append).step == 2
    assert gang.digest(model, optimizer) == saved[1][2]
    with one_rank.saver(folder.as_uri()) as saving:
        gang.step_once(model, optimizer, 3)
        saving.save(one_rank.state(model, optimizer, 4), emergency=True)
        assert one_rank.outcomes(saving) == [(4, True, None)]
    assert newest_readable(folder.as_uri(), 9, said.append).step == 4


def test_as_many_commits_as_there_are_are_tried(folder: Path, saved: tuple[Path, dict[int, dict[str, str]]]) -> None:
    """Wrong in four ways: not a file, nested too deeply, of another step, of another model."""
    sound = (folder / commit_key(3)).read_bytes()
    for step in (4, 5, 6):
        (folder / commit_key(step)).write_bytes(sound)
    as_fifo(folder / commit_key(6))
    as_deep_nesting(folder / commit_key(5))
    other = json.loads(sound)
    other["tensors"] = {n: t for n, t in other["tensors"].items() if "embedding" not in n}
    (folder / commit_key(3)).write_bytes(resealed(other))
    model, optimizer = gang.build("none", seed=1)
    said: list[str] = []
    assert resume(folder.as_uri(), 9, model, optimizer, said.append).step == 2
    assert gang.digest(model, optimizer) == saved[1][2]
    assert len(said) == 4
    for words, reason in zip(
        said, ["is no regular file", "nested too deeply", "is of step 3, but its name says step 4", "does not fit"],
        strict=True,
    ):  # fmt: skip
        assert reason in words
    assert list_commits(folder.as_uri()) == (1, 2, 3), "what does not fit the model may be right, and stays"


def resealed(document: dict[str, Any]) -> bytes:
    return canonical({**document, "seal": seal_of({k: v for k, v in document.items() if k != "seal"})})


@pytest.mark.parametrize(
    "lost", ["optimizer/embedding.weight/", "/exp_avg_sq", "optimizer/", "optimizer/embedding.weight/exp_avg"]
)
def test_a_commit_with_too_little_optimizer_state_is_set_aside(
    folder: Path, saved: tuple[Path, dict[int, dict[str, str]]], lost: str
) -> None:
    """It loaded in silence, and the loss rose from 4.495 to 4.638."""
    document = json.loads((folder / commit_key(3)).read_bytes())
    document["tensors"] = {n: t for n, t in document["tensors"].items() if lost not in n}
    (folder / commit_key(3)).write_bytes(resealed(document))
    model, optimizer = gang.build("none", seed=1)
    said: list[str] = []
    assert resume(folder.as_uri(), 3, model, optimizer, said.append).step == 2
    assert gang.digest(model, optimizer) == saved[1][2]
    assert "is missing" in said[0]
    # Who wants the weights alone loads them, where the COMMIT holds together without the rest.
    assert (folder / QUARANTINE / f"{step_name(3)}.json").exists()


def test_a_newer_musters_commit_stays_for_it(folder: Path, saved: tuple[Path, dict[int, dict[str, str]]]) -> None:
    newer = b'{"version": 3, "attempt": 1}'
    (folder / commit_key(3)).write_bytes(newer)
    model, optimizer = gang.build("none", seed=1)
    said: list[str] = []
    assert resume(folder.as_uri(), 3, model, optimizer, said.append).step == 2
    assert "upgrade Muster to use it" in said[0]
    with one_rank.saver(folder.as_uri()) as saving:
        gang.step_once(model, optimizer, 3)
        saving.save(one_rank.state(model, optimizer, 3), emergency=True)
        ((step, committed, error),) = one_rank.outcomes(saving)
    assert (step, committed) == (3, False)
    assert "upgrade Muster to use it" in str(error)
    assert (folder / commit_key(3)).read_bytes() == newer


def test_a_commit_of_another_folder_is_not_our_own(folder: Path) -> None:
    """A copy under another name is read by others all the same."""
    moved = folder.with_name("copy")
    folder.rename(moved)
    model, optimizer = gang.build("none", seed=1)
    assert load(moved.as_uri(), 3, model, optimizer).step == 3
    said: list[str] = []
    with pytest.raises(CheckpointError, match="no checkpoint up to step 3"):
        resume(moved.as_uri(), 3, model, optimizer, said.append)
    assert "was made in the folder 'uid' of job 'job', and lies in 'copy'" in said[0]


def test_where_nothing_is_left_it_says_so(folder: Path) -> None:
    for shard in folder.glob("step-*/*/*"):
        shard.write_bytes(b"")
    model, optimizer = gang.build("none", seed=1)
    with pytest.raises(CheckpointError, match="no checkpoint up to step 3 can be read"):
        resume(folder.as_uri(), 3, model, optimizer, lambda words: None)
    assert list_commits(folder.as_uri()) == ()


def test_the_newest_readable_commit_is_found_past_damaged_ones(folder: Path) -> None:
    words: list[str] = []
    assert newest_readable(folder.as_uri(), 3, words.append).step == 3
    (folder / commit_key(3)).write_bytes((folder / commit_key(3)).read_bytes()[:-2])
    assert newest_readable(folder.as_uri(), 3, words.append).step == 2
    assert len(words) == 1
    assert list_commits(folder.as_uri()) == (1, 2)
    with pytest.raises(CheckpointError, match="no checkpoint up to step 0"):
        newest_readable(folder.as_uri(), 0, words.append)


def test_a_commit_that_is_removed_while_it_is_read_is_passed_over(
    saved: tuple[Path, dict[int, dict[str, str]]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its COMMIT is read, and between two of its bytes."""
    listed = loader.steps_in
    monkeypatch.setattr(loader, "steps_in", lambda store: (*listed(store), 4))
    read_into = FileStore.read_into

    def remove_then_read(store: FileStore, key: str, start: int, into: memoryview) -> None:
        if "step-00000003" in key:
            store.delete(commit_key(3))
            store.delete(key)
        read_into(store, key, start, into)

    monkeypatch.setattr(FileStore, "read_into", remove_then_read)
    model, optimizer = gang.build("none", seed=1)
    said: list[str] = []
    assert resume(folder.as_uri(), 9, model, optimizer, said.append).step == 2
    assert gang.digest(model, optimizer) == saved[1][2]
    assert said[0] == "commit 4 was removed meanwhile, the one before it is tried"
    assert "the COMMIT names this file, but it is not there" in said[1]
    assert len(said) == 2


@pytest.mark.parametrize("of_commit_3", [commit_key(3), f"{step_name(3)}/"])
def test_a_commit_that_the_store_never_gives_is_passed_over_and_stays(
    saved: tuple[Path, dict[int, dict[str, str]]], folder: Path, monkeypatch: pytest.MonkeyPatch, of_commit_3: str
) -> None:
    """Lost by the server's disks, say: it answers 500 for this object, and for no other."""
    failing = [of_commit_3]

    def fail(answer: Callable[..., Any]) -> Callable[..., Any]:
        def ask(store: FileStore, key: str, *more: Any) -> Any:
            if key.startswith(tuple(failing)):
                raise StoreError(f"{key}: the store failed (500)")
            return answer(store, key, *more)

        return ask

    for name in ("read", "read_into"):
        monkeypatch.setattr(FileStore, name, fail(getattr(FileStore, name)))
    model, optimizer = gang.build("none", seed=1)
    said: list[str] = []
    assert resume(folder.as_uri(), 3, model, optimizer, said.append).step == 2
    assert gang.digest(model, optimizer) == saved[1][2]
    assert len(said) == 1
    assert said[0].startswith("the store does not give commit 3, the one before it is tried: ")
    assert list_commits(folder.as_uri()) == (1, 2, 3), "it may be readable tomorrow"
    failing += [commit_key(2), commit_key(1)]  # then it is the store that is down, and work must not be thrown away
    model, optimizer = gang.build("none", seed=1)
    untouched = gang.digest(model, optimizer)
    with pytest.raises(StorageError, match="step-00000003"):
        resume(folder.as_uri(), 3, model, optimizer, said.append)
    assert gang.digest(model, optimizer) == untouched


def test_a_commit_is_not_collected_while_it_is_read(folder: Path) -> None:
    store = FileStore(folder)
    with reading(store, 2):
        assert being_read(store, 0.0) == {2}
        assert being_read(store, 4e9) == set(), "a reader that died holds its checkpoint for ever"
    assert being_read(store, 0.0) == set()


def test_a_copy_on_the_node_is_used_when_it_is_good_and_not_when_it_is_not(
    saved: tuple[Path, dict[int, dict[str, str]]], folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(folder)
    monkeypatch.setattr(loader, "node_cache", lambda uri, job_uid: NodeCache(cache / job_uid))  # a file:// needs none
    (entry,) = commit_in(store, 3).files
    data = bytearray((folder / entry.key).read_bytes())
    copies = NodeCache(cache / "uid")
    (folder / entry.key).write_bytes(b"\0" * entry.bytes)  # the truth is damaged, the copy is good
    assert copies.keep(entry.key, memoryview(bytes(data)))
    model, optimizer = gang.build("none", seed=1)
    load(folder.as_uri(), 3, model, optimizer)
    assert gang.digest(model, optimizer) == saved[1][3]
    (folder / entry.key).write_bytes(data)
    data[len(data) // 2] ^= 1  # now the copy is damaged, and the truth is good
    assert copies.keep(entry.key, memoryview(bytes(data)))
    model, optimizer = gang.build("none", seed=1)
    load(folder.as_uri(), 3, model, optimizer)
    assert gang.digest(model, optimizer) == saved[1][3]
    assert entry.bytes < PART_BYTES
    copies.drop_all_but(4)
    assert list(cache.rglob("*.safetensors")) == []


def test_no_copy_is_kept_on_a_disk_that_is_nearly_full(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = shutil.disk_usage(cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room._replace(total=1000, free=100 + 8))
    copies = NodeCache(cache / "uid")
    assert not copies.keep("step-00000003/attempt-1/shard", memoryview(b"123456789"))
    assert copies.keep("step-00000003/attempt-1/shard", memoryview(b"12345678"))
    assert [path.read_bytes() for path in cache.rglob("shard*")] == [b"12345678"]


def test_ten_thousand_remnants_are_swept(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for step in range(1, 101):
        folder = tmp_path / f"step-{step:08d}" / "attempt-1"
        folder.mkdir(parents=True)
        for shard in range(100):
            (folder / f"shard-{shard:05d}-of-00100.safetensors").touch()
    assert sum(1 for _ in store.objects("step-")) == 10_000
    trained(tmp_path.as_uri(), 1)
    kept, seen = {"commits/step-00000001.json", commit_in(store, 1).files[0].key}, CollectionState()
    for left in (10_002, 2):  # what one listing shows is not enough to delete by
        collect(store, attempt=2, newest_step=1, keep=Keep(), seen=seen)
        assert sum(1 for _ in store.objects("")) == left
    assert {entry.key for entry in store.objects("")} == kept
