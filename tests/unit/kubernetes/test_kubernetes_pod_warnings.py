"""A Secret that is missing as a volume: no pod's status says it, only the kubelet's events."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.unit.core.seen import starting, with_status
from tests.unit.kubernetes.making import JOB_UID, make_job, node_item, pod_item

from muster.kube.client import ApiClient
from muster.operator.core.decide import decide
from muster.operator.kubernetes import observe
from muster.operator.kubernetes.nodes import read_node
from muster.operator.kubernetes.pod_warnings import PodWarnings
from muster.operator.kubernetes.pods import PodState, read_pod
from muster.operator.kubernetes.settings import TOLERATIONS
from muster.words.signals import Cause
from muster.words.status import Phase

STARTING = {"phase": "Starting", "attempt": 1, "gang": {"wanted": 2, "nodes": ["node-0", "node-1"]}}
CREATED = 1_795_161_610.0  # 2026-11-20T08:00:10Z
LONG_AFTER = CREATED + 16
ABSENT = 'MountVolume.SetUp failed for volume "keys" : secret "absent" not found'
NO_DRIVER = (
    'MountVolume.MountDevice failed for volume "data" : driver name efs.csi.aws.com not found in the list of '
    "registered CSI drivers"
)

SLOW = "failed to sync secret cache: timed out waiting for the condition"
NO_KEY = "references non-existent secret key: token"


def event(message: str, reason: str = "FailedMount", at: str = "08:00:20") -> dict[str, Any]:
    return {"reason": reason, "message": message, "lastTimestamp": f"2026-11-20T{at}Z", "eventTime": None}


class Server:
    """Events of the pod that is asked for."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events = list(events)
        self.asked: list[str] = []

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        assert path == "/api/v1/namespaces/team-nlp/events"
        self.asked.append(query["fieldSelector"])
        return {"items": self.events}


def pod(worker: int = 0, **status: Any) -> PodState:
    waits = {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}
    item = pod_item(worker, status={"phase": "Pending", "podIP": "", "containerStatuses": [waits]} | status)
    made = read_pod(item)
    assert made is not None
    assert made.created_at == CREATED
    return made


async def looked(server: Server, *pods: PodState, now: float = LONG_AFTER) -> tuple[tuple[PodState, ...], list[str]]:
    """(the pods with what was read, whose job was looked at anew)."""
    news: list[str] = []
    job = make_job(STARTING)
    warnings = PodWarnings(cast(ApiClient, server), news.append, lambda what, error: pytest.fail(f"{what}: {error}"))
    warnings.follow(job, pods, now)
    while tasks := asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}:
        await asyncio.gather(*tasks)
    warnings.follow(job, pods, now)  # at once again: it is not asked twice
    return warnings.added_to(job, pods), news


async def test_the_first_pod_without_an_address_is_asked_after() -> None:
    server = Server(event("0/3 nodes are available", "FailedScheduling", at="08:00:30"), event(ABSENT))
    (placed, first, second), news = await looked(server, pod(0, podIP="10.0.0.7"), pod(1), pod(2))
    assert server.asked == ["involvedObject.uid=pod-1-1,type=Warning"]
    assert news == [JOB_UID]
    assert (first.trouble, first.refused) == (f"FailedMount: {ABSENT}", True)
    assert (placed.trouble, second.trouble) == ("", "")


@pytest.mark.parametrize(
    ("seen", "now"),
    [
        (pod(), CREATED + 14),  # most volumes are mounted by then
        (pod(podIP="10.0.0.7"), LONG_AFTER),  # pulls its image
        (replace(pod(), node=""), LONG_AFTER),
        (replace(pod(), trouble="CreateContainerError: no"), LONG_AFTER),
        (replace(pod(), attempt=2), LONG_AFTER),
    ],
)
async def test_events_are_read_of_no_other_pod(seen: PodState, now: float) -> None:
    """The API server keeps them in no order that makes a look at one pod's cheap."""
    server = Server(event(ABSENT))
    assert await looked(server, seen, now=now) == ((seen,), [])
    assert server.asked == []


@pytest.mark.parametrize(
    ("events", "trouble", "refused"),
    [
        ([], "", False),
        ([event(SLOW)], f"FailedMount: {SLOW}", False),
        ([event(NO_DRIVER)], f"FailedMount: {NO_DRIVER}", False),
        ([event(NO_KEY)], f"FailedMount: {NO_KEY}", True),
        ([event('configmap "x" not found')], 'FailedMount: configmap "x" not found', True),
        ([event("no CNI", "FailedCreatePodSandBox")], "FailedCreatePodSandBox: no CNI", False),
        ([event(NO_DRIVER, at="08:01:40"), event(ABSENT)], f"FailedMount: {ABSENT}", True),  # both are tried again
        ([event(NO_DRIVER, at="08:10:00"), event(ABSENT)], f"FailedMount: {NO_DRIVER}", False),  # it has come
    ],
)
async def test_only_what_its_user_must_mend_is_a_refusal(
    events: list[dict[str, Any]], trouble: str, refused: bool
) -> None:
    (seen,), _ = await looked(Server(*events), pod())
    assert (seen.trouble, seen.refused) == (trouble, refused)


async def test_a_pod_that_has_got_its_volumes_is_no_longer_refused() -> None:
    warnings = PodWarnings(cast(ApiClient, Server(event(ABSENT))), lambda uid: None, lambda what, error: None)
    job = make_job(STARTING)
    warnings.follow(job, (pod(),), LONG_AFTER)
    while tasks := asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}:
        await asyncio.gather(*tasks)
    assert warnings.added_to(job, (pod(),))[0].refused
    comes = pod(podIP="10.0.0.7")
    assert warnings.added_to(job, (comes,)) == (comes,)
    warnings.follow(job, (comes,), LONG_AFTER)
    assert not warnings.added_to(job, (pod(),))[0].refused


async def test_it_fails_as_the_users_error_that_names_the_secret() -> None:
    pods, _ = await looked(Server(event(ABSENT)), pod(0), pod(1))
    job = make_job(STARTING)
    seen = starting()
    crew = observe.workers(
        job, pods, (), lambda name: read_node(node_item(name=name), TOLERATIONS, 100.0), lambda _: ()
    )
    seen = replace(seen, workers=tuple(replace(each, created_at=seen.now, since=seen.now) for each in crew))
    waits = decide(seen).status
    assert waits.phase is Phase.STARTING
    after = decide(replace(with_status(seen, waits), now=seen.now + 21)).status
    assert (after.phase, after.ends_as) == (Phase.STOPPING, Phase.FAILED)
    assert after.last_failure is not None
    assert after.last_failure.cause is Cause.USER_ERROR
    assert 'secret "absent" not found' in after.because
    assert "create what is missing in the job's namespace" in after.because
    assert after.node_faults == ()
