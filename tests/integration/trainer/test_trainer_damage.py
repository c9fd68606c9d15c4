"""A resume trusts neither the bytes on storage nor that the data is still what it was."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integration.trainer.gangs import ARCHITECTURE, Job, training, write_corpus

from muster.storage.file_store import FileStore
from muster.trainer.checkpoint.quarantine import quarantine
from muster.words.names import ExitCode

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job of 12 steps as its first attempt left it, with two commits at least (a busy uploader skips a save)."""
    root = tmp_path_factory.mktemp("damage")
    document = training(write_corpus(root / "corpus"), length={"steps": 12})
    job = Job(root / "job", document, {"every": 4})
    job.start(forked=True).ends_well()
    assert job.commits()[0] == 4
    assert job.commits()[-1] == 12
    return job


@pytest.fixture
def stopped(trained: Job, tmp_path: Path) -> Job:
    """That job, to be damaged."""
    shutil.copytree(trained.root, tmp_path / "job")
    return replace(trained, root=tmp_path / "job")


def flip_a_bit(job: Job, step: int) -> None:
    shard = job.folder / job.commit(step)["files"][0]["key"]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0b100
    shard.chmod(0o644)
    shard.write_bytes(data)


def test_a_damaged_commit_is_set_aside_and_the_one_before_is_used(stopped: Job) -> None:
    before, (*_, older, newest) = stopped.steps(1), stopped.commits()
    flip_a_bit(stopped, newest)
    gang = stopped.start(attempt=2, resume_step=newest, forked=True)
    gang.ends_well()
    after = stopped.steps(2)
    assert [record.step for record in after] == list(range(older + 1, 13))
    assert [record.loss for record in after] == [record.loss for record in before[older:]]
    assert f"commit {newest} is damaged and set aside" in gang.log()
    assert (stopped.folder / "quarantine" / f"step-{newest:08d}.json").exists()


@pytest.mark.long
def test_an_attempt_that_was_to_begin_anew_leaves_it_to_the_next_one(stopped: Job) -> None:
    """All commits were set aside, and verify now: the store had answered wrongly."""
    *_, newest = stopped.commits()
    for step in stopped.commits():
        quarantine(FileStore(stopped.folder), step, "a wrong answer")
    (end,) = stopped.start(attempt=2, forked=True).ends()
    assert end.exit_code == ExitCode.STORAGE
    assert not list(stopped.root.glob("attempt-2/*/steps.jsonl")), "nothing was trained"
    assert f"commit {newest} was set aside, and verifies now: it is put back" in end.message
    assert stopped.commits()[-1] == newest


@pytest.mark.long
def test_a_resume_that_does_not_fit_the_commit_is_refused(stopped: Job) -> None:
    commits = stopped.commits()
    larger = stopped.training | {"model": {"architecture": ARCHITECTURE | {"vocabSize": 300}}}
    fits = stopped.training
    stopped.training = larger
    (end,) = stopped.start(attempt=2, resume_step=4, forked=True).ends()
    assert end.exit_code == ExitCode.USER_ERROR
    assert "training.model.architecture.vocabSize: 260 → 300" in end.message
    assert "undo these changes, or submit a new job with model.from" in end.message

    stopped.training = fits
    document = Path(fits["data"]["train"][0]["source"]).parent / "000.txt"
    text = document.read_text()
    document.write_text("quite another text " * 40)
    (end,) = stopped.start(attempt=3, resume_step=4, forked=True).ends()
    document.write_text(text)  # the other tests' too
    assert end.exit_code == ExitCode.USER_ERROR
    assert "training.data holds other contents than when step 4 was committed" in end.message
    assert stopped.commits() == commits, "a refusal loses nothing"
