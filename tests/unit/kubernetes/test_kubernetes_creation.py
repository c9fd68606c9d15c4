"""A pod that is taken back because its gang can't exist whole is our own doing, in whatever order the news come."""

import asyncio
from typing import Any, cast

from tests.unit.kubernetes.making import JOB_UID, make_job, pod_item

from muster.kube.client import ApiClient
from muster.operator.kubernetes import observe
from muster.operator.kubernetes.gates import SchedulingGates
from muster.operator.kubernetes.pods import PodCache, read_pod

STARTING = make_job({"phase": "Starting", "attempt": 1, "gang": {"nodes": ["node-0", "node-1"], "wanted": 2}})
GOING = pod_item(version=3, meta={"deletionTimestamp": "2026-11-20T09:00:00Z", "deletionGracePeriodSeconds": 5})


class Answers:
    """An API server that answers a deletion with the pod as it leaves; `before` is what the watch tells first."""

    def __init__(self, before: Any) -> None:
        self._before = before

    async def delete(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        self._before()
        return GOING


def taken_back(pods: PodCache, before: Any) -> SchedulingGates:
    """The gates of a gang whose one pod was just taken back."""
    gates = SchedulingGates(cast(ApiClient, Answers(before)), pods, lambda uid: None)
    pods.put(pod_item(version=2))
    asyncio.run(gates.take_back(STARTING, list(pods.of(JOB_UID))))
    return gates


def test_a_list_that_is_older_than_the_pod_does_not_make_it_somebody_elses_doing() -> None:
    pods = PodCache(lambda uid: None)
    gates = taken_back(pods, lambda: None)
    assert gates.as_made(STARTING, ()) == ()
    seen = gates.as_made(STARTING, pods.of(JOB_UID))
    assert [pod.deleting for pod in seen] == [False]
    assert observe.signals(STARTING, seen, lambda name: None) == ()


def test_an_answer_that_comes_after_the_pods_end_does_not_bring_it_back() -> None:
    pods = PodCache(lambda uid: None)
    taken_back(pods, lambda: pods.drop(GOING))
    assert pods.of(JOB_UID) == ()


def test_somebody_elses_deletion_is_seen() -> None:
    gates = taken_back(PodCache(lambda uid: None), lambda: None)
    other = read_pod(GOING | {"metadata": GOING["metadata"] | {"uid": "another"}})
    assert other is not None
    assert [pod.deleting for pod in gates.as_made(STARTING, (other,))] == [True]
