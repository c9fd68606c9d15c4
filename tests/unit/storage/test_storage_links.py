"""Folders that a job writes in, too: by a link it makes the platform write, read or remove nothing elsewhere."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from muster.storage.errors import NotAFile
from muster.storage.file_store import FileStore
from muster.storage.pins import pin, pinned, unpin
from muster.storage.small_files import NotRegular, open_to_append, read_regular, write_whole
from muster.words.checkpoint import COMMITS, PINS


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere"
    path.mkdir()
    (path / "token").write_text("muster_secret")
    return path


def test_a_small_file_is_not_written_through_a_link(tmp_path: Path, elsewhere: Path) -> None:
    """Neither one in its place nor one by the name that is written to before, which nobody can guess."""
    token, folder = elsewhere / "token", tmp_path / "own"
    folder.mkdir()
    (folder / "record.json").symlink_to(token)
    (folder / f".record.json.{os.getpid()}.{threading.get_ident()}").symlink_to(token)  # as it once was
    for refused in (open_to_append, read_regular):
        with pytest.raises(NotRegular):
            refused(folder / "record.json")
    write_whole(folder / "record.json", "{}")
    assert ((folder / "record.json").is_symlink(), (folder / "record.json").read_text()) == (False, "{}")
    assert token.read_text() == "muster_secret"


@pytest.fixture
def linked(tmp_path: Path, elsewhere: Path) -> FileStore:
    """A job's checkpoint folder, as the platform opens it, in which each folder's name leads elsewhere."""
    root = tmp_path / "job"
    root.mkdir()
    for name in ("profiles", PINS, COMMITS):
        (root / name).symlink_to(elsewhere, target_is_directory=True)
    return FileStore(root, links=False)


def test_a_store_writes_lists_and_removes_nothing_through_a_linked_folder(linked: FileStore, elsewhere: Path) -> None:
    (elsewhere / "step-00000020").write_text("{}")
    before = sorted(elsewhere.iterdir())
    uploaded = linked.root / "uploaded"
    uploaded.write_text("words")
    for reaching in (
        lambda: pin(linked, 7),
        lambda: pinned(linked),
        lambda: unpin(linked, 20),
        lambda: linked.delete(f"{PINS}/step-00000020"),
        lambda: linked.replace("profiles/request.json", b"{}"),
        lambda: linked.create("profiles/new/deeper.json", b"{}"),
        lambda: linked.write("profiles/new", memoryview(b"words")),
        lambda: linked.adopt("profiles/uploaded", uploaded),
        lambda: linked.read("profiles/token"),
        lambda: linked.about("profiles/token"),
        lambda: list(linked.objects(f"{COMMITS}/")),
    ):
        with pytest.raises(NotAFile, match="no folder; remove it"):
            reaching()
    assert sorted(elsewhere.iterdir()) == before
    assert (uploaded.read_text(), (elsewhere / "token").read_text()) == ("words", "muster_secret")
    with pytest.raises(NotAFile):
        FileStore(linked.root, links=False).see_all((), f"{PINS}/")


def test_of_a_link_a_store_tells_no_more_than_that_it_is_there_and_removes_it(tmp_path: Path, elsewhere: Path) -> None:
    root = tmp_path / "job"
    root.mkdir()
    (root / "file").symlink_to(elsewhere / "token")
    (root / "folder").symlink_to(elsewhere, target_is_directory=True)
    store = FileStore(root, links=False)
    assert {entry.key: entry.bytes for entry in store.objects("")} == {
        "file": len(str(elsewhere / "token")),
        "folder": len(str(elsewhere)),
    }
    for key in ("file", "folder"):
        store.delete(key)
    assert list(root.iterdir()) == []
    assert (elsewhere / "token").read_text() == "muster_secret"


def test_a_folder_that_becomes_a_link_while_it_is_written_to_changes_nothing_elsewhere(
    tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is opened once: what its name means a moment later is nobody's business."""
    root, replace = tmp_path / "job", os.replace
    store = FileStore(root, links=False)
    store.replace("profiles/first.json", b"{}")

    def swapped(source: str, target: str, **folders: int) -> None:
        (root / "profiles").rename(root / "away")
        (root / "profiles").symlink_to(elsewhere, target_is_directory=True)
        replace(source, target, **folders)

    monkeypatch.setattr(os, "replace", swapped)
    store.replace("profiles/request.json", b"{}")
    assert [path.name for path in elsewhere.iterdir()] == ["token"]
    assert sorted(path.name for path in (root / "away").iterdir()) == ["first.json", "request.json"]
