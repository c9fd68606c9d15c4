"""Cluster to rows and rows to cluster: each status once, each job once, whatever crashes in between."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from tests.integration.api.platform import Platform, document, platform, until

from muster.api.core.cluster.cluster import ApplyOutcome, ApplyResult, DesiredJob, FoundJob, LocalJobCluster
from muster.api.core.database.tables import AttemptRow, JobRow
from muster.local.cluster import LocalCluster, RawChange
from muster.recipe.document import parse_job
from muster.replies.views import TIME_KEYS
from muster.words.signals import Cause
from muster.words.state_folder import StateFolder
from muster.words.status import (
    STATUS_VERSION,
    Attempt,
    CheckpointStatus,
    ExcludedNode,
    Failure,
    JobStatus,
    Phase,
    Progress,
)
from muster.words.times import epoch_seconds, rfc3339


async def story(here: Platform, uid: str) -> None:
    """A life with a failure in the middle, written as the operator would write it."""
    first = Attempt(number=1, created_at=10.0, nodes=("node-0", "node-1"), world_size=2)
    here.operate(uid, phase=Phase.QUEUED, code="AwaitingCapacity", because="gang needs 2 nodes, 1 free")
    here.operate(
        uid, phase=Phase.STARTING, code="CreatingWorkers", because="2 workers start", attempt=1, attempts=(first,)
    )
    first = first.model_copy(update={"first_step_at": 12.5})
    here.operate(uid, phase=Phase.RUNNING, code="Training", because="2 of 2 workers train", attempts=(first,))
    here.operate(uid, progress=Progress(step=20, steps=200, loss=3.0))
    here.operate(uid, checkpoint=CheckpointStatus(step=20, committed_at=15.0, uri="file:///x", best_step=20))
    here.operate(uid, progress=Progress(step=30, steps=200, loss=2.9, evaluation_loss=2.95))
    failed = first.model_copy(
        update={"ended_at": 20.0, "last_step": 33, "lost_steps": 13, "cause": Cause.INFRASTRUCTURE, "outcome": "failed"}
    )
    failure = Failure(cause=Cause.INFRASTRUCTURE, attempt=1, at=20.0, message="killed", worker=1, rank=1, exit_code=137)
    here.operate(
        uid, phase=Phase.RESTARTING, code="BackingOff", because="again in 1 s", attempts=(failed,), last_failure=failure
    )
    second = Attempt(number=2, created_at=21.0, resume_step=20, first_step_at=23.0, world_size=2)
    excluded = (ExcludedNode(node="node-1", until=99.0, why="2 failures"),)
    here.operate(
        uid,
        phase=Phase.RUNNING,
        code="Training",
        because="2 of 2 workers train",
        attempt=2,
        attempts=(failed, second),
        excluded_nodes=excluded,
    )
    done = second.model_copy(update={"ended_at": 50.0, "last_step": 200, "outcome": "succeeded"})
    here.operate(uid, attempts=(failed, done))
    here.operate(uid, phase=Phase.SUCCEEDED, code="Finished", because="200 of 200 steps", finished_at=50.0)


STORY = [
    "job.created",
    "job.queued",
    "attempt.started",
    "job.starting",
    "attempt.running",
    "job.running",
    "checkpoint.committed",
    "evaluation.completed",
    "attempt.failed",
    "job.restarting",
    "attempt.started",
    "attempt.running",
    "node.excluded",
    "job.running",
    "attempt.succeeded",
    "job.succeeded",
]


@pytest.mark.both_databases
async def test_a_life_becomes_typed_events_and_attempts(here: Platform) -> None:
    uid = (await here.submit())["id"]
    await here.handed_over(uid)
    await story(here, uid)
    await here.phase(uid, "Succeeded")
    events = (await here.get(f"/jobs/{uid}/events"))["items"]
    assert [event["type"] for event in events] == STORY
    assert [event["id"] for event in events] == list(range(1, len(STORY) + 1))
    failed = next(event for event in events if event["type"] == "attempt.failed")
    assert failed["attempt"] == 1
    assert sorted(events, key=lambda event: event["at"]) == events, "times never go back"
    assert failed["data"] == {
        "cause": "infrastructure",
        "lastStep": 33,
        "lostSteps": 13,
        "seconds": {},
        "worker": 1,
        "rank": 1,
        "exitCode": 137,
        "happenedAt": rfc3339(20.0),  # by the story's clock, which is far behind that of the submission
    }
    attempts = (await here.get(f"/jobs/{uid}/attempts"))["items"]
    assert [(a["number"], a["outcome"], a["cause"], a["resumeStep"]) for a in attempts] == [
        (1, "failed", "infrastructure", 0),
        (2, "succeeded", None, 20),
    ]
    some = await here.get(f"/jobs/{uid}/events", after=2, limit=2)
    assert ([event["id"] for event in some["items"]], some["lastId"]) == ([3, 4], 4)
    chosen = await here.get(f"/jobs/{uid}/events", type=["attempt.failed", "job.succeeded"])
    assert [event["type"] for event in chosen["items"]] == ["attempt.failed", "job.succeeded"]


def as_numbers(document: Any) -> Any:
    """As the release before wrote it."""
    if isinstance(document, dict):
        return {key: epoch_seconds(v) if key in TIME_KEYS and v else as_numbers(v) for key, v in document.items()}
    return [as_numbers(item) for item in document] if isinstance(document, list) else document


@pytest.mark.both_databases
async def test_times_are_rfc_3339_whichever_release_wrote_the_rows(here: Platform) -> None:
    """The cluster's history and the API's rows hold numbers of the release before: read, told once, and shown alike."""
    uid = (await here.submit())["id"]
    await here.handed_over(uid)
    await story(here, uid)
    await here.phase(uid, "Succeeded")
    paths = [f"/jobs/{uid}{part}" for part in ("", "/why", "/attempts", "/events")]
    shown = [await here.get(path) for path in paths] + [(await here.get("/jobs"))["items"]]
    assert shown[0]["status"]["finishedAt"] == "1970-01-01T00:00:50.000000Z"
    assert shown[0]["metadata"]["creationTimestamp"] == shown[4][0]["createdAt"]
    assert abs(epoch_seconds(shown[4][0]["createdAt"]) - time.time()) < 600
    assert shown[2]["items"][0]["firstStepAt"] == "1970-01-01T00:00:12.500000Z"
    excluded = next(event for event in shown[3]["items"] if event["type"] == "node.excluded")
    assert excluded["data"]["until"] == "1970-01-01T00:01:39.000000Z"

    async with here.services.database.write() as session:
        for row in (await session.scalars(select(JobRow))).all():
            row.status = as_numbers(row.status) | {"schemaVersion": 1}
        for attempt in (await session.scalars(select(AttemptRow))).all():
            attempt.body = as_numbers(attempt.body)
    shown[0]["status"]["schemaVersion"] = 1
    assert [await here.get(path) for path in paths] + [(await here.get("/jobs"))["items"]] == shown
    with sqlite3.connect(here.state.cluster) as db:
        (text,) = db.execute("SELECT status FROM jobs").fetchone()
        db.execute("UPDATE jobs SET status = ?", (json.dumps(as_numbers(json.loads(text))),))
    here.operate(uid)  # nothing but the form of its times changes
    shown[0]["status"]["schemaVersion"] = STATUS_VERSION

    async def taken_over() -> bool:
        return bool(await here.get(paths[0]) == shown[0])

    await until(taken_over, "the status")
    assert [await here.get(path) for path in paths[1:]] == shown[1:4]


@pytest.mark.both_databases
async def test_what_happened_while_the_api_was_away_is_told_once(tmp_path: Path, database_url: str) -> None:
    state = tmp_path / "state"
    async with platform(state, database_url=database_url) as here:
        uid = (await here.submit())["id"]
        await here.handed_over(uid)
    await story(here, uid)
    for _ in range(2):
        async with platform(state, database_url=database_url) as here:
            await here.phase(uid, "Succeeded")
            assert await here.events(uid) == STORY


async def test_a_crash_in_the_middle_of_a_batch_loses_and_repeats_nothing(
    here: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit that would have held the batch fails: the events must come with the next try, and once."""
    from muster.api.core import mirror

    uid = (await here.submit())["id"]
    await here.handed_over(uid)
    real, crashes = mirror.events.append, []

    async def crashing(session: Any, job_id: str, happened: Any) -> None:
        await real(session, job_id, happened)
        if len(crashes) < 2:
            crashes.append(job_id)
            raise RuntimeError("crash after the write, before the checkpoint")

    monkeypatch.setattr(mirror.events, "append", crashing)
    await story(here, uid)
    await here.phase(uid, "Succeeded")
    assert len(crashes) == 2
    assert await here.events(uid) == STORY


