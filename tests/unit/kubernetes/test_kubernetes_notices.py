"""What a node's agent says of it, as the operator understands it: taints, annotations, conditions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.kubernetes.making import make_job, node_item, pod_item

from muster.kube.timestamps import seconds_of
from muster.operator.core.decision import CreateWorker
from muster.operator.kubernetes import observe
from muster.operator.kubernetes.nodes import AGENT_SILENT_SECONDS, NodeCache, read_node
from muster.operator.kubernetes.pods import read_pod
from muster.operator.kubernetes.render import SiteSettings, render_pod
from muster.words.base import dump_json
from muster.words.names import WorkerId
from muster.words.notices import AGENT_CONDITION, NOTICES, TAINTS, NodeNotices, Notice, Remedy
from muster.words.signals import Signal, SignalKind

POD_CREATED_AT = seconds_of(pod_item()["metadata"]["creationTimestamp"])
RUNNING = {"phase": "Running", "attempt": 1, "gang": {"wanted": 1, "nodes": ["node-0"]}}


def notice(kind: SignalKind, remedy: Remedy, seconds_later: float = 60.0) -> Notice:
    return Notice(kind=kind, remedy=remedy, at=POD_CREATED_AT + seconds_later, message="Xid 79", source="xid")


def node(*notices: Notice, taints: tuple[str, ...] = (), gpus: int = 8) -> dict[str, Any]:
    item = node_item()
    item["metadata"]["annotations"] = {NOTICES: dump_json(NodeNotices(node="node-0", at=1.0, notices=notices))}
    item["spec"] = {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]}
    item["status"]["allocatable"]["nvidia.com/gpu"] = str(gpus)
    return item


def seen(item: dict[str, Any], gpus_per_node: int = 8) -> tuple[tuple[Signal, ...], str]:
    """The signals of a job with one worker there, and why the node is unfit."""
    job = make_job(RUNNING, gang={"nodes": 1, "gpusPerNode": gpus_per_node})
    facts, pod = read_node(item, (), now=5.0), read_pod(pod_item())
    assert pod is not None
    return observe.signals(job, (pod,), lambda name: facts), facts.unfit


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        (SignalKind.SPOT_NOTICE, Remedy.DRAIN),
        (SignalKind.NODE_DRAIN, Remedy.DRAIN),
        (SignalKind.GPU_FAULT, Remedy.RESET),
        (SignalKind.GPU_FAULT, Remedy.REBOOT),
        (SignalKind.GPU_FAULT, Remedy.EXCLUDE),
    ],
)
def test_a_taint_moves_the_gang_and_the_annotation_explains(kind: SignalKind, remedy: Remedy) -> None:
    told = notice(kind, remedy)
    (signal,), unfit = seen(node(told, taints=(TAINTS[kind],)))
    assert signal == Signal(
        kind=kind, attempt=1, at=told.at, worker=0, node="node-0", message="node node-0: Xid 79", source="xid"
    )
    assert unfit == "Xid 79"


def test_a_taint_that_a_person_removed_settles_it() -> None:
    assert seen(node(notice(SignalKind.GPU_FAULT, Remedy.REBOOT))) == ((), "")


def test_a_lost_process_restarts_the_gang_and_leaves_the_node_alone() -> None:
    (signal,), unfit = seen(node(notice(SignalKind.GPU_FAULT, Remedy.RESTART)))
    assert (signal.kind, signal.node) == (SignalKind.GPU_FAULT, "node-0")
    assert unfit == ""


def test_a_lost_process_is_not_that_of_a_worker_that_came_later() -> None:
    assert seen(node(notice(SignalKind.GPU_FAULT, Remedy.RESTART, seconds_later=-1.0))) == ((), "")


def test_on_a_shared_node_nobody_knows_whose_process_was_lost() -> None:
    assert seen(node(notice(SignalKind.GPU_FAULT, Remedy.RESTART)), gpus_per_node=4) == ((), "")


@pytest.mark.parametrize("what", [notice(SignalKind.REBALANCE, Remedy.RECORD), None])
def test_what_is_only_recorded_moves_nobody(what: Notice | None) -> None:
    assert seen(node(*([what] if what else []))) == ((), "")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"node": 7}', '{"node":"n","at":1,"notices":[{"kind":"new"}]}'])
def test_an_annotation_that_makes_no_sense_says_nothing(text: str) -> None:
    item = node(taints=(TAINTS[SignalKind.SPOT_NOTICE],))
    item["metadata"]["annotations"][NOTICES] = text
    (signal,), _ = seen(item)
    assert signal.kind == SignalKind.SPOT_NOTICE, "the taint speaks for itself"


def test_an_agent_that_is_gone_is_counted_and_changes_nothing() -> None:
    news: list[str] = []
    clock = [1000.0]
    nodes = NodeCache((), lambda: clock[0], news.append)

    def put(name: str, status: str | None, heartbeat: str = "1970-01-01T00:16:40Z") -> None:
        item = node_item(name)
        item["metadata"]["uid"] = f"uid-{name}"
        if status is not None:
            item["status"]["conditions"].append(
                {"type": AGENT_CONDITION, "status": status, "lastHeartbeatTime": heartbeat}
            )
        nodes.put(item)

    put("a", "True")
    put("b", "Unknown")
    put("c", None)
    assert nodes.agents() == {"watching": 1, "silent": 1, "none": 1}
    news.clear()
    clock[0] += AGENT_SILENT_SECONDS + 1
    assert nodes.agents() == {"watching": 0, "silent": 2, "none": 1}
    put("a", "True", "1970-01-01T00:31:00Z")
    assert nodes.agents()["watching"] == 1
    assert news == [], "a heartbeat is no news to anybody"
    assert all(facts is not None and not facts.unfit for facts in map(nodes.get, "abc"))


def test_workers_are_told_where_the_agent_of_their_node_answers() -> None:
    job, action = make_job(RUNNING), CreateWorker(WorkerId(1, 0), "node-0", ("node-0",), 0)

    def environment(port: int) -> dict[str, Any]:
        pod = render_pod(job, action, SiteSettings(image="", agent_port=port), "builtin")
        assert all("hostPath" not in volume for volume in pod["spec"]["volumes"]), "restricted pods may have none"
        entries = pod["spec"]["containers"][0]["env"]
        return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}

    told = environment(29_502)
    assert told["MUSTER_NOTICES"] == "http://{host}:29502/notices"
    assert told["MUSTER_HOST_IP"] == {"fieldRef": {"fieldPath": "status.hostIP"}}
    assert "MUSTER_NOTICES" not in json.dumps(environment(0))
