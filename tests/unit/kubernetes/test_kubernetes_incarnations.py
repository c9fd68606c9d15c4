"""Pods of a worker's lives. One without a label was made by an earlier release and is of the first life."""

import asyncio
from typing import Any, cast

import pytest
from tests.unit.kubernetes.making import JOB_UID, job_item, make_job, pod_item

from muster.kube.client import ApiClient
from muster.operator.core.decision import CreateWorker, RemoveWorker
from muster.operator.core.observed import WorkerState
from muster.operator.kubernetes import observe
from muster.operator.kubernetes.creation import WorkerCreator
from muster.operator.kubernetes.gangs.builtin import BuiltinScheduler
from muster.operator.kubernetes.heartbeats import HeartbeatCache
from muster.operator.kubernetes.jobs import JobStore
from muster.operator.kubernetes.pods import PodCache, PodState, gang_of, read_pod
from muster.operator.kubernetes.removal import PodRemover
from muster.operator.kubernetes.render import SiteSettings, render_pod
from muster.operator.kubernetes.world import KubernetesWorld
from muster.operator.world import VersionConflict
from muster.recipe.document import JobSpec
from muster.words.names import WorkerId

SITE = SiteSettings("image", "https://api")
NODES = ("node-0", "node-1")


def status(incarnations: list[int] | None = None, phase: str = "Starting") -> dict[str, Any]:
    lives = {"incarnations": incarnations} if incarnations else {}
    return {"phase": phase, "attempt": 1, "gang": {"nodes": list(NODES), "wanted": 2} | lives}


def labelled(worker: int, incarnation: str, version: int = 1, **changes: Any) -> dict[str, Any]:
    item = pod_item(worker, version=version, **changes)
    item["metadata"]["labels"]["muster.dev/incarnation"] = incarnation
    item["metadata"]["uid"] += f"-{incarnation}"
    item["metadata"]["name"] += f"-i{incarnation}"
    return item


def pod(item: dict[str, Any]) -> PodState:
    state = read_pod(item)
    assert state is not None
    return state


def test_a_pod_without_the_label_is_of_the_first_life() -> None:
    assert pod(pod_item(1)).id == WorkerId(1, 1, 1)
    assert pod(labelled(1, "2")).id == WorkerId(1, 1, 2)
    assert read_pod(labelled(1, "two")) is None


def test_the_first_life_is_made_as_before_and_a_later_one_beside_it() -> None:
    first = render_pod(make_job(status()), CreateWorker(WorkerId(1, 1), "b", NODES, 0), SITE, "builtin")
    second = render_pod(make_job(status([1, 2])), CreateWorker(WorkerId(1, 1, 2), "b", NODES, 0), SITE, "builtin")
    assert [made["metadata"]["name"] for made in (first, second)] == ["llama-1-1", "llama-1-1-i2"]
    assert [made["spec"]["hostname"] for made in (first, second)] == ["llama-1-1", "llama-1-1"], "its peers know it"
    for made, number in ((first, "1"), (second, "2")):
        assert made["metadata"]["labels"]["muster.dev/incarnation"] == number
        (container,) = made["spec"]["containers"]
        assert {"name": "MUSTER_INCARNATION", "value": number} in container["env"]


def test_only_current_lives_are_the_gang_and_speak_for_it() -> None:
    job = make_job(status([1, 2], "Running"))
    leaving = {"meta": {"deletionTimestamp": "2026-11-20T09:00:00Z"}}
    pods = (pod(pod_item(0)), pod(pod_item(1)), pod(labelled(1, "2")))
    assert [each.id for each in gang_of(pods, job.status)] == [WorkerId(1, 0), WorkerId(1, 1, 2)]
    seen = observe.workers(job, pods, (), lambda name: None, lambda pod: ())
    assert [worker.id for worker in seen] == [WorkerId(1, 0), WorkerId(1, 1), WorkerId(1, 1, 2)]
    old_leaves = pod_item(1)
    old_leaves["metadata"] |= leaving["meta"]
    assert observe.signals(job, (pods[0], pod(old_leaves), pods[2]), lambda name: None) == ()
    new_leaves = labelled(1, "2")
    new_leaves["metadata"] |= leaving["meta"]
    (signal,) = observe.signals(job, (*pods[:2], pod(new_leaves)), lambda name: None)
    assert (signal.worker, signal.incarnation) == (1, 2)


