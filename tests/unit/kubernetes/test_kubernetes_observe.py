"""Pods and nodes as the core sees them."""

import json

import pytest
from tests.unit.kubernetes.making import JOB_UID, ended, make_job, node_item, pod_item

from muster.operator.core.observed import ObservedWorker, Rejection, WorkerState
from muster.operator.kubernetes import observe
from muster.operator.kubernetes.creation import RejectedWorker
from muster.operator.kubernetes.nodes import ForeignUsage, NodeFacts, read_node
from muster.operator.kubernetes.pods import PodCache, PodState, read_pod
from muster.operator.kubernetes.rejections import WorkerRejection
from muster.operator.kubernetes.settings import TOLERATIONS
from muster.words.names import WorkerId
from muster.words.pods import Toleration
from muster.words.signals import SignalKind, WorkerExit

RUNNING = {"phase": "Running", "attempt": 1, "gang": {"wanted": 2, "nodes": ["node-0", "node-1"]}}


def pod(**changes: object) -> PodState:
    made = read_pod(pod_item(**changes))  # type: ignore[arg-type]
    assert made is not None
    return made


def facts(**changes: object) -> NodeFacts:
    return read_node(node_item(**changes), TOLERATIONS, now=100.0)  # type: ignore[arg-type]


def disrupted(code: int, reason: str, kind: str = "DisruptionTarget") -> dict[str, object]:
    return ended(code) | {"conditions": [{"type": kind, "status": "True", "reason": reason}]}


def see(seen: PodState, node: NodeFacts | None = None, env: list[dict[str, str]] | None = None) -> ObservedWorker:
    job = make_job(RUNNING, runtime={"image": "x", "env": env or []})
    (worker,) = observe.workers(job, (seen,), (), lambda name: node or facts(), lambda pod: ())
    return worker


def test_a_running_pod() -> None:
    worker = see(pod())
    assert (worker.state, worker.node, worker.exit, worker.reason) == (WorkerState.RUNNING, "node-0", None, "")


def test_the_exit_record_is_read_from_the_termination_message() -> None:
    record = {"exitCode": 82, "at": 1.0, "rank": 3, "message": "loss is not a number"}
    worker = see(pod(status=ended(82, json.dumps(record))))
    assert worker.state is WorkerState.EXITED
    assert worker.exit == WorkerExit(exit_code=82, at=1.0, rank=3, message="loss is not a number")


def test_the_last_heartbeat_comes_with_the_exit_record() -> None:
    beat = {"attempt": 1, "rank": 0, "pid": 1, "phase": "done", "step": 9, "at": 1, "progressedAt": 1, "startedAt": 1}
    record = {"exitCode": 0, "at": 1.0, "lastHeartbeat": beat}
    (last,) = see(pod(status=ended(0, json.dumps(record)))).heartbeats
    assert last.step == 9
    assert see(pod(status=ended(0, json.dumps(record | {"lastHeartbeat": beat | {"attempt": 2}})))).heartbeats == ()


def test_a_log_that_took_the_records_place_becomes_the_tail() -> None:
    worker = see(pod(status=ended(137, "line\nlast line")))
    assert worker.exit is not None
    assert (worker.exit.exit_code, worker.exit.signal, worker.exit.log_tail) == (137, 9, "line\nlast line")


def test_the_kubelets_exit_code_wins_over_an_older_record() -> None:
    record = json.dumps({"exitCode": 0, "at": 1.0})
    worker = see(pod(status=ended(137, record)))
    assert worker.exit is not None
    assert worker.exit.exit_code == 137


def test_a_secret_never_gets_into_a_status() -> None:
    record = json.dumps({"exitCode": 80, "at": 1.0, "message": "bad token hunter22"})
    worker = see(pod(status=ended(80, record)), env=[{"name": "HF_TOKEN", "value": "hunter22"}])
    assert worker.exit is not None
    assert worker.exit.message == "bad token ***"


FULL = 'Usage of EmptyDir volume "muster-tmp" exceeds the limit "20Gi". '


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (ended(137, reason="OOMKilled"), "OOMKilled"),
        (ended(1), ""),
        (disrupted(85, "EvictionByEvictionAPI"), "EvictionByEvictionAPI"),
        (disrupted(143, "PreemptionByScheduler"), "PreemptionByScheduler"),
        (disrupted(143, "WorkloadEvictedDueToPreempted", "TerminationTarget"), "PreemptionByScheduler"),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory", "containerStatuses": []}, "Evicted"),
        (
            disrupted(137, "TerminationByKubelet") | {"phase": "Failed", "reason": "Evicted", "message": FULL},
            f"DiskLimitExceeded: {FULL}",
        ),
        (disrupted(0, "DeletionByTaintManager"), ""),
    ],
)
def test_the_reason_of_an_end(status: dict[str, object], reason: str) -> None:
    assert see(pod(status=status)).reason == reason


