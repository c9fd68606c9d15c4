"""Diagnosis of an attempt's end from the observations. Many workers fail when one does; the first cause counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from muster.operator.core.observed import NodeReservation, ObservedJob, ObservedWorker, Rejection, WorkerState
from muster.operator.core.rank_reports import describe_positions, rank_reports
from muster.operator.core.worker_summary import WorkerSummary
from muster.words.names import FIRST_INCARNATION, ExitCode
from muster.words.signals import Cause, Signal, SignalKind
from muster.words.status import Failure, JobStatus, Phase, Suspicion
from muster.words.text import plural

# Kubernetes marks a node NotReady 40 to 50 s after its last heartbeat; waiting more than a few seconds on top buys
# nothing (tolerationSeconds <= 10 is the advice), waiting none would act on a flap.
UNREACHABLE_SECONDS = 10.0

# What a job names (a service account, say) is often created together with it, and may come a moment later. Half of it
# would fail jobs whose manifests were applied in one go; twice as long would keep nodes for a job that can't start.
REJECTED_SECONDS = 5.0

_STATED: dict[int, Cause] = {
    ExitCode.USER_ERROR: Cause.USER_ERROR,
    ExitCode.OUT_OF_MEMORY: Cause.OUT_OF_MEMORY,
    ExitCode.NUMERIC: Cause.NUMERIC,
    ExitCode.STORAGE: Cause.STORAGE,
    ExitCode.PREFLIGHT_FAILED: Cause.INFRASTRUCTURE,
    ExitCode.PREFLIGHT_EXCLUDE: Cause.INFRASTRUCTURE,
    ExitCode.PREEMPTED_COMMITTED: Cause.PREEMPTION,
    ExitCode.PREEMPTED_NO_COMMIT: Cause.PREEMPTION,
    ExitCode.HUNG: Cause.HANG,
    ExitCode.PEER_LOST: Cause.INFRASTRUCTURE,  # whose end is another worker's to explain
    ExitCode.STALE_ATTEMPT: Cause.INFRASTRUCTURE,  # the current attempt was told that it is not: its fence read lagged
}
# What the world says of a worker outranks its exit code: a pod killed for memory exits with 137 like any other.
_REASONS: dict[str, Cause] = {
    "OOMKilled": Cause.OUT_OF_MEMORY,
    # A leak of a few MB an hour takes weeks to fill a folder, and a new worker's is empty: it is tried again as often
    # as the budget of unknown causes lasts. One that fills it at once ends as a crash loop.
    "DiskLimitExceeded": Cause.UNKNOWN,
    "Evicted": Cause.EVICTION,
    "EvictionByEvictionAPI": Cause.EVICTION,
    "TerminationByKubelet": Cause.EVICTION,
    "DeletionByTaintManager": Cause.EVICTION,
    "Preempted": Cause.PREEMPTION,
    "PreemptionByScheduler": Cause.PREEMPTION,
    "Preempting": Cause.PREEMPTION,  # by the kubelet, for a pod of the system
    "SpotReclaimed": Cause.PREEMPTION,
    "NodeLost": Cause.INFRASTRUCTURE,
    "DeletionByPodGC": Cause.INFRASTRUCTURE,
}
_SIGNALS: dict[SignalKind, Cause] = {
    SignalKind.STALL: Cause.HANG,
    SignalKind.COLLECTIVE_HANG: Cause.HANG,
    SignalKind.NUMERIC: Cause.NUMERIC,
    SignalKind.GPU_FAULT: Cause.INFRASTRUCTURE,
    SignalKind.NODE_DOWN: Cause.INFRASTRUCTURE,
    SignalKind.NODE_DRAIN: Cause.EVICTION,
    SignalKind.SPOT_NOTICE: Cause.PREEMPTION,
}
LEAVING = frozenset({SignalKind.SPOT_NOTICE, SignalKind.NODE_DRAIN, SignalKind.NODE_DOWN})

# How long after the first failure another worker's end may still be its cause. A launcher sees its rank's end within
# 0.1 s. It is well below the grace period after a failure, so that workers which we killed ourselves are no cause.
LATE_EXIT_SECONDS = 3.0
# How long to wait for the exit record of a peer that the others report as lost, before the remaining workers are
# removed: the record may arrive a moment after theirs, and a removed worker's is not read any more.
PEER_REPORT_SECONDS = 1.0
# How long workers of a program may run on after others ended well, without a step. At its end one worker alone often
# evaluates, converts or uploads while the rest are done: half of this would restart programs that are about to succeed,
# at twice of it a gang that waits for a lost member keeps its nodes for an hour.
UNEVEN_END_SECONDS = 1_800.0
_STOPPED_ON_REQUEST = frozenset({ExitCode.PREEMPTED_COMMITTED, ExitCode.PREEMPTED_NO_COMMIT, 128 + 15})

_OWN_FAULTS = frozenset({Cause.USER_ERROR, Cause.OUT_OF_MEMORY, Cause.NUMERIC, Cause.STORAGE})
_NODE_FAULTS = frozenset({Cause.INFRASTRUCTURE, Cause.HANG, Cause.UNKNOWN})


@dataclass(frozen=True, slots=True)
class FailureDiagnosis:
    """Diagnosis of a failed attempt and its consequences."""

    failure: Failure
    """Failure as the user sees it."""
    strength: int
    """Rank of the evidence; 0 is the strongest."""
    notice: bool = False
    """The gang still runs and is given the time to commit."""
    alive: bool = False
    """True if nothing has ended by itself, so that the operator would end the attempt."""
    excludes_node: bool = False
    """The node that the failure names is avoided from now on, without waiting for a second fault."""


def strength(failure: Failure) -> int:
    """Return how much a failure explains; 0 is most. A rank that says what it did wrong explains the time-outs of its
    peers; a node that died explains their lost connections.
    """
    if failure.cause in _OWN_FAULTS:
        return 0
    if failure.cause in (Cause.PREEMPTION, Cause.EVICTION):
        return 1
    if failure.exit_code == ExitCode.PEER_LOST and failure.cause is not Cause.UNKNOWN:  # else it is known why
        return 5
    if failure.cause == Cause.INFRASTRUCTURE:
        return 2 if failure.exit_code in _EARLY else 1
    return 4 if failure.cause == Cause.HANG else 3


# Ends before training began: what ended a peer says more.
_EARLY = frozenset({ExitCode.PREFLIGHT_FAILED, ExitCode.PREFLIGHT_EXCLUDE, ExitCode.STALE_ATTEMPT})


def chargeable(failure: Failure) -> bool:
    """Return whether the failure counts against the node that it names."""
    innocent = failure.exit_code == ExitCode.PEER_LOST
    return failure.node is not None and failure.cause in _NODE_FAULTS and not innocent


def diagnose(summary: WorkerSummary) -> FailureDiagnosis | None:
    """The best explanation of why the current attempt can't go on; None while it can.

    While the gang is being stopped, ends that came after the stop began are its consequences and explain nothing.
    Unless all that is known is that a peer was lost: the survivors' word often comes before that of the peer itself.
    """
    status = summary.status
    stopping = status.phase in (Phase.RESTARTING, Phase.STOPPING)
    diagnoses = list(_ends(summary, before=status.since if stopping else None))
    if stopping and _only_a_lost_peer(status):
        late = _ends(summary, before=status.since + LATE_EXIT_SECONDS)
        diagnoses += [diagnosis for diagnosis in late if diagnosis.failure.exit_code not in _STOPPED_ON_REQUEST]
    diagnoses += _lost_nodes(summary)
    if not stopping:
        diagnoses += _rejections(summary)
        diagnoses += _signals(summary.seen)
    return min(
        diagnoses,
        key=lambda diagnosis: (diagnosis.strength, diagnosis.failure.at, diagnosis.failure.worker or 0),
        default=None,
    )


def seconds_until_peer_report(summary: WorkerSummary) -> float:
    """Return the seconds for which nobody is to be removed yet, because all that is known is that a peer was lost."""
    waited = summary.seen.now - summary.status.since
    lives = any(worker.state is WorkerState.RUNNING for worker in summary.mine)
    return (
        PEER_REPORT_SECONDS - waited
        if lives and 0 <= waited < PEER_REPORT_SECONDS and _only_a_lost_peer(summary.status)
        else 0.0
    )


def _only_a_lost_peer(status: JobStatus) -> bool:
    failure = status.last_failure
    return failure is not None and failure.attempt == status.attempt and failure.exit_code == ExitCode.PEER_LOST


def _ends(summary: WorkerSummary, before: float | None) -> Iterator[FailureDiagnosis]:
    for worker in summary.exited:
        if before is not None and (worker.exit is None or worker.exit.at > before) and _cause_by_reason(worker) is None:
            continue
        if (failure := _failure_of(summary.seen, worker)) is not None:
            failure = _with_early_end(summary, failure)
            yield FailureDiagnosis(failure, strength(failure))


def _failure_of(seen: ObservedJob, worker: ObservedWorker) -> Failure | None:
    end = worker.exit
    code = end.exit_code if end else None
    cause = _cause_by_reason(worker) or _cause_of_end(worker)
    if cause is None:
        return None
    if cause == Cause.INFRASTRUCTURE and (node_cause := _leaving(seen, worker.node)):
        cause = node_cause
    return Failure.model_construct(
        cause=cause,
        attempt=worker.attempt,
        at=end.at if end else worker.since or seen.now,
        message=_describe_end(worker) + (_arithmetic(worker) if cause is Cause.OUT_OF_MEMORY else _foreign(worker)),
        worker=worker.worker,
        incarnation=worker.incarnation,
        rank=end.rank if end else None,
        node=None if worker.node_blameless else worker.node,
        step=end.step if end else None,
        exit_code=code,
        log_tail=end.log_tail if end else "",
    )


def _with_early_end(summary: WorkerSummary, failure: Failure) -> Failure:
    """Return the failure as the program's own where it lost a peer whose worker had ended with code 0: nobody took
    that away, it left its part undone."""
    if failure.exit_code != ExitCode.PEER_LOST or summary.seen.spec.program is None:
        return failure
    for worker in summary.exited:
        if worker.exit is not None and worker.exit.exit_code == 0 and worker.exit.at <= failure.at + LATE_EXIT_SECONDS:
            message = f"{failure.message}; worker {worker.worker} had ended with exit code 0, and was missing"
            return failure.model_copy(update={"cause": Cause.UNKNOWN, "message": message})
    return failure


def _cause_of_end(worker: ObservedWorker) -> Cause | None:
    """Return the cause by the worker's exit code; None if it ended well."""
    if worker.exit is None:
        # No container of it ever ran: the kubelet rejected it (UnexpectedAdmissionError, OutOfcpu, NodeShutdown …).
        return Cause.INFRASTRUCTURE if worker.reason else Cause.UNKNOWN
    code = worker.exit.exit_code
    if code == 0:
        return None
    return _STATED.get(code, Cause.INFRASTRUCTURE if code > 128 else Cause.UNKNOWN)