@pytest.mark.parametrize(("beat", "heard"), [({}, False), ({"incarnation": 1}, False), ({"incarnation": 2}, True)])
def test_a_heartbeat_of_another_life_is_no_news(beat: dict[str, Any], heard: bool) -> None:
    heartbeats = HeartbeatCache(JobStore(lambda uid: None, JobSpec), PodCache(lambda uid: None), lambda uid: None)
    facts = {"attempt": 1, "rank": 1, "pid": 1, "phase": "step", "step": 4, "at": 9, "progressedAt": 9, "startedAt": 1}
    second, first = pod(labelled(1, "2")), pod(pod_item(1))
    heartbeats._record_heartbeat(second, facts | beat)
    assert bool(heartbeats.of(second)) == heard
    heartbeats._record_heartbeat(first, facts | beat)
    assert bool(heartbeats.of(first)) != heard, "of a launcher of an earlier release, too"


class Server:
    """An API server that makes every pod, and notes its name; of deletions, the path."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.deleted: list[str] = []

    async def create(self, path: str, body: dict[str, Any], accept: str = "") -> dict[str, Any]:
        if not path.endswith("/pods"):
            return body
        self.made.append(body["metadata"]["name"])
        more = {"uid": body["metadata"]["name"], "resourceVersion": "9", "creationTimestamp": "2026-11-20T08:00:10Z"}
        return {"metadata": body["metadata"] | more}

    async def remove(self, path: str, options: dict[str, Any]) -> None:
        self.deleted.append(path)


@pytest.mark.parametrize(
    ("incarnations", "made"),
    [
        (None, []),  # a rolling upgrade: pods that an earlier release made, which have no label, are the gang
        ([1, 2], ["llama-1-1-i2"]),
    ],
)
async def test_what_an_earlier_release_made_is_not_made_again(incarnations: list[int] | None, made: list[str]) -> None:
    server, jobs, pods = Server(), JobStore(lambda uid: None, JobSpec), PodCache(lambda uid: None)
    job = jobs.keep(job_item(status(incarnations)))
    for worker in range(2):
        pods.put(pod_item(worker))
    done = asyncio.Event()
    creator = WorkerCreator(
        cast(ApiClient, server), jobs, pods, SITE, lambda job: BuiltinScheduler(), lambda node: "",
        lambda uid: None, lambda uid: done.set(),
    )  # fmt: skip
    for worker in range(2):
        creator.order(JOB_UID, CreateWorker(job.status.current(worker), NODES[worker], NODES, 0))
    await done.wait()
    assert server.made == made
    assert creator.rejected(JOB_UID) == ()
    seen = observe.workers(job, pods.of(JOB_UID), (), lambda name: None, lambda pod: ())
    assert all(worker.state is not WorkerState.EXITED for worker in seen)
    assert {job.status.current(worker) for worker in range(2)} <= {worker.id for worker in seen}
    await creator.close()


async def test_one_life_is_removed_and_the_other_left() -> None:
    server, pods, failed = Server(), PodCache(lambda uid: None), asyncio.Event()
    pods.put(pod_item(1))
    pods.put(labelled(1, "2"))
    remover = PodRemover(cast(ApiClient, server), pods, lambda what, error: failed.set())
    remover.remove(JOB_UID, RemoveWorker(WorkerId(1, 1), 30.0))
    await asyncio.gather(*remover._tasks)
    assert server.deleted == ["/api/v1/namespaces/team-nlp/pods/llama-1-1"]
    assert not failed.is_set()


async def test_an_order_for_a_life_that_was_replaced_is_refused_as_one_for_an_old_attempt() -> None:
    world = KubernetesWorld(cast(ApiClient, Server()), "muster", SITE, JobSpec)
    world.job_cache.keep(job_item(status([1, 2])))
    for id in (WorkerId(1, 1, 1), WorkerId(1, 1, 3), WorkerId(2, 1, 1)):
        with pytest.raises(VersionConflict, match=f"{id} of job"):
            await world.apply(JOB_UID, CreateWorker(id, "node-1", NODES, 0))
    await world.close()
