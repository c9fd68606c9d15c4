"""Before a program starts, its source, its inputs and the newest checkpoint that verifies lie on the node's disk."""

import io
import json
import os
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import try_to_load_from_cache
from tests.unit.programs.gang_of_keepers import Bench, surroundings

from muster.storage.file_store import FileStore
from muster.trainer.checkpoint.failures import DamagedCommit
from muster.trainer.checkpoint.quarantine import quarantined
from muster.trainer.errors import UserError
from muster.trainer.programs import WorkerOrders
from muster.trainer.programs import prepare as module
from muster.trainer.programs.archive import unpack
from muster.trainer.programs.hub_links import link_repositories
from muster.trainer.programs.prepare import prepare
from muster.words.checkpoint import Commit
from muster.words.names import PREPARED, Env
from muster.words.program import Program


def packed(path: Path, *members: tarfile.TarInfo, **files: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            archive.addfile(member)
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/"))
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def odd(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def with_program(around: WorkerOrders, **fields: object) -> WorkerOrders:
    return replace(around, program=Program.model_validate({"command": ["train.py"], **fields}))


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (odd("/etc/cron.d/x", tarfile.REGTYPE), "leads out of the folder"),
        (odd("a/../../x", tarfile.REGTYPE), "leads out of the folder"),
        (odd("link", tarfile.SYMTYPE, "/etc"), "the link 'link' leads out of the folder, to '/etc'"),
        (odd("a/link", tarfile.SYMTYPE, "../../x"), "leads out of the folder"),
        (odd("hard", tarfile.LNKTYPE, "train.py"), "is no file, folder or symbolic link"),
        (odd("fifo", tarfile.FIFOTYPE), "is no file, folder or symbolic link"),
        (odd("device", tarfile.CHRTYPE), "is no file, folder or symbolic link"),
    ],
)
def test_a_source_that_leads_out_is_refused(tmp_path: Path, member: tarfile.TarInfo, says: str) -> None:
    archive = packed(tmp_path / "x.tar.gz", member, **{"train.py": "1"})
    with pytest.raises(UserError, match=says):
        unpack(archive, tmp_path / "out", "program.source")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    archive = packed(tmp_path / "x.tar.gz", odd("a", tarfile.SYMTYPE, "b"), **{"a__x.py": "1"})
    with pytest.raises(UserError, match="lies behind a link"):
        unpack(archive, tmp_path / "out", "program.source")


def test_what_is_no_archive_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(b"text")
    with pytest.raises(UserError, match=r"can't be unpacked .* pack the source again as .tar.gz"):
        unpack(tmp_path / "x.tar.gz", tmp_path / "out", "program.source")


def test_a_python_without_filters_of_archives_unpacks_a_source_as_ours_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian 12's 3.11.2: there no job with a source started."""
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    tool = tarfile.TarInfo("tool")
    tool.mode, tool.uid = 0o6777, 12345
    archive = packed(tmp_path / "x.tar.gz", tool, **{"lib__train.py": "1"})
    extract = tarfile.TarFile.extractall

    def of_old(self: tarfile.TarFile, path: Path, members: list[tarfile.TarInfo]) -> None:
        return extract(self, path, members)

    monkeypatch.setattr(tarfile.TarFile, "extractall", of_old)
    monkeypatch.setattr(tarfile.TarFile, "extraction_filter", staticmethod(lambda member, _: member), raising=False)
    unpack(archive, tmp_path / "source", "program.source x")
    found = {path.name: path.stat() for path in (tmp_path / "source").rglob("*") if path.is_file()}
    assert {name: (about.st_mode & 0o7777, about.st_uid) for name, about in found.items()} == {
        "tool": (0o755, os.getuid()),
        "train.py": (0o644, os.getuid()),
    }


def test_the_source_is_unpacked_and_copied_to_where_the_program_may_write(tmp_path: Path) -> None:
    link = odd("alias", tarfile.SYMTYPE, "train.py")
    archive = packed(tmp_path / "x.tar.gz", link, **{"train.py": "1", "lib__a.py": "2"})
    around = with_program(surroundings(tmp_path), source=archive.as_uri())
    document = prepare(around, lambda words: None)
    assert json.loads((around.worker_dir / PREPARED).read_bytes()) == document
    for folder in (document["sourceDir"], document["workDir"]):
        assert (Path(str(folder)) / "alias").read_text() == "1"
        assert (Path(str(folder)) / "lib" / "a.py").read_text() == "2"
    assert (document["resumeDir"], document["resumeStep"], "entry" in document) == (None, 0, False)
    assert prepare(around, lambda words: None) == document  # an init container may run again