def _cause_by_reason(worker: ObservedWorker) -> Cause | None:
    return _REASONS.get(worker.reason.partition(":")[0])


def _arithmetic(worker: ObservedWorker) -> str:
    """Return the memory arithmetic for a worker that was killed for its memory, and so could not report it itself."""
    if worker.exit is not None and worker.exit.exit_code == ExitCode.OUT_OF_MEMORY:
        return ""
    return next((f"; {beat.memory}" for beat in worker.heartbeats if beat.memory), "")


def _foreign(worker: ObservedWorker) -> str:
    if not worker.node_blameless:
        return ""
    return f"; neither Muster nor the kernel's memory killer did that, so {worker.node} is not charged"


def _describe_end(worker: ObservedWorker) -> str:
    end = worker.exit
    where = f"worker {worker.worker} on {worker.node}"
    if worker.reason:
        words = (end.message if end else "") or worker.message
        return f"{where}: {worker.reason}" + (f": {words}" if words else "")
    if end is None:
        return f"{where} ended without a word"
    if end.message:
        return end.message
    how = (
        f"was ended by signal {end.signal or end.exit_code - 128}"
        if end.exit_code > 128
        else f"exited with {end.exit_code}"
    )
    return f"{where} {how}"


def _lost_nodes(summary: WorkerSummary) -> Iterator[FailureDiagnosis]:
    """Yield the failures of nodes that do not answer, except while the worker itself is heard of: when an API server
    was away for longer than a node may be silent, every node is called silent for a moment."""
    for worker in summary.unreachable:
        heard_at = max((beat.at for beat in worker.heartbeats), default=0.0)
        if summary.seen.now - max(worker.since, heard_at) < UNREACHABLE_SECONDS:
            continue
        cause = _leaving(summary.seen, worker.node) or Cause.INFRASTRUCTURE
        message = f"node {worker.node} of worker {worker.worker} does not answer"
        failure = Failure.model_construct(
            cause=cause,
            attempt=worker.attempt,
            at=worker.since,
            message=message,
            worker=worker.worker,
            incarnation=worker.incarnation,
            node=worker.node,
        )
        yield FailureDiagnosis(failure, strength(failure))