def test_nobody_knows_of_a_worker_whose_node_does_not_answer() -> None:
    dark = facts(ready="Unknown")
    worker = see(pod(), dark)
    assert (worker.state, worker.since) == (WorkerState.UNREACHABLE, dark.silent_since)


def test_an_end_that_was_told_before_the_node_fell_silent_stands() -> None:
    assert see(pod(status=ended(82)), facts(ready="Unknown")).state is WorkerState.EXITED


def test_what_the_api_server_refuses_is_a_worker_that_starts() -> None:
    refused = RejectedWorker(WorkerId(1, 1), "node-1", WorkerRejection(Rejection.TEMPORARY, "exceeded quota", 5.0))
    workers = observe.workers(make_job(RUNNING), (pod(),), (refused,), lambda name: facts(), lambda pod: ())
    assert [(w.worker, w.state, w.reason) for w in workers] == [
        (0, WorkerState.RUNNING, ""),
        (1, WorkerState.STARTING, "exceeded quota"),
    ]


@pytest.mark.parametrize("grace", [0, 30])
def test_a_deleted_pod_that_only_a_finalizer_keeps_is_gone(grace: int) -> None:
    meta = {"deletionTimestamp": "2026-11-20T09:00:00Z", "deletionGracePeriodSeconds": grace}
    assert pod(meta=meta).gone == (grace == 0)
    assert pod(meta=meta, status=ended(85)).gone


def test_announcements_become_signals_of_the_attempt() -> None:
    taint = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}
    leaving = facts(spec={"taints": [taint]})
    (signal,) = observe.signals(make_job(RUNNING), (pod(),), lambda name: leaving)
    assert (signal.kind, signal.attempt, signal.worker, signal.node) == (SignalKind.SPOT_NOTICE, 1, 0, "node-0")
    assert leaving.unfit


def test_a_starting_gang_leaves_a_node_that_takes_no_new_pods() -> None:
    """What is on its node already may stay."""
    cordoned = {"node-0": facts(), "node-1": facts(spec={"unschedulable": True})}
    starting = make_job(RUNNING | {"phase": "Starting"})
    unbound = pod(worker=1, spec={"nodeName": ""}, status={"phase": "Pending", "containerStatuses": []})
    for pods in ((pod(),), (pod(), unbound)):
        (signal,) = observe.signals(starting, pods, cordoned.get)
        assert (signal.kind, signal.worker, signal.node) == (SignalKind.NODE_DRAIN, 1, "node-1")
    assert observe.signals(starting, (pod(), pod(worker=1)), cordoned.get) == ()


def test_a_pod_that_somebody_else_deletes_is_announced_without_blaming_its_node() -> None:
    going = pod(meta={"deletionTimestamp": "2026-11-20T09:00:00Z", "deletionGracePeriodSeconds": 30})
    (signal,) = observe.signals(make_job(RUNNING), (going,), lambda name: facts())
    assert (signal.kind, signal.node) == (SignalKind.NODE_DRAIN, None)
    assert observe.signals(make_job(RUNNING | {"phase": "Stopping"}), (going,), lambda name: facts()) == ()


