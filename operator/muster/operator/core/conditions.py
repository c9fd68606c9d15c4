"""The conditions of a TrainingJob, in the habits of Kubernetes: `kubectl wait --for=condition=Complete` works.

Phase conditions follow the phase. Training conditions (Straggler, DataBound, CheckpointOverdue, BatchesSkipped,
TrackingFailed, SidecarFailed) say what is not as it should be in a gang that trains all the same; no gang ends for
them. Their messages carry no number that changes by itself, because each change is a write of the status and an event.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from muster.operator.core.budgets import charge_node
from muster.operator.core.worker_summary import WorkerSummary
from muster.words.signals import Heartbeat, SlowRank
from muster.words.status import Condition, JobStatus, Phase
from muster.words.text import plural

STARVED_SHARE, FED_SHARE = 0.25, 0.15  # of a minute's training spent waiting for data: from where, and until where
OVERDUE_INTERVALS = 3.0  # a commit may be so many of its intervals late: uploads take time, and one may fail
OVERDUE_SECONDS_MIN = 120.0
NODES_NAMED_MAX = 4

_YEAR_9999 = 253_402_300_799  # the last second that a date can say; clocks that jump may ask for more

# Cancelled is a way of not completing: whoever waits for the end waits for Complete or Failed, as for a batch Job.
_TRUE_IN: dict[str, frozenset[Phase]] = {
    "Suspended": frozenset({Phase.SUSPENDED}),
    "Running": frozenset({Phase.RUNNING}),
    "Restarting": frozenset({Phase.RESTARTING}),
    "Complete": frozenset({Phase.SUCCEEDED}),
    "Failed": frozenset({Phase.FAILED, Phase.CANCELLED}),
}


# Set only while a gang trains, and cleared when it stops.
TRAINING_CONDITIONS = (
    "Straggler",
    "DataBound",
    "CheckpointOverdue",
    "BatchesSkipped",
    "TrackingFailed",
    "SidecarFailed",
)


@dataclass(frozen=True, slots=True)
class ConditionUpdate:
    """Desired content of a condition."""

    type: str
    true: bool
    reason: str
    message: str


def with_updates(
    before: tuple[Condition, ...], updates: tuple[ConditionUpdate | None, ...], now: float, generation: int
) -> tuple[Condition, ...]:
    """The very same tuple if nothing changes. An update appears when it first becomes true."""
    by_type = {condition.type: condition for condition in before}
    changed = {}
    for update in updates:
        if update is None or (update.type not in by_type and not update.true):
            continue
        old = by_type.get(update.type)
        value: Literal["True", "False"] = "True" if update.true else "False"
        if old is not None and (old.status, old.message) == (value, update.message):
            continue
        if old is not None and old.status == value == "False":
            continue  # in the words of its last change
        moved = old is None or old.status != value
        changed[update.type] = Condition.model_construct(
            type=update.type,
            status=value,
            reason=update.reason,
            message=update.message,
            last_transition_time=_stamp(now) if moved or old is None else old.last_transition_time,
            observed_generation=generation,
        )
    return tuple((by_type | changed).values()) if changed else before


def phase_conditions(
    before: tuple[Condition, ...], phase: Phase, code: str, because: str, now: float, generation: int
) -> tuple[Condition, ...]:
    """A condition appears when it first becomes true and stays from then on, in the words of its last change."""
    by_type = {condition.type: condition for condition in before}
    after = []
    for kind, phases in _TRUE_IN.items():
        old, true = by_type.pop(kind, None), phase in phases
        if old is None and not true:
            continue
        value: Literal["True", "False"] = "True" if true else "False"
        if old is not None and old.status == value:
            after.append(old)
            continue
        reason = "Resumed" if kind == "Suspended" and not true else code
        after.append(
            Condition.model_construct(
                type=kind,
                status=value,
                reason=reason,
                message=because,
                last_transition_time=_stamp(now),
                observed_generation=generation,
            )
        )
    rest = tuple(by_type.values())
    if phase is not Phase.RUNNING:
        over = tuple(ConditionUpdate(kind, False, "NotTraining", because) for kind in TRAINING_CONDITIONS)
        rest = with_updates(rest, over, now, generation)
    return (*after, *rest)


def refused_status(before: JobStatus, because: str, now: float, generation: int) -> JobStatus:
    """Return the status of a job that fails at once, because its spec can't be read or can't run: no rule applies to
    such a job."""
    conditions = phase_conditions(before.conditions, Phase.FAILED, "InvalidSpec", because, now, generation)
    return before.model_copy(
        update={
            "phase": Phase.FAILED,
            "code": "InvalidSpec",
            "because": because,
            "since": now,
            "finished_at": now,
            "observed_generation": generation,
            "conditions": conditions,
        }
    )


def _stamp(now: float) -> str:
    return datetime.fromtimestamp(min(max(0.0, now), _YEAR_9999), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- conditions of a gang that trains ---


def training_conditions(summary: WorkerSummary) -> dict[str, Any]:
    """Conditions, and faults charged to the nodes of ranks that have just become slow; empty if there is no news."""
    seen, status, beat = summary.seen, summary.status, summary.beat
    if beat is None or (_is_well(beat, status.conditions) and not any(worker.warning for worker in summary.mine)):
        return {}
    by_type = {condition.type: condition for condition in status.conditions}
    updates = (
        _stragglers(summary, beat.slow_ranks),
        _data_bound(beat.data_wait_share, by_type.get("DataBound")),
        _overdue(summary),
        _skipped(summary),
        _untracked(beat),
        _failed_sidecars(summary),
    )
    after = with_updates(status.conditions, updates, seen.now, seen.generation)
    if after is status.conditions:
        return {}
    return {"conditions": after} | _charge_slow_nodes(summary, by_type.get("Straggler"))


def change_key(beat: Heartbeat) -> tuple[object, ...]:
    """Return the parts of a heartbeat whose change calls for a look at the job; a further step alone does not."""
    slow = tuple(entry.rank for entry in beat.slow_ranks)
    return beat.rank, beat.pid, beat.phase, beat.last_commit_step, slow, beat.skipped_steps, beat.tracking_fault


def _is_well(beat: Heartbeat, conditions: tuple[Condition, ...]) -> bool:
    """Return whether there is nothing to report or to take back. That is almost always so, and cheap to check."""
    share, due = beat.data_wait_share, beat.commit_seconds
    if (
        beat.slow_ranks
        or beat.last_skipped is not None
        or beat.tracking_fault
        or (share is not None and share > FED_SHARE)
    ):
        return False
    if due is not None and beat.at - (beat.last_commit_at or beat.started_at) > OVERDUE_INTERVALS * due:
        return False
    return all(condition.status != "True" or condition.type not in TRAINING_CONDITIONS for condition in conditions)


def _stragglers(summary: WorkerSummary, slow: tuple[SlowRank, ...]) -> ConditionUpdate:
    if not slow:
        return ConditionUpdate("Straggler", False, "RanksAreAlike", "no rank is slower than its peers")
    named = [f"{_name(summary, entry.rank)} since step {entry.since_step}" for entry in slow[:NODES_NAMED_MAX]]
    more = f" and {len(slow) - NODES_NAMED_MAX} more" if len(slow) > NODES_NAMED_MAX else ""
    words = f"slower than their peers, which wait for them at every step: {', '.join(named)}{more}"
    return ConditionUpdate("Straggler", True, "RankIsSlow", words)


def _data_bound(share: float | None, before: Condition | None) -> ConditionUpdate | None:
    if share is None:
        return None
    starved = share > (FED_SHARE if before is not None and before.status == "True" else STARVED_SHARE)
    if starved:
        words = "ranks spend much of their time waiting for data: put it nearer, or use larger shards"
        return ConditionUpdate("DataBound", True, "DataWait", words)
    return ConditionUpdate("DataBound", False, "DataInTime", "data is there when it is needed")


def _overdue(summary: WorkerSummary) -> ConditionUpdate | None:
    beat, attempt = summary.beat, summary.status.attempts[-1]
    if beat is None or beat.commit_seconds is None:
        return None
    # The worker's own clock, as both times are of it.
    since = beat.at - max(beat.last_commit_at or 0.0, attempt.first_step_at or beat.started_at)
    step = beat.last_commit_step or attempt.resume_step
    if since > max(OVERDUE_SECONDS_MIN, OVERDUE_INTERVALS * beat.commit_seconds):
        words = f"no checkpoint after step {step}, although several were due: a failure would lose all steps since then"
        words += f"; the next one waits, for {beat.save_waits}" if beat.save_waits else ""
        return ConditionUpdate("CheckpointOverdue", True, "NoCommit", words)
    return ConditionUpdate("CheckpointOverdue", False, "CommitsInTime", "commits are made as often as they should be")


def _skipped(summary: WorkerSummary) -> ConditionUpdate | None:
    beat = summary.beat
    if beat is None or beat.last_skipped is None:
        return None
    last = beat.last_skipped
    samples = f" ({plural(beat.skipped_samples, 'sample')} skipped)" if beat.skipped_samples else ""
    steps = f"{plural(beat.skipped_steps, 'step')} {'was' if beat.skipped_steps == 1 else 'were'} not learnt from"
    words = f"{steps}{samples}; the last is step {last.step}: {last.skipped}"
    return ConditionUpdate("BatchesSkipped", True, "NumbersUnsound", words)


def _untracked(beat: Heartbeat) -> ConditionUpdate | None:
    if not beat.tracking_fault:
        return None  # a tracker that is left out stays so until the attempt ends
    return ConditionUpdate("TrackingFailed", True, "TrackerLeftOut", beat.tracking_fault[:1_000])


def _failed_sidecars(summary: WorkerSummary) -> ConditionUpdate:
    failed = [worker for worker in summary.mine if worker.warning]
    if not failed:
        return ConditionUpdate("SidecarFailed", False, "SidecarsRun", "no container beside the trainers has failed")
    named = [f"{worker.warning} in the pod of worker {worker.worker}" for worker in failed[:NODES_NAMED_MAX]]
    more = f" and {len(failed) - NODES_NAMED_MAX} more" if len(failed) > NODES_NAMED_MAX else ""
    return ConditionUpdate("SidecarFailed", True, "ContainerExited", f"{'; '.join(named)}{more}")


def _charge_slow_nodes(summary: WorkerSummary, before: Condition | None) -> dict[str, Any]:
    """A rank that becomes slow is one hit against its node; a node that is hit repeatedly is avoided from then on."""
    status, beat = summary.status, summary.beat
    said = before.message if before is not None and before.status == "True" else ""
    faults, excluded = status.node_faults, status.excluded_nodes
    for entry in beat.slow_ranks if beat is not None else ():
        node = _node(summary, entry.rank)
        if node is not None and f"{_name(summary, entry.rank)} since step {entry.since_step}" not in said:
            why = f"straggler: rank {entry.rank} took {entry.ratio:.2f} times as long as its peers"
            faults, excluded = charge_node(summary.seen.spec.recovery, faults, excluded, node, why, summary.seen.now)
    return {} if faults is status.node_faults else {"node_faults": faults, "excluded_nodes": excluded}


def _name(summary: WorkerSummary, rank: int) -> str:
    worker = rank // summary.seen.spec.gang.ranks_per_node
    return f"rank {rank} (worker {worker} on {_node(summary, rank) or 'an unknown node'})"


def _node(summary: WorkerSummary, rank: int) -> str | None:
    worker = rank // summary.seen.spec.gang.ranks_per_node
    return summary.gang.nodes[worker] if worker < len(summary.gang.nodes) else None