def test_a_source_that_is_gone_is_said(tmp_path: Path) -> None:
    around = with_program(surroundings(tmp_path), source=(tmp_path / "gone.tar.gz").as_uri())
    with pytest.raises(UserError, match="there is no such archive; submit the job again"):
        prepare(around, lambda words: None)


def committed(root: Path, **steps: bytes) -> list[Commit]:
    bench = Bench(root)
    for name, data in steps.items():
        bench.save(name.replace("_", "-"), weights=data)
        bench.settle()
    return [bench.commit(step) for step in bench.steps()]


def test_the_newest_checkpoint_lies_where_the_program_looks_for_it(tmp_path: Path) -> None:
    committed(tmp_path, step_1=b"1", step_2=b"2", step_3=b"3")
    around = surroundings(tmp_path, attempt="2", resume_step="2", checkpoint='{"folder": "out"}')
    document = prepare(around, lambda words: None)
    assert document["resumeDir"] == str(around.worker_dir / "work" / "out" / "step-2")
    assert (document["resumeStep"], document["entry"]) == (2, "step-2")
    assert [path.name for path in around.watched.iterdir()] == ["step-2"]
    assert (around.watched / "step-2" / "weights").read_bytes() == b"2"


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_taken(tmp_path: Path) -> None:
    _, newest = committed(tmp_path, step_1=b"1", step_2=b"2")
    (tmp_path / "store" / "uid" / newest.files[0].key).write_bytes(b"?")
    said: list[str] = []
    document = prepare(surroundings(tmp_path, attempt="2", resume_step="2"), said.append)
    assert document["resumeStep"] == 1
    assert "commit 2 is damaged and set aside, the one before it is tried" in said[0]
    assert "resumes from step 1, for step 2 can't be used" in said[1]
    assert quarantined(FileStore(tmp_path / "store" / "uid")) == {2}


def test_an_attempt_without_a_sound_checkpoint_fails_and_does_not_begin_again(tmp_path: Path) -> None:
    (only,) = committed(tmp_path, step_1=b"1")
    (tmp_path / "store" / "uid" / only.files[0].key).unlink()
    with pytest.raises(Exception, match="no checkpoint up to step 1 can be read; start again without it"):
        prepare(surroundings(tmp_path, attempt="2", resume_step="1"), lambda words: None)


def test_all_workers_resume_from_the_step_that_worker_0_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, newest = committed(tmp_path, step_1=b"1", step_2=b"2")
    (tmp_path / "store" / "uid" / newest.files[0].key).write_bytes(b"?")
    monkeypatch.setattr(module, "CHOICE_PAUSE_SECONDS", 0.01)
    others: list[object] = []
    second = threading.Thread(
        target=lambda: others.append(
            prepare(surroundings(tmp_path, 1, 2, attempt="2", resume_step="2"), lambda words: None)["resumeStep"]
        )
    )
    second.start()
    first = prepare(surroundings(tmp_path, 0, 2, attempt="2", resume_step="2"), lambda words: None)
    second.join()
    assert (first["resumeStep"], others) == (1, [1])


def test_a_worker_that_can_not_take_that_step_takes_no_other(tmp_path: Path) -> None:
    _, newest = committed(tmp_path, step_1=b"1", step_2=b"2")
    prepare(surroundings(tmp_path, 0, 2, attempt="2", resume_step="2"), lambda words: None)
    (tmp_path / "store" / "uid" / newest.files[0].key).write_bytes(b"?")
    with pytest.raises(DamagedCommit):
        prepare(surroundings(tmp_path, 1, 2, attempt="2", resume_step="2"), lambda words: None)
    assert quarantined(FileStore(tmp_path / "store" / "uid")) == {2}