@pytest.mark.parametrize(
    ("changes", "unfit"),
    [
        ({}, ""),
        ({"ready": "False"}, "it is not ready"),
        ({"spec": {"unschedulable": True}}, "it is cordoned"),
        ({"spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}}, ""),
        ({"spec": {"taints": [{"key": "dedicated", "effect": "NoSchedule"}]}}, "it has the taint dedicated"),
        ({"spec": {"taints": [{"key": "dedicated", "effect": "PreferNoSchedule"}]}}, ""),
        ({"labels": {"sagemaker.amazonaws.com/node-health-status": "Unschedulable"}}, "its health is Unschedulable"),
    ],
)
def test_which_nodes_are_fit(changes: dict[str, object], unfit: str) -> None:
    assert facts(**changes).unfit_for(()) == unfit


@pytest.mark.parametrize("key", ["node.kubernetes.io/not-ready", "karpenter.sh/disrupted"])
def test_a_node_that_is_ill_for_now_is_no_node_for_others(key: str) -> None:
    """It still counts where a job asks whether the fleet could ever carry it."""
    ill = facts(spec={"taints": [{"key": key, "effect": "NoSchedule"}]})
    assert (ill.node.ready, ill.node.taints) == (False, ())
    assert ill.unfit_for([Toleration(operator="Exists")])


def test_a_taint_keeps_out_only_those_who_do_not_tolerate_it() -> None:
    kept = facts(spec={"taints": [{"key": "dedicated", "value": "training", "effect": "NoExecute"}]})
    assert kept.node.ready, "others may go there"
    unbound = pod(spec={"nodeName": ""}, status={"phase": "Pending", "containerStatuses": []})
    for own, seen in ([{"key": "dedicated", "value": "training"}], 0), ([{"key": "dedicated"}], 1):
        job = make_job(RUNNING | {"phase": "Starting"}, runtime={"tolerations": own})
        assert len(observe.unfit_nodes(job, lambda name: kept)) == 2 * seen
        assert len(observe.signals(job, (unbound,), lambda name: kept)) == 2 * seen


def test_a_quantity_in_a_strange_spelling_stops_nothing() -> None:
    item = node_item()
    item["status"]["allocatable"]["memory"] = "1e3Foo"
    assert read_node(item, (), 0.0).node.memory_bytes == 0


def test_what_others_use_is_held_and_what_daemons_use_is_gone() -> None:
    others = ForeignUsage(lambda: None)
    container = {"resources": {"requests": {"cpu": "500m", "nvidia.com/gpu": "2"}}}
    for uid, kind in (("a", "DaemonSet"), ("b", "Job")):
        meta = {"uid": uid, "ownerReferences": [{"kind": kind}]}
        others.put({"metadata": meta, "spec": {"nodeName": "node-0", "containers": [container]}})
    node = others.without_daemons(facts().node)
    assert (node.gpus, node.cpus, node.slots) == (6, 95.5, 108)
    assert [(entry.nodes, entry.gpus, entry.cpus) for entry in others.reservations()] == [(("node-0",), 2, 0.5)]
    others.keep_only({"a"})
    assert others.reservations() == ()


def test_an_older_version_never_replaces_a_newer_one() -> None:
    told: list[str] = []
    pods = PodCache(told.append)
    pods.put(pod_item(version=5, status=ended(1)))
    pods.put(pod_item(version=4))
    (kept,) = pods.of(pod().job_uid)
    assert kept.version == 5
    assert len(told) == 1


@pytest.mark.parametrize(("grace", "told"), [(120, True), (0, False)])
def test_a_pod_that_left_between_two_looks_is_remembered_unless_it_was_forced(grace: int, told: bool) -> None:
    pods = PodCache(lambda uid: None)
    leaving = {"deletionTimestamp": "2026-11-20T09:00:00Z", "deletionGracePeriodSeconds": grace}
    pods.put(pod_item())
    pods.put(pod_item(version=2, meta=leaving))
    pods.put(pod_item(version=3, meta=leaving, status=ended(0)))
    pods.drop(pod_item(version=4, meta=leaving))
    assert pods.of(JOB_UID) == ()
    job = make_job({"phase": "Running", "attempt": 1})
    found = observe.signals(job, pods.leaving(JOB_UID), lambda name: None)
    assert [signal.message for signal in found] == ["pod llama-1-0 is being deleted, and not by Muster"] * told
    pods.forget_leaving(JOB_UID)
    assert pods.leaving(JOB_UID) == ()


def test_late_news_of_a_pod_that_a_fresh_list_does_not_have_is_not_a_pod_that_leaves() -> None:
    """One that we took back ourselves while the gang was incomplete must not end the gang that runs meanwhile."""
    pods = PodCache(lambda uid: None)
    pods.put(pod_item())
    pods.replace(JOB_UID, ())
    pods.put(pod_item(version=2, meta={"deletionTimestamp": "2026-11-20T09:00:00Z", "deletionGracePeriodSeconds": 5}))
    assert pods.leaving(JOB_UID) == ()


@pytest.mark.parametrize(
    ("changes", "away"),
    [
        ({"spec": {"unschedulable": True}}, "cordoned"),
        ({"ready": "False", "spec": {"unschedulable": True}}, "not ready"),
        (
            {"spec": {"taints": [{"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}]}},
            "going away or at fault",
        ),
    ],
)
def test_a_node_that_takes_no_workers_says_why(changes: dict[str, object], away: str) -> None:
    node = facts(**changes).node
    assert (node.ready, node.away) == (False, away)