@pytest.mark.both_databases
async def test_two_apis_on_one_database_tell_everything_once(tmp_path: Path, database_url: str) -> None:
    state = tmp_path / "state"
    async with platform(state, database_url=database_url) as one, platform(state, database_url=database_url) as two:
        uid = (await one.submit())["id"]
        await two.handed_over(uid)
        for _ in range(3):
            one.operate(uid, progress=Progress(step=1))
        await story(one, uid)
        await one.phase(uid, "Succeeded")
        await two.phase(uid, "Succeeded")
        assert await two.events(uid) == STORY
        assert len(one.cluster.jobs()) == 1


async def test_a_status_of_a_newer_operator_is_kept_whole(here: Platform) -> None:
    uid = (await here.submit())["id"]
    await here.handed_over(uid)
    newer = {
        "phase": "Hibernating",
        "code": "Cold",
        "because": "it is winter",
        "attempt": 3,
        "hibernation": {"depth": 7},
    }
    with closing(sqlite3.connect(here.state.cluster)) as db, db:
        (version,) = db.execute("UPDATE counter SET version = version + 1 RETURNING version").fetchone()
        row = (version, uid, time.time(), 0, json.dumps(newer))
        db.execute("INSERT INTO history (version, uid, at, gone, status) VALUES (?, ?, ?, ?, ?)", row)
    job = await here.phase(uid, "Hibernating")
    assert job["status"]["hibernation"] == {"depth": 7}
    assert (await here.get(f"/jobs/{uid}/why"))["because"] == "it is winter"
    assert (await here.get("/jobs", phase="Hibernating"))["items"][0]["code"] == "Cold"
    assert (await here.events(uid))[-1] == "job.changed"
    other = (await here.submit("other"))["id"]
    await here.finish(other)  # the mirror goes on


