"""Storage that refuses for good is the user's to correct and ends the job at once; what fails is tried again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.drills.checkpoint.faulty_proxy import Plan, faulty_proxy
from tests.integration.trainer.gangs import Job, training, write_corpus
from tests.s3_servers import KEYS, S3Server, moto_server

from muster.words.names import Env, ExitCode


class BucketJob(Job):
    """Commits in a bucket."""

    bucket = "checkpoints"

    def environment(self, attempt: int, worker: int, resume_step: int) -> dict[str, str]:
        found = super().environment(attempt, worker, resume_step)
        return {**found, Env.CHECKPOINT_URI: f"s3://{self.bucket}/runs/{self.uid}"}


@pytest.fixture(scope="module")
def moto_s3() -> Iterator[S3Server]:
    with moto_server() as server:
        yield server


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch, moto_s3: S3Server) -> pytest.MonkeyPatch:
    for name, value in moto_s3.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MUSTER_S3_RETRY_SECONDS", "1")
    return monkeypatch


def long_job(tmp_path: Path, **changes: Any) -> BucketJob:
    """One whose first save is far away: that its folder can't be written must not take until then to be known."""
    document = training(write_corpus(tmp_path / "corpus"), length={"steps": 100_000}, **changes)
    return BucketJob(tmp_path / "job", document, {"every": 50_000})


def test_a_missing_bucket_ends_the_job_before_its_first_save(keys: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = long_job(tmp_path)
    job.bucket = "nobodys-bucket"
    (end,) = job.start(forked=True).ends()
    assert end.exit_code == ExitCode.USER_ERROR
    assert end.message.startswith(
        "checkpoint.uri: s3://nobodys-bucket/runs/job-uid: can't write it: the bucket does not"
    )


def test_a_model_in_a_missing_bucket_is_the_users_error(keys: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (end,) = long_job(tmp_path, model={"source": "s3://nobodys-bucket/llama"}).start(forked=True).ends()
    assert end.exit_code == ExitCode.USER_ERROR
    assert end.message.startswith("model.source: s3://nobodys-bucket/llama")
    assert "the bucket does not exist; create it or correct the address" in end.message


def test_a_bucket_that_is_closed_after_a_commit_is_tried_again(
    keys: pytest.MonkeyPatch, moto_s3: S3Server, tmp_path: Path
) -> None:
    plan = Plan()
    with faulty_proxy(moto_s3.url, plan) as url:
        keys.setenv("MUSTER_S3_ENDPOINT", url)
        job = BucketJob(
            tmp_path / "job", training(write_corpus(tmp_path / "corpus"), length={"steps": 100_000}), {"every": 20}
        )
        gang = job.start(forked=True)
        committed = gang.reaches(20)
        while not committed.last_commit_step:
            committed = gang.reaches(committed.step + 1)
        plan.refuse_with = (403, "AccessDenied")
        (end,) = gang.ends()
    assert end.exit_code == ExitCode.STORAGE
    assert "access denied; the worker's role needs s3:ListBucket" in end.message


def test_a_store_that_can_not_be_reached_is_tried_again(keys: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys.setenv("MUSTER_S3_ENDPOINT", "http://127.0.0.1:9")
    job = BucketJob(
        tmp_path / "job", training(write_corpus(tmp_path / "corpus"), length={"steps": 100_000}), {"every": 3}
    )
    (end,) = job.start(forked=True).ends()
    assert end.exit_code == ExitCode.STORAGE
    assert "the store can't be reached" in end.message
    assert KEYS["AWS_SECRET_ACCESS_KEY"] not in end.message
