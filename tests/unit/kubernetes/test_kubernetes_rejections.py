"""What the API server says when it lets no pod exist, in its own words, and whether to ask again."""

import asyncio
from typing import Any, cast

import pytest
from tests.polling import WAIT_SECONDS_MAX
from tests.unit.kubernetes.making import JOB_UID, job_item

from muster.kube.client import ApiClient
from muster.kube.errors import ApiError
from muster.operator.core.decision import CreateWorker
from muster.operator.core.observed import Rejection, WorkerState
from muster.operator.kubernetes import observe
from muster.operator.kubernetes.creation import WorkerCreator
from muster.operator.kubernetes.gangs.builtin import BuiltinScheduler
from muster.operator.kubernetes.gangs.protocol import MisnamedObject, UnservedApi
from muster.operator.kubernetes.jobs import JobStore
from muster.operator.kubernetes.pods import PodCache
from muster.operator.kubernetes.rejections import rejected
from muster.operator.kubernetes.render import SiteSettings
from muster.recipe.document import JobSpec
from muster.words.names import WorkerId
from muster.words.status import Phase

POD = 'pods "llama-1-0" is forbidden: '
NEVER = (
    ApiError(
        403, "Forbidden", POD + 'error looking up service account team/trainer: serviceaccount "trainer" not found'
    ),
    ApiError(403, "Forbidden", POD + 'violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false'),
    ApiError(403, "Forbidden", POD + "no PriorityClass with name research was found"),
    ApiError(403, "Forbidden", POD + "failed quota: all: must specify limits.cpu for: trainer"),
    ApiError(403, "Forbidden", POD + "maximum memory usage per Container is 1Gi, but limit is 900Gi"),
    ApiError(403, "", 'admission webhook "policy.example" denied the request: no images from elsewhere'),
    ApiError(422, "Invalid", 'Pod "llama-1-0" is invalid: spec.containers[0].image: Invalid value'),
    ApiError(404, "NotFound", 'namespaces "team" not found'),
    MisnamedObject("spec.gang.deviceClasses.efa: this cluster has no DeviceClass named efa"),
)
MAY_PASS = (
    ApiError(403, "Forbidden", POD + "exceeded quota: two, requested: pods=1, used: pods=1, limited: pods=1"),
    ApiError(403, "Forbidden", POD + "status unknown for quota: two, resources: pods"),
    ApiError(403, "Forbidden", 'pods is forbidden: User "muster" cannot create resource "pods" in API group ""'),
    ApiError(409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "two"'),
    ApiError(500, "InternalError", 'failed calling webhook "mpod.kb.io": connection refused'),
    ApiError(429, "TooManyRequests", "too many requests"),
    TimeoutError(),
    UnservedApi("Kueue is not installed in this cluster (no kueue.x-k8s.io API)"),
)


@pytest.mark.parametrize("error", NEVER, ids=str)
def test_what_never_passes(error: Exception) -> None:
    assert rejected(error, 0.0).kind is Rejection.PERMANENT


@pytest.mark.parametrize("error", MAY_PASS, ids=str)
def test_what_may_pass(error: Exception) -> None:
    told = rejected(error, 0.0)
    assert told.kind is Rejection.TEMPORARY
    assert told.why


class Refuses:
    """An API server that lets everything exist but pods."""

    def __init__(self, error: ApiError) -> None:
        self.error = error

    async def create(self, path: str, body: dict[str, Any], accept: str = "") -> dict[str, Any]:
        if path.endswith("/pods"):
            raise self.error
        return body


@pytest.mark.parametrize(("error", "kind"), [(NEVER[0], Rejection.PERMANENT), (MAY_PASS[0], Rejection.TEMPORARY)])
def test_the_core_is_told_since_when_and_why(error: ApiError, kind: Rejection) -> None:
    async def main() -> None:
        jobs, pods = JobStore(lambda uid: None, JobSpec), PodCache(lambda uid: None)
        status = {"phase": "Starting", "attempt": 1, "gang": {"nodes": ["node-0", "node-1"], "wanted": 2}}
        job = jobs.keep(job_item(status))
        assert job.status.phase is Phase.STARTING
        asked = asyncio.Event()
        creator = WorkerCreator(
            cast(ApiClient, Refuses(error)), jobs, pods, SiteSettings("image", "https://api"),
            lambda job: BuiltinScheduler(), lambda n: "",
            lambda uid: asked.set(), lambda uid: None,
        )  # fmt: skip
        for index in range(2):
            creator.order(JOB_UID, CreateWorker(WorkerId(1, index), f"node-{index}", ("node-0", "node-1"), 0))
        await asyncio.wait_for(asked.wait(), WAIT_SECONDS_MAX)
        seen = observe.workers(job, (), creator.rejected(JOB_UID), lambda name: None, lambda pod: ())
        assert [(worker.state, worker.rejection) for worker in seen] == [(WorkerState.STARTING, kind)] * 2
        assert all(error.message in worker.reason and worker.since > 0 for worker in seen)
        await creator.close()

    asyncio.run(main())
