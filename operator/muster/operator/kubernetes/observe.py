"""Pods, nodes and heartbeats as the core wants to see them. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache

from pydantic import ValidationError

from muster.operator.core.observed import ObservedWorker, WorkerState
from muster.operator.kubernetes.creation import RejectedWorker
from muster.operator.kubernetes.jobs import CachedJob
from muster.operator.kubernetes.nodes import NodeFacts
from muster.operator.kubernetes.pods import TRAINER, ContainerEnd, PodState, gang_of
from muster.operator.kubernetes.refusals import remedy
from muster.operator.redaction import redact
from muster.words.names import LAST_HEARTBEAT, ExitCode
from muster.words.signals import Heartbeat, Signal, SignalKind, WorkerExit
from muster.words.status import Phase

LOG_TAIL_LENGTH_MAX = 4_096
MESSAGE_LENGTH_MAX = 500  # of what a kubelet says of a pod: a rejection is a sentence or two
# What the kubelet says of every end; the exit code says more.
_PLAIN = frozenset({"", "Completed", "Error", "ContainerStatusUnknown", "StartError"})
# Reasons of a DisruptionTarget or TerminationTarget condition that mean: others need the place more.
PREEMPTIONS = frozenset({"PreemptionByScheduler", "PreemptionByKubeScheduler", "Preempted", "StoppedByKueue"})
_PREEMPTION_REASON = re.compile(r"Preempt|Evicted|Kueue|Reclaim", re.IGNORECASE)
# A container runtime's words about an image without the interpreter that starts the worker (containerd's, CRI-O's).
_NO_PYTHON = re.compile(r'"(python3?)": executable file not found')
_STEP_RECORD = re.compile(r'"type":"step"\}$')  # also one whose beginning was cut off

NodeOf = Callable[[str], NodeFacts | None]
Environment = tuple[tuple[str, str], ...]  # the user's, whose values may be secrets


def workers(
    job: CachedJob, pods: tuple[PodState, ...], rejected: tuple[RejectedWorker, ...], node_of: NodeOf,
    beats: Callable[[PodState], tuple[Heartbeat, ...]],
    waiting: str = "",
) -> tuple[ObservedWorker, ...]:  # fmt: skip
    """All workers that are not gone, and those that the API server refuses to let exist, with its reason.

    `waiting` says why another scheduler has not placed the workers of the current attempt that have no node.
    """
    environment = tuple((variable.name, variable.value) for variable in job.spec.runtime.env)
    seen = [_worker(job, pod, node_of, beats(pod), environment, waiting) for pod in pods if not pod.gone]
    there = {worker.id for worker in seen}
    seen += [
        ObservedWorker(
            worker=entry.id.worker,
            attempt=entry.id.attempt,
            incarnation=entry.id.incarnation,
            node=entry.node,
            state=WorkerState.STARTING,
            created_at=entry.rejected.since,
            reason=redact(entry.rejected.why, dict(environment)),
            since=entry.rejected.since,
            rejection=entry.rejected.kind,
        )
        for entry in rejected
        if entry.id not in there
    ]
    return tuple(sorted(seen, key=lambda worker: worker.id))


def signals(job: CachedJob, pods: tuple[PodState, ...], node_of: NodeOf) -> tuple[Signal, ...]:
    """Announcements about the living attempt: its nodes will go, or its pods are being taken away by somebody."""
    if job.status.phase not in (Phase.STARTING, Phase.RUNNING, Phase.RESTARTING):
        return ()
    placed_by_us = job.spec.gang.scheduler.kind == "builtin"
    reports = _shut_out(job, pods, node_of) if placed_by_us and job.status.phase is Phase.STARTING else []
    living = job.status.phase is not Phase.RESTARTING  # later it is we who delete pods
    for pod in gang_of(pods, job.status):
        if pod.over:
            continue
        facts = node_of(pod.node) if pod.node else None
        if facts is not None and facts.notice is not None:
            node_notice = facts.notice
            message = f"node {pod.node}: {node_notice.message}"
            reports.append(_signal(node_notice.kind, pod, node_notice.at, message, node_notice.source, pod.node))
        elif pod.deleting and living:
            reports.append(_taken_away(pod))
        elif facts is not None:
            reports += _lost_processes(job, pod, facts)
    return tuple(reports)


def _shut_out(job: CachedJob, pods: tuple[PodState, ...], node_of: NodeOf) -> list[Signal]:
    """Nodes of a starting gang that take no new pods any more (cordoned, say), and theirs has not come: it would wait
    in vain until the gang's time to start is over.
    """
    attempt = job.status.attempt
    there = {pod.worker for pod in gang_of(pods, job.status) if pod.node or pod.over}
    reports = []
    for worker, name in enumerate(job.status.gang.nodes):
        facts = node_of(name)
        unfit = facts.unfit_for(job.spec.runtime.tolerations) if facts is not None and facts.answers else ""
        if worker not in there and facts is not None and unfit:
            message = f"node {name} takes no new pods: {unfit}; worker {worker} was not there yet"
            kind = facts.notice.kind if facts.notice else SignalKind.NODE_DRAIN
            reports.append(
                Signal(
                    kind=kind,
                    attempt=attempt,
                    at=0.0,
                    worker=worker,
                    incarnation=job.status.gang.incarnation(worker),
                    node=name,
                    message=message,
                    source="node",
                )
            )
    return reports


def _lost_processes(job: CachedJob, pod: PodState, facts: NodeFacts) -> list[Signal]:
    """Faults that cost a process and leave its GPU well. Which process is known only where the worker has the whole
    node; on a shared one, the process that was hit ends by itself, and its neighbours are left alone.
    """
    if job.spec.gang.gpus_per_node < facts.node.gpus:
        return []
    return [
        _signal(
            SignalKind.GPU_FAULT, pod, fault.at, f"node {pod.node}: {fault.message}", fault.source, pod.node
        ).model_copy(update={"in_place": True})
        for fault in facts.faults
        if fault.concerns(pod.created_at)
    ]


def unfit_nodes(job: CachedJob, node_of: NodeOf) -> tuple[str, ...]:
    own = job.spec.runtime.tolerations
    return tuple(name for name in job.status.gang.nodes if (facts := node_of(name)) is None or facts.unfit_for(own))


def _taken_away(pod: PodState) -> Signal:
    """Somebody deletes a pod of a gang that should run. The node is not at fault, so it is not named."""
    if is_preemption(pod.disruption):
        return _signal(SignalKind.SPOT_NOTICE, pod, 0.0, f"pod {pod.name} is preempted: {pod.disruption}", "pod", None)
    how = f": {pod.disruption}" if pod.disruption else ", and not by Muster"
    return _signal(SignalKind.NODE_DRAIN, pod, 0.0, f"pod {pod.name} is being deleted{how}", "pod", None)


def is_preemption(reason: str) -> bool:
    return reason in PREEMPTIONS or (bool(reason) and bool(_PREEMPTION_REASON.search(reason)) and "API" not in reason)


def _signal(kind: SignalKind, pod: PodState, at: float, message: str, source: str, node: str | None) -> Signal:
    return Signal(
        kind=kind, attempt=pod.attempt, at=at, worker=pod.worker, incarnation=pod.incarnation, node=node,
        message=message, source=source,
    )  # fmt: skip


def _worker(
    job: CachedJob, pod: PodState, node_of: NodeOf, beats: tuple[Heartbeat, ...], environment: Environment, waiting: str
) -> ObservedWorker:
    state, since, reason = _state(pod, node_of(pod.node) if pod.node else None)
    planned, secret = job.status.gang.nodes, dict(environment)
    refused = state is WorkerState.STARTING and pod.refused
    node = pod.node or (planned[pod.worker] if pod.worker < len(planned) else "")
    return ObservedWorker(
        worker=pod.worker,
        attempt=pod.attempt,
        incarnation=pod.incarnation,
        node=node,
        state=state,
        created_at=pod.created_at,
        exit=_exit(pod.end, environment) if state is WorkerState.EXITED and pod.end else None,
        heartbeats=last_heartbeat(pod) or beats,
        removing=pod.deleting,
        reason=redact(reason, secret) if reason else "",
        message=redact(pod.message[:MESSAGE_LENGTH_MAX], secret) if pod.over and reason else "",
        refusal=redact(f"{pod.trouble}; {remedy(pod.trouble, job.spec.runtime.image)}", secret) if refused else "",
        warning=pod.failing if state is WorkerState.RUNNING else "",
        since=since,
        waiting=waiting if not pod.node and not pod.over else "",
    )


def last_heartbeat(pod: PodState) -> tuple[Heartbeat, ...]:
    """Return the last report that an ended worker left with its exit record, newer than its last heartbeat."""
    if pod.end is None or LAST_HEARTBEAT not in pod.end.message:
        return ()
    try:
        beat = Heartbeat.model_validate(json.loads(pod.end.message)[LAST_HEARTBEAT])
    except (ValueError, KeyError, TypeError):
        return ()
    return (beat,) if (beat.attempt, beat.incarnation) == (pod.attempt, pod.incarnation) else ()


def _state(pod: PodState, node: NodeFacts | None) -> tuple[WorkerState, float, str]:
    """State, since when, and the world's word for it."""
    if pod.over or pod.end is not None:
        return WorkerState.EXITED, pod.end.at if pod.end else pod.created_at, _reason_of_end(pod)
    if pod.node and node is None:
        return WorkerState.UNREACHABLE, pod.scheduled_at or pod.created_at, "NodeLost"
    if node is not None and not node.answers:
        return WorkerState.UNREACHABLE, node.silent_since, "NodeNotReady"
    if pod.running_since:
        return WorkerState.RUNNING, pod.running_since, ""
    return WorkerState.STARTING, pod.scheduled_at or pod.created_at, pod.trouble


