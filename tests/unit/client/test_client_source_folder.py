"""Packing of a program's source folder."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from muster.client import source_folder
from muster.client.errors import InvalidRequest
from muster.client.source_folder import pack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "my project"
    made.mkdir()
    write(made, "train.py", "print(1)\n")
    return made


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "packed").mkdir()
    return tmp_path / "packed"


def write(folder: Path, path: str, text: str = "text\n") -> Path:
    place = folder / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return place


def names(folder: Path, into: Path) -> list[str]:
    with tarfile.open(pack(folder, into).path) as archive:
        return [member.name for member in archive if not member.isdir()]


def refused(folder: Path, into: Path) -> str:
    with pytest.raises(InvalidRequest) as error:
        pack(folder, into)
    assert error.value.code == "bad-source"
    assert error.value.next_step
    return error.value.what


def test_the_same_content_gives_the_same_bytes(folder: Path, into: Path, tmp_path: Path) -> None:
    write(folder, "lib/model.py")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o700)
    (folder / "latest").symlink_to("lib/model.py")
    first = pack(folder, into)
    before = first.path.read_bytes()
    twin = tmp_path / "elsewhere" / "my project"
    write(twin, "lib/model.py")
    (twin / "latest").symlink_to("lib/model.py")
    (twin / "run.sh").write_text("#!/bin/sh\n")
    (twin / "run.sh").chmod(0o755)  # of what a file may, only whether it is executable counts
    write(twin, "train.py", "print(1)\n")
    os.utime(twin / "train.py", (1, 1))
    second = pack(twin, into)
    assert second.path.read_bytes() == before
    assert (second.sha256, second.name, second.files) == (first.sha256, first.name, 4)
    assert first.name == f"my-project-{first.sha256[:16]}.tar.gz"
    with tarfile.open(second.path) as archive:
        assert {(each.name, each.mode, each.mtime, each.uid, each.uname, each.linkname) for each in archive} == {
            ("latest", 0o777, 0, 0, "", "lib/model.py"),
            ("lib", 0o755, 0, 0, "", ""),
            ("lib/model.py", 0o644, 0, 0, "", ""),
            ("run.sh", 0o755, 0, 0, "", ""),
            ("train.py", 0o644, 0, 0, "", ""),
        }


def test_gitignore_is_read_as_git_reads_it(folder: Path, into: Path) -> None:
    write(folder, ".gitignore", "*.log\n!kept.log\n/data/\nsub/*.tmp\n")
    write(folder, "sub/.gitignore", "kept.log\n!one.tmp\n")
    for path in ("a.log", "kept.log", "data/x", "sub/data/x", "sub/kept.log", "sub/one.tmp", "sub/two.tmp"):
        write(folder, path)
    assert names(folder, into) == [
        ".gitignore",
        "kept.log",
        "sub/.gitignore",
        "sub/data/x",
        "sub/one.tmp",
        "train.py",
    ]


def test_the_repository_around_the_folder_has_a_gitignore_too(folder: Path, into: Path, tmp_path: Path) -> None:
    write(tmp_path, ".gitignore", "*.ckpt\n/my project/out/\n")
    write(folder, "a.ckpt")
    write(folder, "out/x")
    assert names(folder, into) == ["a.ckpt", "out/x", "train.py"]  # no repository: it is somebody else's file
    (tmp_path / ".git").mkdir()
    assert names(folder, into) == ["train.py"]


def test_history_bytecode_and_environments_stay_behind(folder: Path, into: Path) -> None:
    for path in (".git/config", "lib/__pycache__/a.pyc", "lib/a.py", "env/pyvenv.cfg", "env/bin/python"):
        write(folder, path)
    archive = pack(folder, into)
    assert names(folder, into) == ["lib/a.py", "train.py"]
    assert archive.left_out == (".git", "env")


def test_files_that_look_like_secrets_are_named(folder: Path, into: Path) -> None:
    for path in (".env", ".env.example", "keys/id_rsa", "keys/id_rsa.pub", "tls.PEM", "aws/credentials", "monkey.py"):
        write(folder, path)
    assert pack(folder, into).secrets == (".env", "aws/credentials", "keys/id_rsa", "tls.PEM")


@pytest.mark.parametrize("target", ["/etc/passwd", "../secret", "lib/../../secret", "up/../secret"])
def test_a_link_out_of_the_folder_is_refused(folder: Path, into: Path, target: str) -> None:
    write(folder.parent, "secret")
    write(folder, "lib/a.py")
    (folder / "lib" / "up").symlink_to("..")
    (folder / "up").symlink_to("lib/up/lib/..")
    (folder / "bad").symlink_to(target)
    assert f"is a link to {target}, which is outside the folder" in refused(folder, into)


def test_a_link_through_the_folders_own_name_is_refused(folder: Path, into: Path) -> None:
    (folder / "again").symlink_to("../my project/train.py")  # in a worker the folder has another name
    assert "outside the folder" in refused(folder, into)


def test_a_pipe_is_refused_and_not_waited_for(folder: Path, into: Path) -> None:
    os.mkfifo(folder / "pipe")
    assert refused(folder, into) == f"{folder / 'pipe'} is no file, folder or link"


def test_a_folder_that_is_too_large_is_refused_with_its_largest_entries(
    folder: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_folder, "BYTES_MAX", 3000)
    write(folder, "data/a", "a" * 2048)
    write(folder, "data/b", "b" * 2048)
    write(folder, "model.bin", "c" * 1024)
    words = refused(folder, into)
    assert words == (
        f"{folder} has 5.0 KiB, and a source may have 2.9 KiB; "
        "the largest: data 4.0 KiB, model.bin 1.0 KiB, train.py 9 B"
    )


def test_a_folder_of_too_many_entries_is_refused(folder: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_folder, "ENTRIES_MAX", 1)
    write(folder, "b")
    assert refused(folder, into) == f"{folder} has more than 1 entry"


def test_what_is_no_folder_or_has_nothing_in_it_is_refused(folder: Path, into: Path) -> None:
    assert refused(folder / "none", into) == f"{folder / 'none'} is not there"
    assert refused(folder / "train.py", into) == f"{folder / 'train.py'} is a file"
    write(folder, ".gitignore", "*\n")
    assert refused(folder, into) == f"{folder} has no file that is not ignored"


def change_while_packed(monkeypatch: pytest.MonkeyPatch, changes: list[str], place: Path) -> None:
    """Have the file changed once for each of the `changes`, as soon as an archive has been written."""
    compare = source_folder._compare

    def changed(before: list[source_folder._FolderEntry], after: list[source_folder._FolderEntry]) -> None:
        if changes:
            place.write_text(changes.pop())
            after = source_folder._listed(place.parent).entries
        compare(before, after)

    monkeypatch.setattr(source_folder, "_compare", changed)


def test_a_folder_that_changes_is_packed_again(folder: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write(folder, "config.yaml", "v: 1\n")
    change_while_packed(monkeypatch, ["v: 22\n"], place)
    with tarfile.open(pack(folder, into).path) as archive:
        content = archive.extractfile("config.yaml")
        assert content is not None
        assert content.read() == b"v: 22\n"


def test_a_folder_that_keeps_changing_is_refused(folder: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write(folder, "train.log", "")
    change_while_packed(monkeypatch, ["aaaa", "aaa", "aa", "a"], place)
    assert refused(folder, into) == (f"{folder} does not stay as it is while it is packed: train.log changed (3 tries)")