@pytest.mark.both_databases
async def test_a_job_made_in_the_cluster_is_imported(here: Platform) -> None:
    submission = parse_job(document("by-hand"))
    uid = here.cluster.create("by-hand", "default", submission.spec, {"team": "nlp"}).metadata.uid

    async def ask() -> Any:
        return (await here.get("/jobs", label="team=nlp"))["items"]

    (job,) = await until(ask, "the import")
    assert (job["id"], job["name"]) == (uid, "by-hand")
    assert (await here.events(uid))[0] == "job.imported"
    taken = await here.client.post("/api/v1/jobs", json=document("by-hand"))
    assert taken.json()["code"] == "name_taken"


@pytest.mark.both_databases
async def test_a_job_that_can_not_be_read_is_shown_and_holds_up_nobody(here: Platform) -> None:
    """The mirror stopped at it, for all jobs."""
    uid = here.cluster.create("broken", "default", parse_job(document("broken")).spec, {}).metadata.uid
    with closing(sqlite3.connect(here.state.cluster)) as db:
        db.execute(
            "UPDATE jobs SET spec = ? WHERE uid = ?",
            ('{"gang": {"nodes": "four"}, "priority": "high", "training": "none"}', uid),
        )
        db.commit()
    before = JobStatus.model_validate_json(here.cluster.raw(uid).status)
    words = "the spec was refused: spec.gang.nodes: must be a number"
    refused = before.model_copy(update={"phase": Phase.FAILED, "code": "InvalidSpec", "because": words})
    here.cluster.write_status(uid, refused, here.cluster.raw(uid).metadata.resource_version)
    other = (await here.submit("sound"))["id"]
    await here.finish(other)
    await here.phase(uid, Phase.FAILED)
    (shown,) = (await here.get("/jobs", name="broken"))["items"]
    assert (shown["phase"], shown["code"]) == ("Failed", "InvalidSpec")
    assert "spec.gang.nodes" in (await here.get(f"/jobs/{uid}/why"))["because"]
    assert (await here.get(f"/jobs/{uid}"))["spec"]["gang"] == {"nodes": "four"}