def test_inputs_lie_by_their_names(tmp_path: Path) -> None:
    committed(tmp_path, step_1=b"1", step_2=b"2")
    (tmp_path / "model" / "sub").mkdir(parents=True)
    (tmp_path / "model" / "sub" / "config.json").write_text("{}")
    inputs = {
        "base": {"uri": (tmp_path / "store" / "uid").as_uri(), "step": 1},
        "model": {"source": (tmp_path / "model").as_uri()},
    }
    document = prepare(with_program(surroundings(tmp_path, attempt="2"), inputs=inputs), lambda words: None)
    folder = Path(str(document["inputsDir"]))
    assert (folder / "base" / "weights").read_bytes() == b"1"
    assert (folder / "model" / "sub" / "config.json").read_text() == "{}"


def test_an_input_that_was_deleted_is_a_fault_of_the_job_with_its_place(tmp_path: Path) -> None:
    committed(tmp_path, step_1=b"1", step_2=b"2")
    inputs = {"base": {"job": "pretrain", "uri": (tmp_path / "store" / "uid").as_uri(), "step": 3}}
    with pytest.raises(UserError) as refused:
        prepare(with_program(surroundings(tmp_path, attempt="2"), inputs=inputs), lambda words: None)
    words = str(refused.value)
    assert words.startswith("program.inputs.base: the checkpoint of step 3 of job pretrain can't be read: ")
    assert words.endswith("Submit the job again with another step; muster checkpoints ls pretrain lists them")


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"job": "other"}, "inputs.base.job 'other' was not resolved to a checkpoint folder"),
        ({"source": "file:///nothing/here"}, "holds no files"),
    ],
)
def test_an_input_that_is_not_there_is_named(tmp_path: Path, wanted: dict[str, str], says: str) -> None:
    around = with_program(surroundings(tmp_path), inputs={"base": wanted})
    with pytest.raises(UserError, match=says):
        prepare(around, lambda words: None)


def hub_cache(root: Path, revision: str, **files: str) -> Path:
    """A cache with one model, as the hub's library lays it out."""
    repository = root / "models--team--tiny"
    (repository / "blobs").mkdir(parents=True, exist_ok=True)
    (repository / "snapshots" / revision).mkdir(parents=True)
    for name, text in files.items():
        (repository / "blobs" / text).write_text(text)
        (repository / "snapshots" / revision / name).symlink_to(f"../../blobs/{text}")
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    return root


def test_models_that_the_machine_has_are_linked_into_a_programs_own_cache(tmp_path: Path) -> None:
    """A newer revision can be downloaded beside them: nothing that is written leads to the machine's cache."""
    machine, own = hub_cache(tmp_path / "machine", "a1", config="old"), tmp_path / "own"
    (machine / "version.txt").write_text("1")
    assert link_repositories(machine, own) == 1
    found = try_to_load_from_cache("team/tiny", "config", cache_dir=own)
    assert isinstance(found, str)
    assert (Path(found).read_text(), Path(found).is_relative_to(own)) == ("old", True)
    hub_cache(own, "b2", config="new")
    newer = try_to_load_from_cache("team/tiny", "config", cache_dir=own)
    assert isinstance(newer, str)
    assert Path(newer).read_text() == "new"
    assert (machine / "models--team--tiny" / "refs" / "main").read_text() == "a1"
    assert [path.name for path in (machine / "models--team--tiny" / "blobs").iterdir()] == ["old"]
    assert link_repositories(machine, own) == 0, "what is there stays"
    assert sorted(path.name for path in own.iterdir()) == ["models--team--tiny"]


@pytest.mark.parametrize(("home", "linked"), [("cache/huggingface", True), ("elsewhere", False)])
def test_prepare_links_them_unless_the_job_names_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, linked: bool
) -> None:
    monkeypatch.setenv(Env.HUB_CACHE, str(hub_cache(tmp_path / "machine", "a1", config="old")))
    monkeypatch.setenv(Env.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / home))
    said: list[str] = []
    prepare(surroundings(tmp_path), said.append)
    assert (tmp_path / home / "hub" / "models--team--tiny" / "refs" / "main").exists() == linked
    assert any("1 repository of the hub" in words for words in said) == linked


def test_a_cache_that_can_not_be_linked_stops_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Env.HUB_CACHE, str(hub_cache(tmp_path / "machine", "a1", config="old")))
    monkeypatch.setenv(Env.CACHE_DIR, str(tmp_path))
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "taken"))
    said: list[str] = []
    prepare(surroundings(tmp_path), said.append)
    assert any("can't be linked, and are downloaded again" in words for words in said)
