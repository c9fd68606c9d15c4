"""Checkpoints that are a program's folder: listed, verified, quarantined, exported and retained like any other, and
refused in one sentence by whatever needs a model."""

import json
from pathlib import Path

import pytest

from muster.cli.output import answers
from muster.cli.render import checkpoints_table, show_commit
from muster.recipe.training import TrainingConfig
from muster.replies.views import commit_view
from muster.storage.commits import InvalidCommit, parse_commit
from muster.storage.file_store import FileStore
from muster.storage.listing import CommitListing, steps_in
from muster.storage.model_source import model_facts
from muster.trainer.checkpoint.__main__ import main as checkpoint_tool
from muster.trainer.checkpoint.collect import CollectionState, collect
from muster.trainer.checkpoint.commits import commit_in, publish, read_commit
from muster.trainer.checkpoint.quarantine import first_good, put_back, quarantined
from muster.trainer.convert.export import export
from muster.words.base import UserError
from muster.words.checkpoint import PROGRAM_VERSION, Commit, canonical, commit_key, folder_file_key, seal_of, sealed
from muster.words.job import Keep

FILES = {"model.bin": b"weights" * 50, "state/rank-0.pt": b"\x00\x01", "frozen-1.safetensors": b"", "a b/ü.txt": b"x"}


def commit(store: FileStore, step: int, files: dict[str, bytes] = FILES, reused: Commit | None = None) -> Commit:
    entries = [store.write(folder_file_key(step, 1, path), memoryview(data)) for path, data in files.items()]
    made = Commit(
        version=PROGRAM_VERSION, kind="folder", trainer="program", entry=f"checkpoint-{step}", job="j", job_uid="uid",
        folder="uid", attempt=1, step=step, committed_at=1e9, world_size=2,
        files=(*entries, *(reused.files if reused else ())),
    )  # fmt: skip
    publish(store, made)
    return commit_in(store, step, own=True)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "uid", links=False)


def test_a_folder_is_listed_verified_and_exported_as_it_is(store: FileStore, tmp_path: Path) -> None:
    made = commit(store, 3)
    assert (made.kind, made.entry, made.tensors, made.config) == ("folder", "checkpoint-3", {}, {})
    document = json.loads(store.read(commit_key(3)))
    assert not {"tensors", "cursor", "config", "architecture", "rng"} & document.keys()
    listed = CommitListing().read_at(store.uri)
    assert [(one.step, one.kind, one.files) for one in listed] == [(3, "folder", 4)]
    view = commit_view(made, best=False)
    assert (view["kind"], view["elements"], view["tensors"], len(view["files"])) == ("folder", 0, {}, 4)
    assert checkpoint_tool(["verify", store.uri]) == 0
    report = export(store, "best", tmp_path / "out")
    assert report["kind"] == "folder"
    exported = {p.relative_to(tmp_path / "out").as_posix(): p.read_bytes() for p in (tmp_path / "out").rglob("*.*")}
    assert exported == FILES


def test_the_command_line_shows_a_folder_as_what_it_is(store: FileStore, capsys: pytest.CaptureFixture[str]) -> None:
    view = commit_view(commit(store, 3), best=False) | {"pinned": False, "uri": "file:///there"}
    answers().print(checkpoints_table({"items": [view]}), soft_wrap=True)
    show_commit(view)
    said = capsys.readouterr().out
    assert "folder" in said.splitlines()[1]
    assert "a folder that the program wrote: resumes by the program; data position not checked" in said
    assert "state/rank-0.pt" in said
    assert "weights, " not in said


def test_a_damaged_folder_is_set_aside_and_put_back(store: FileStore, tmp_path: Path) -> None:
    commit(store, 3)
    newest = commit(store, 5)
    path = tmp_path / "uid" / newest.files[0].key
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?")
    said: list[str] = []

    def fetch(step: int) -> int:
        read = commit_in(store, step, own=True)
        export(store, step, tmp_path / f"fetched-{step}")
        return read.step

    assert first_good(store, reversed(steps_in(store)), 9, fetch, said.append) == 3
    assert quarantined(store) == {5}
    assert str(path) in said[0]
    assert not (tmp_path / "fetched-5").exists()
    path.write_bytes(whole)
    assert put_back(store, 5) == newest