def _rejections(summary: WorkerSummary) -> Iterator[FailureDiagnosis]:
    """Workers that will never come to be as the job stands."""
    for worker in summary.rejected:
        if worker.rejection is not Rejection.PERMANENT or summary.seen.now - worker.since < REJECTED_SECONDS:
            continue
        failure = Failure.model_construct(
            cause=Cause.USER_ERROR,
            attempt=worker.attempt,
            at=worker.since,
            message=f"worker {worker.worker} can't be created: {worker.reason}",
            worker=worker.worker,
            incarnation=worker.incarnation,
        )
        yield FailureDiagnosis(failure, strength(failure))


def current_signals(seen: ObservedJob) -> Iterator[Signal]:
    """Return the signals that concern the gang as it is. Others are about gangs that are gone, or about a life of a
    worker that has been replaced."""
    for signal in seen.signals:
        current = signal.attempt == seen.status.attempt
        if current and signal.worker is not None:
            current = signal.incarnation == seen.status.gang.incarnation(signal.worker)
        if current:
            yield signal


def _signals(seen: ObservedJob) -> Iterator[FailureDiagnosis]:
    for signal in current_signals(seen):
        cause = _SIGNALS.get(signal.kind)
        if cause is None:
            continue
        message = signal.message or f"{signal.kind} signal from {signal.source or 'an unnamed source'}"
        failure = Failure.model_construct(
            cause=cause,
            attempt=signal.attempt,
            at=signal.at,
            message=message,
            worker=signal.worker,
            incarnation=signal.incarnation,
            rank=signal.rank,
            node=signal.node,
        )
        yield FailureDiagnosis(
            failure,
            strength(failure),
            notice=cause in (Cause.PREEMPTION, Cause.EVICTION),
            alive=True,
            excludes_node=signal.kind is SignalKind.GPU_FAULT and signal.node is not None and not signal.in_place,
        )


