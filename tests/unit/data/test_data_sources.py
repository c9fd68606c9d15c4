"""Sources: which files an address means, and a clear error for each that can't be read."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.data.making import contents, stored, write_texts

from muster.storage import sources
from muster.trainer.errors import StorageError, UserError

NOBODY = 65534


def names(address: Path | str, format: str = "text") -> list[str]:
    return [Path(file.address).name for file in sources.find(str(address), format)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.txt", "a.jsonl", "sub/c.ndjson", "sub/deep/d.txt", ".hidden/e.txt", ".f.txt", "sub/g.jsonl.gz"):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return tmp_path / "tree"


def test_files_folders_globs_and_addresses(tree: Path) -> None:
    everything = ["a.jsonl", "b.txt", "c.ndjson", "d.txt", "g.jsonl.gz"]
    assert names(tree) == everything
    assert names(f"file://{tree}") == everything
    assert names(tree, "jsonl") == ["a.jsonl", "c.ndjson", "g.jsonl.gz"]
    assert names(tree / "b.txt") == names(f"file://localhost{tree}/b.txt") == ["b.txt"]
    assert names(tree / "b.txt", "jsonl") == ["b.txt"]  # named, so taken at its word
    assert names(tree / "**/*.txt") == ["b.txt", "d.txt"]
    assert names(tree / "?.txt") == ["b.txt"]


def test_a_name_with_magic_in_it_is_a_name_first(tmp_path: Path) -> None:
    write_texts(tmp_path / "x[1]*", ["t"])
    assert names(tmp_path / "x[1]*") == ["00000.txt"]


def test_addresses_with_spaces_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "my data", ["t"])
    assert names(f"file://{tmp_path}/my%20data") == ["00000.txt"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert names("~/my data") == ["00000.txt"]


def test_links_are_followed_but_not_in_circles(tree: Path, tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap: every file is a link into a hidden folder."""
    outside = write_texts(tmp_path / "outside", ["x"])
    (tree / "linked").symlink_to(outside)
    (tree / "sub" / "up").symlink_to(tree)
    (tree / "dangling.txt").symlink_to(tree / "nowhere")
    assert names(tree).count("b.txt") == 1
    assert "00000.txt" in names(tree)
    assert "dangling.txt" not in names(tree)


def test_a_glob_through_a_loop_of_links_reads_each_file_once_and_says_so(tree: Path) -> None:
    (tree / "sub" / "up").symlink_to(tree)
    (tree / "sub" / "deep" / "also-up").symlink_to(tree)
    assert names(tree / "**/*.txt") == ["b.txt", "d.txt"]
    assert names(tree / "**") == ["a.jsonl", "b.txt", "c.ndjson", "d.txt", "g.jsonl.gz"]
    (tree / "again.txt").symlink_to(tree / "b.txt")
    told: list[str] = []
    files = sources.find(str(tree / "**/*.txt"), "text", told.append)
    assert [Path(file.address).name for file in files] == ["again.txt", "d.txt"]
    (line,) = told
    assert line.startswith("data: warning: 1 of the paths lead to files that are read already")
    assert line.endswith("b.txt")


def test_the_standard_library_is_a_corpus(tmp_path: Path) -> None:
    files = sources.find(sources.STDLIB, "text")
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = [Path(file.address).relative_to(root) for file in files]
    assert {Path("json/decoder.py"), Path("asyncio/tasks.py"), Path("os.py")} <= set(relative)
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in relative)
    assert all(path.suffix == ".py" for path in relative)
    assert 5e6 < sum(file.size for file in files) < 30e6
    store = stored(sources.STDLIB, tmp_path / "cache")
    assert store.meta.tokens > 5e6
    assert (root / "os.py").read_bytes() in contents(store)


@pytest.mark.parametrize(
    ("address", "format", "message"),
    [
        ("{tree}/none", "text", r"tree/none: does not exist; check the path"),
        ("none/at/all", "text", r"none/at/all: does not exist \(relative to .+\); check the path"),
        ("{tree}/*.csv", "text", r"no files for format text there"),
        ("{tree}/.hidden/none*", "text", "no files"),
        ("{tree}/sub/deep", "jsonl", r"no files for format jsonl there \(looked for \*\.jsonl"),
        ("file://{tree}/none", "text", "does not exist"),
        ("file://data/books", "text", "a file address is absolute and has three slashes"),
        ("http://example.org/a.txt", "text", "nothing reads http://"),
        ("hf://datasets/a/b", "text", "data is not read from the hub"),
        ("builtin://shakespeare", "text", "there is only builtin://python-stdlib"),
        ("/dev/null", "text", "is neither a file nor a folder"),
        ("s3://", "text", "names no bucket"),
    ],
)
def test_an_address_that_means_nothing_is_refused(tree: Path, address: str, format: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sources.find(address.format(tree=tree), format)


@pytest.fixture
def as_nobody(tmp_path: Path) -> Iterator[None]:
    """Root may read everything, so these tests give that up for a moment."""
    if os.geteuid() != 0:
        yield
        return
    parents = [folder for folder in tmp_path.parents if folder.stat().st_uid == 0 and "/pytest-of-" in str(folder)]
    modes = {folder: folder.stat().st_mode & 0o7777 for folder in (tmp_path, *parents)}
    for folder in modes:
        folder.chmod(0o777)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        for folder, mode in modes.items():
            folder.chmod(mode)


@pytest.mark.usefixtures("as_nobody")
@pytest.mark.parametrize("unreadable", ["file", "folder", "parent"])
def test_what_may_not_be_read_is_named(tmp_path: Path, unreadable: str) -> None:
    folder = write_texts(tmp_path / "in" / "sub", ["x"]).parent
    target = {"file": folder / "sub" / "00000.txt", "folder": folder / "sub", "parent": folder}[unreadable]
    target.chmod(0)
    named = folder / "sub" if unreadable == "parent" else target
    try:
        with pytest.raises(
            UserError, match=rf"{named}: permission denied; let the job's user \(uid {os.geteuid()}\) read"
        ):
            stored(folder if unreadable != "parent" else folder / "sub", tmp_path / "cache")
    finally:
        target.chmod(0o755)


@pytest.mark.usefixtures("as_nobody")
def test_a_cache_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", ["x"])
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o555)
    with pytest.raises(UserError, match=r"can't write token stores to .*cache: .*set MUSTER_CACHE_DIR"):
        stored(source, cache)


def test_a_cache_that_is_a_file_is_named(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", ["x"])
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match="can't write token stores"):
        stored(source, tmp_path / "cache")


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    (file,) = sources.find(str(write_texts(tmp_path / "in", ["x"])), "text")
    Path(file.address).unlink()
    with pytest.raises(UserError, match=r"00000\.txt: was removed while it was being read"):
        file.open()


def test_a_disk_error_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = sources.find(str(write_texts(tmp_path / "in", ["x"])), "text")

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        file.open()