def _reason_of_end(pod: PodState) -> str:
    if pod.end is not None and pod.end.exit_code == 0 and pod.end.container == TRAINER:
        return ""  # it finished, whatever was about to happen to it
    if pod.reason == "Evicted" and "EmptyDir volume" in pod.message:  # in the words of the kubelet's eviction manager
        return f"DiskLimitExceeded: {pod.message}"
    if pod.disruption:
        return "PreemptionByScheduler" if is_preemption(pod.disruption) else pod.disruption
    if pod.reason:
        return pod.reason
    return pod.end.reason if pod.end is not None and pod.end.reason not in _PLAIN else ""


def _exit_record_in(message: str) -> WorkerExit | None:
    try:
        return WorkerExit.model_validate_json(message) if message.startswith("{") else None
    except ValidationError:
        return None


@lru_cache(maxsize=1_024)  # a gang that has ended is looked at several times before its pods are gone
def _exit(end: ContainerEnd, environment: Environment) -> WorkerExit:
    """Return the worker's own record of its end, or else the kubelet's."""
    secret = dict(environment)
    record = _exit_record_in(end.message)
    if record is None:
        signal = end.exit_code - 128 if end.exit_code > 128 else None
        where = "" if end.container == TRAINER else f"init container {end.container} exited with {end.exit_code}"
        # Records of steps say nothing of an end.
        tail = "\n".join(line for line in end.message.splitlines()[-40:] if not _STEP_RECORD.search(line))
        record = WorkerExit(exit_code=end.exit_code, at=end.at, signal=signal, message=where, log_tail=tail)
        if missing := _NO_PYTHON.search(end.message):
            words = f"the image has no {missing[1]} on its PATH: a program's image needs Python 3.9 or newer"
            if missing[1] == "python":
                words = "the image has no python on its PATH, so it is not one of Muster's trainer"
            text = f"{words}; correct runtime.image, and submit the job again"
            return WorkerExit(exit_code=ExitCode.USER_ERROR, at=end.at, message=text)
    if record.exit_code != end.exit_code:  # it was killed after it had written its record
        record = record.model_copy(update={"exit_code": end.exit_code})
    return record.model_copy(
        update={
            "message": redact(record.message, secret),
            "log_tail": redact(record.log_tail[-LOG_TAIL_LENGTH_MAX:], secret),
            "results": {redact(name, secret): value for name, value in record.results.items()},
            "results_fault": redact(record.results_fault, secret),
        }
    )