async def test_a_job_removed_from_the_cluster_keeps_its_history(here: Platform) -> None:
    uid = (await here.submit())["id"]
    await here.handed_over(uid)
    here.operate(uid, phase=Phase.RUNNING, code="Training", because="trains")
    here.cluster.delete(uid)
    here.cluster.remove(uid)
    job = await here.phase(uid, "Cancelled")
    assert job["status"]["code"] == "Deleted"
    assert (await here.events(uid))[-1] == "job.deleted"
    await here.submit()  # the name is free


class FlakyCluster(LocalJobCluster):
    """Does its work and then loses the answer, as often as told."""

    def __init__(self, cluster: LocalCluster, losses: int) -> None:
        super().__init__(cluster)
        self.losses = losses

    async def apply(self, jobs: Any) -> list[ApplyResult]:
        answers = await super().apply(jobs)
        if self.losses:
            self.losses -= 1
            raise ConnectionError("the answer was lost")
        return answers


class RefusingCluster(LocalJobCluster):
    """Takes no job, as a cluster whose rights or policies forbid it."""

    async def apply(self, jobs: Any) -> list[ApplyResult]:
        return [
            ApplyResult(job.uid, ApplyOutcome.RETRY, error="403 Forbidden: no jobs of value-x here") for job in jobs
        ]


async def test_a_job_that_the_cluster_does_not_take_says_why(tmp_path: Path) -> None:
    """To its owner, and without the values of its variables, which a refusal may repeat."""
    async with platform(tmp_path, RefusingCluster(LocalCluster(StateFolder(tmp_path).cluster))) as here:
        uid = (await here.submit(runtime={"env": [{"name": "A", "value": "value-x"}]}))["id"]

        async def refused() -> bool:
            return "403 Forbidden" in (await here.get(f"/jobs/{uid}/why"))["because"]

        await until(refused, "the reason")
        status = (await here.get(f"/jobs/{uid}"))["status"]
        assert status["because"] == (
            "the cluster has not taken the job yet: 403 Forbidden: no jobs of *** here; the API asks again every half "
            "minute"
        )


class ReluctantCluster(LocalJobCluster):
    """Refuses each job once; no operator ever looks at one."""

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(cluster)
        self.refused: set[str] = set()

    async def apply(self, jobs: Any) -> list[ApplyResult]:
        new = [job for job in jobs if job.uid not in self.refused]
        self.refused |= {job.uid for job in new}
        answers = await super().apply([job for job in jobs if job not in new])
        return [*answers, *(ApplyResult(job.uid, ApplyOutcome.RETRY, error="403 Forbidden") for job in new)]

    async def changes(self, after_version: int, limit: int) -> list[RawChange]:
        return []


async def test_a_job_that_the_cluster_takes_at_last_says_no_more_that_it_does_not(tmp_path: Path) -> None:
    """Nobody else would say so before an operator has looked at the job, and there may be none."""
    async with platform(tmp_path, ReluctantCluster(LocalCluster(StateFolder(tmp_path).cluster))) as here:
        uid = (await here.submit())["id"]

        async def taken() -> bool:
            return "handed to the operator, which" in (await here.get(f"/jobs/{uid}"))["status"]["because"]

        await until(taken, "the job to be taken")
        assert (await here.get(f"/jobs/{uid}"))["handedOver"]


async def test_a_lost_answer_takes_back_no_status(tmp_path: Path) -> None:
    """The cluster took the job, and its operator ended it, before the hand-over was found to have failed."""
    cluster = LosingCluster(LocalCluster(StateFolder(tmp_path).cluster))
    async with platform(tmp_path, cluster) as here:
        cluster.here = here
        uid = (await here.submit())["id"]
        await here.handed_over(uid)
        assert cluster.lost
        assert (await here.get(f"/jobs/{uid}"))["status"]["because"] == "done"