def _leaving(seen: ObservedJob, node: str) -> Cause | None:
    """Return the cause if the node was announced to go: its end is that and no fault."""
    for signal in current_signals(seen):
        if signal.node == node:
            if signal.kind is SignalKind.SPOT_NOTICE:
                return Cause.PREEMPTION
            if signal.kind is SignalKind.NODE_DRAIN:
                return Cause.EVICTION
    return None


def diagnose_missing_workers(summary: WorkerSummary) -> FailureDiagnosis:
    """Return the diagnosis of a running gang whose workers are gone without a trace: their pods were deleted, or their
    nodes with them."""
    worker, nodes = summary.missing[0], summary.gang.nodes
    node = nodes[worker] if worker < len(nodes) else None
    cause = (_leaving(summary.seen, node) if node else None) or Cause.INFRASTRUCTURE
    others = f" (and {len(summary.missing) - 1} more)" if len(summary.missing) > 1 else ""
    failure = Failure.model_construct(
        cause=cause,
        attempt=summary.status.attempt,
        at=summary.seen.now,
        message=f"worker {worker}{others} vanished from {node}: somebody removed it, or the node is gone",
        worker=worker,
        incarnation=summary.gang.incarnation(worker),
        node=node if node in summary.seen.nodes_unfit else None,
    )
    return FailureDiagnosis(failure, strength(failure))


def diagnose_preemption(summary: WorkerSummary, granted: NodeReservation) -> FailureDiagnosis:
    """Return the diagnosis of an attempt whose nodes go to another job (preemption.py). That is nobody's failure and
    does not count against any node."""
    failure = Failure.model_construct(
        cause=Cause.EVICTION, attempt=summary.status.attempt, at=summary.seen.now, message=granted.yields_because
    )
    return FailureDiagnosis(failure, strength(failure), notice=True, alive=True)


