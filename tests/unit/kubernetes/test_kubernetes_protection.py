"""A job has its finalizer before its first status: a deleted job waits for its gang, and statuses cost less."""

import asyncio
from typing import Any, cast

import pytest
from tests.unit.kubernetes.making import JOB_UID, job_item

from muster.kube.client import ApiClient
from muster.kube.errors import ApiError
from muster.operator.kubernetes.render import SiteSettings
from muster.operator.kubernetes.world import KubernetesWorld
from muster.operator.world import VersionConflict
from muster.recipe.document import JobSpec
from muster.words.base import dump
from muster.words.names import FINALIZER
from muster.words.status import JobStatus, Phase

STARTING = JobStatus(queued_at=1.0, since=1.0, phase=Phase.STARTING)


class Server:
    """Keeps one job; each write makes a version. conflict: the next patch finds that somebody else wrote."""

    def __init__(self, conflict: bool = False) -> None:
        self.conflict, self.version = conflict, 7
        self.writes: list[tuple[str, dict[str, Any]]] = []

    async def patch(self, path: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
        if self.conflict:
            raise ApiError(409, "Conflict", "the object has been modified")
        return self._written("patch", body)

    async def put(self, path: str, body: dict[str, Any], accept: str = "") -> dict[str, Any]:
        return self._written("put", body)

    def _written(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        assert body["metadata"]["resourceVersion"] == str(self.version)
        self.writes.append((verb, body))
        self.version += 1
        return {"metadata": job_item(version=self.version)["metadata"] | {"finalizers": [FINALIZER]}}


def write_status(server: Server, status: JobStatus = STARTING, before: Any = None, **meta: Any) -> KubernetesWorld:
    async def write() -> KubernetesWorld:
        world = KubernetesWorld(cast(ApiClient, server), "muster-system", SiteSettings(image="trainer"), JobSpec)
        item = job_item()
        world.job_cache.keep(item | {"metadata": item["metadata"] | meta, "status": dump(before) if before else {}})
        await world.write_status(JOB_UID, status, "7")
        return world

    return asyncio.run(write())


def test_the_finalizer_comes_before_the_first_status_and_ends_the_tracking_of_fields() -> None:
    server = Server()
    world = write_status(server)
    (first, protection), (second, _) = server.writes
    assert (first, second) == ("patch", "put")
    assert protection["metadata"]["finalizers"] == [FINALIZER]
    assert protection["metadata"]["managedFields"] == [{}]
    job = world.job_cache.get(JOB_UID)
    assert job is not None
    assert (job.version, job.finalizers, job.status) == ("9", (FINALIZER,), STARTING)


def test_others_finalizers_and_the_record_of_who_applied_the_job_are_kept() -> None:
    server = Server()
    write_status(server, finalizers=["example.com/audit"], managedFields=[{"operation": "Apply", "manager": "flux"}])
    assert server.writes[0][1]["metadata"] == {"finalizers": ["example.com/audit", FINALIZER], "resourceVersion": "7"}


def test_one_that_has_it_is_not_given_it_again() -> None:
    server = Server()
    write_status(server, finalizers=[FINALIZER])
    assert [verb for verb, _ in server.writes] == ["put"]


RUNNING = STARTING.model_copy(update={"phase": Phase.RUNNING})
ENDED = STARTING.model_copy(update={"phase": Phase.SUCCEEDED})


@pytest.mark.parametrize(
    ("before", "after", "operation", "verbs"),
    [
        (STARTING, RUNNING, "Update", ["put"]),
        (RUNNING, RUNNING, "Update", ["patch", "put"]),
        (RUNNING, ENDED, "Update", ["put"]),
        (RUNNING, RUNNING, "Apply", ["put"]),
    ],
)
def test_the_tracking_of_a_job_that_the_api_made_ends_once_the_job_lasts(
    before: JobStatus, after: JobStatus, operation: str, verbs: list[str]
) -> None:
    server, managed = Server(), [{"operation": operation, "manager": "muster-api"}]
    world = write_status(server, after, before, finalizers=[FINALIZER], managedFields=managed)
    assert [verb for verb, _ in server.writes] == verbs
    if "patch" in verbs:
        assert server.writes[0][1]["metadata"] == {
            "finalizers": [FINALIZER],
            "managedFields": [{}],
            "resourceVersion": "7",
        }
        job = world.job_cache.get(JOB_UID)
        assert job is not None
        assert not job.tracked


def test_a_job_that_is_deleted_already_takes_no_finalizer() -> None:
    server = Server()
    write_status(server, deletionTimestamp="2026-11-20T09:00:00Z", finalizers=["example.com/audit"])
    assert [verb for verb, _ in server.writes] == ["put"]


def test_where_somebody_else_wrote_meanwhile_no_status_is_written() -> None:
    server = Server(conflict=True)
    with pytest.raises(VersionConflict):
        write_status(server)
    assert server.writes == []


def test_phases_are_counted_while_jobs_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape comes from another thread, in the middle of a list of ten thousand."""

    async def count() -> dict[str, int]:
        world = KubernetesWorld(cast(ApiClient, Server()), "muster-system", SiteSettings(image="trainer"), JobSpec)
        jobs = world.job_cache
        for number in range(3):
            jobs.keep(job_item() | {"metadata": job_item()["metadata"] | {"uid": f"uid-{number}"}})
        later = (f"later-{number}" for number in range(9))

        def come(phase: Phase) -> str:
            jobs.keep(job_item() | {"metadata": job_item()["metadata"] | {"uid": next(later)}})
            return phase.value

        monkeypatch.setattr(Phase, "__str__", come)
        return world.phases()

    assert asyncio.run(count()) == {"Queued": 3}