class LosingCluster(LocalJobCluster):
    """Takes a job and ends it, and when the mirror knows that, says that it timed out."""

    here: Platform
    lost = False

    async def apply(self, jobs: Any) -> list[ApplyResult]:
        answers = await super().apply(jobs)
        if self.lost:
            return answers
        self.lost = True
        for job in jobs:
            self.here.operate(job.uid, phase=Phase.SUCCEEDED, code="Done", because="done")
            await self.here.phase(job.uid, "Succeeded")
        return [ApplyResult(job.uid, ApplyOutcome.RETRY, error="TimeoutError: ") for job in jobs]


async def test_jobs_made_in_one_second_are_listed_as_they_were_made(tmp_path: Path) -> None:
    """By others, at once: a cluster's times of creation are whole seconds."""
    (tmp_path / "cluster").mkdir()
    there = LocalCluster(StateFolder(tmp_path).cluster)
    spec = parse_job(document()).spec
    made = [there.create(f"job-{number}", "default", spec, {}).metadata.uid for number in range(40)]
    async with platform(tmp_path, SecondsCluster(there)) as here:

        async def seen() -> bool:
            return len((await here.get("/jobs", limit=100))["items"]) == len(made)

        await until(seen, "the mirror to read them all")
        assert [job["id"] for job in (await here.get("/jobs", limit=100))["items"]] == made[::-1]


class SecondsCluster(LocalJobCluster):
    """Says of every job that it was made in the same second."""

    async def find(self, uid: str) -> FoundJob | None:
        found = await super().find(uid)
        return replace(found, created_at=1_000.0) if found is not None else None


async def test_a_lost_answer_makes_no_second_job(tmp_path: Path, database_url: str) -> None:
    state = tmp_path / "state"
    cluster = FlakyCluster(LocalCluster(StateFolder(state).cluster), losses=3)
    async with platform(state, cluster, database_url=database_url) as here:
        uids = {(await here.submit(f"job-{number}"))["id"] for number in range(5)}
        for uid in uids:
            await here.handed_over(uid)
        assert {job.metadata.uid for job in here.cluster.jobs()} == uids
        assert cluster.losses == 0


async def test_a_job_that_came_and_went_is_not_made_again(tmp_path: Path, database_url: str) -> None:
    """Crash after the create, before the row knew: meanwhile the job ended and was swept away."""
    state = tmp_path / "state"
    async with platform(state, database_url=database_url) as here:
        await here.services.background.stop()
        uid = (await here.submit())["id"]
    wish = DesiredJob(uid, "demo", "default", {}, parse_job(document()).spec, seen=False)
    cluster = LocalCluster(StateFolder(state).cluster)
    assert [answer.outcome for answer in await LocalJobCluster(cluster).apply([wish])] == ["done"]
    job = cluster.get(uid)
    cluster.write_status(uid, job.status.model_copy(update={"phase": Phase.SUCCEEDED}), job.metadata.resource_version)
    cluster.remove(uid)
    async with platform(state, database_url=database_url) as here:
        await here.handed_over(uid)
        assert (await here.get(f"/jobs/{uid}"))["status"]["phase"] == "Succeeded"
        assert here.cluster.jobs() == []


@pytest.mark.both_databases
async def test_a_name_that_a_live_stranger_holds_fails_the_job(tmp_path: Path, database_url: str) -> None:
    """Made in the cluster between the submission and the hand-over; the row must not wait for ever."""
    state = tmp_path / "state"
    async with platform(state, database_url=database_url) as here:
        await here.services.background.stop()
        uid = (await here.submit())["id"]
        stranger = here.cluster.create("demo", "default", parse_job(document()).spec, {}).metadata.uid
    async with platform(state, database_url=database_url) as here:
        job = await here.phase(uid, "Failed")
        assert job["status"]["code"] == "NameTaken"
        assert (await here.events(uid))[-1] == "job.failed"
        assert [job.metadata.uid for job in here.cluster.jobs()] == [stranger]
        assert (await here.events(stranger))[0] == "job.imported"