def diagnose_uneven_end(summary: WorkerSummary) -> FailureDiagnosis | None:
    """Return the diagnosis of a program of which some workers ended with code 0 long ago while others still run: those
    wait for them, or they ended without having done their part. None while that may still be a normal end.
    """
    if summary.seen.spec.program is None or not summary.exited or len(summary.exited) >= summary.gang.wanted:
        return None
    ended = [worker for worker in summary.exited if worker.exit is not None and worker.exit.exit_code == 0]
    if len(ended) < len(summary.exited):
        return None  # what failed has its own diagnosis
    first = min(ended, key=lambda worker: worker.exit.at if worker.exit is not None else 0.0)
    moved = [report.beat.progressed_at for report in rank_reports(summary) if report.beat.watched]
    since = max([worker.exit.at for worker in ended if worker.exit is not None] + moved)
    if summary.seen.now - since <= UNEVEN_END_SECONDS:
        return None
    left = summary.gang.wanted - len(ended)
    message = (
        f"worker {first.worker} on {first.node} ended with exit code 0 while {plural(left, 'worker')} of "
        f"{summary.gang.wanted} ran on for {UNEVEN_END_SECONDS / 60:.0f} min without a step: a program is done when "
        "all its workers have ended"
    )
    failure = Failure.model_construct(
        cause=Cause.HANG,
        attempt=summary.status.attempt,
        at=summary.seen.now,
        message=message,
        worker=first.worker,
        incarnation=first.incarnation,
    )
    return FailureDiagnosis(failure, strength(failure), alive=True)


def diagnose_hang(summary: WorkerSummary, suspicion: Suspicion) -> FailureDiagnosis:
    """The gang was suspected and did not show otherwise. What every rank last said of itself is kept as evidence."""
    failure = Failure.model_construct(
        cause=Cause.HANG,
        attempt=summary.status.attempt,
        at=summary.seen.now,
        message=suspicion.why,
        worker=suspicion.worker,
        incarnation=suspicion.incarnation,
        rank=suspicion.rank,
        node=suspicion.node,
        step=summary.beat.step if summary.beat else None,
        log_tail=describe_positions(rank_reports(summary)),
    )
    return FailureDiagnosis(failure, strength(failure))


def diagnose_failed_rendezvous(summary: WorkerSummary, suspicion: Suspicion) -> FailureDiagnosis:
    """The gang did not come together in time. The first worker that is not up is named, its node charged."""
    up = {worker.worker for worker in summary.mine if worker.state is WorkerState.RUNNING}
    absent = next((index for index in range(summary.gang.wanted) if index not in up), None)
    nodes = summary.gang.nodes
    failure = Failure.model_construct(
        cause=Cause.INFRASTRUCTURE,
        attempt=summary.status.attempt,
        at=summary.seen.now,
        message=suspicion.why,
        worker=absent,
        incarnation=summary.gang.incarnation(absent) if absent is not None else FIRST_INCARNATION,
        node=nodes[absent] if absent is not None and absent < len(nodes) else None,
    )
    return FailureDiagnosis(failure, strength(failure))


def diagnose_refusal(summary: WorkerSummary, suspicion: Suspicion) -> FailureDiagnosis:
    """A node can't start a worker as the job describes it. The same would happen on every other node, unless the job
    has trained: then it can be started, and a node without credentials or a registry's bad minute does not end it.
    """
    status = summary.status
    has_trained = status.checkpoint is not None or any(each.first_step_at is not None for each in status.attempts)
    failure = Failure.model_construct(
        cause=Cause.INFRASTRUCTURE if has_trained else Cause.USER_ERROR,
        attempt=status.attempt,
        at=summary.seen.now,
        message=suspicion.why,
        worker=suspicion.worker,
        incarnation=suspicion.incarnation,
        node=suspicion.node,
    )
    return FailureDiagnosis(failure, strength(failure))


def diagnose_inconsistent_status(summary: WorkerSummary, why: str) -> FailureDiagnosis:
    """Return the diagnosis of a status that is not to be trusted, although nothing is known to have failed."""
    failure = Failure.model_construct(
        cause=Cause.INFRASTRUCTURE, attempt=summary.status.attempt, at=summary.seen.now, message=why
    )
    return FailureDiagnosis(failure, strength(failure))
