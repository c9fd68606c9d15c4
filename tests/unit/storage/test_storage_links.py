"""Folders that a job writes in, too: by a link it makes the platform write, read or remove nothing elsewhere."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from muster.storage.small_files import NotRegular, open_to_append, read_regular, write_whole


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