def test_retention_removes_a_folder_whole_and_spares_the_files_that_a_later_one_names(
    store: FileStore, tmp_path: Path
) -> None:
    first = commit(store, 1, {"same.pt": b"same"})
    commit(store, 2, {"last.pt": b"2"}, reused=first)
    commit(store, 3, {"last.pt": b"3"}, reused=first)
    assert collect(store, 1, 3, Keep(last=1, best=0), CollectionState()) == [1, 2]
    there = sorted(p.relative_to(tmp_path / "uid").as_posix() for p in (tmp_path / "uid").rglob("*") if p.is_file())
    assert there == [
        "commits/step-00000003.json",
        "step-00000001/attempt-1/files/same.pt",
        "step-00000003/attempt-1/files/last.pt",
    ]
    assert checkpoint_tool(["verify", store.uri, "3"]) == 0


def test_what_a_failed_upload_left_is_swept(store: FileStore, tmp_path: Path) -> None:
    store.write(folder_file_key(1, 1, "deep/left.bin"), memoryview(b"left"))
    seen = CollectionState()
    for step in (2, 3):
        commit(store, step)
        collect(store, 1, step, Keep(), seen)
    assert not (tmp_path / "uid" / "step-00000001").exists()


def test_whoever_needs_a_model_refuses_a_folder_in_one_sentence(store: FileStore, tmp_path: Path) -> None:
    commit(store, 3)
    says = r"step 3 in \S+ is a folder that a program wrote.*muster export \S+ --step 3 --to FOLDER"
    with pytest.raises(UserError, match=says):
        read_commit(store.uri, "last")
    training = {
        "model": {"from": {"uri": store.uri}},
        "data": {"train": [{"source": "/data.txt", "format": "text"}]},
        "length": {"steps": 1},
        "batch": {"tokensPerStep": 4096},
    }
    with pytest.raises(UserError, match=says):
        model_facts(TrainingConfig.model_validate(training))
    for asked in ({"form": "peft"}, {"dtype": "bf16"}, {"ema": True}):
        with pytest.raises(UserError, match="exported only as it is; leave out --format, --dtype and --ema"):
            export(store, 3, tmp_path / "out", **asked)


def document(**changes: object) -> bytes:
    made = Commit(
        version=PROGRAM_VERSION, kind="folder", trainer="program", job="j", job_uid="u", attempt=1, step=3,
        committed_at=1e9, world_size=1, files=({"key": folder_file_key(3, 1, "a"), "bytes": 1, "checksum": "0" * 8},),
    )  # fmt: skip
    return sealed(made.model_copy(update=changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 1}, "a folder is of version 2"),
        ({"files": ()}, "without files"),
        ({"entry": "../up"}, "no name of a folder"),
    ],
)
def test_a_folder_that_can_not_be_put_back_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidCommit, match=says):
        parse_commit(document(**changes), step=3, folder=None)


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        (["a", "a/b"], "lies in a, which is a file"),
        (["../a"], "no place for a file"),
    ],
)
def test_files_of_a_folder_have_places_of_their_own(paths: list[str], says: str) -> None:
    one = parse_commit(document(), step=3, folder=None).files[0]
    files = tuple(one.model_copy(update={"key": folder_file_key(3, 1, path)}) for path in paths)
    with pytest.raises(InvalidCommit, match=says):
        parse_commit(document(files=files), step=3, folder=None)


def test_tensors_need_what_they_always_needed() -> None:
    made = json.loads(document(kind="tensors", trainer="muster", version=1))
    del made["seal"], made["cursor"]
    with pytest.raises(InvalidCommit, match="cursor: is missing"):
        parse_commit(canonical({**made, "seal": seal_of(made)}), step=3, folder=None)


def test_tensors_of_a_program_need_no_configuration_and_an_older_muster_leaves_them_alone() -> None:
    written = document(kind="tensors")
    assert not {"cursor", "config", "architecture", "tokenizer", "kind", "entry"} & json.loads(written).keys()
    assert parse_commit(written, step=3, folder=None).trainer == "program"
    with pytest.raises(InvalidCommit, match="a program's is of version 2, and it says 1"):
        parse_commit(document(kind="tensors", version=1), step=3, folder=None)
