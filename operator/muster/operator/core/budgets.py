"""Cost of a failed attempt: a restart from its cause's budget, a pause, and a node's reputation."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from muster.operator.core.causes import chargeable
from muster.operator.core.codes import Code
from muster.operator.core.crash_loops import ends_at_once, is_repeated
from muster.words.job import JobSpec, Recovery
from muster.words.names import ExitCode
from muster.words.signals import Cause
from muster.words.status import ExcludedNode, Failure, JobStatus, NodeFault, Restart, Restarts

FREE = frozenset({Cause.PREEMPTION, Cause.EVICTION})
# After so long without a preemption, spot capacity is asked for first again.
FALL_BACK_SECONDS = 3600.0
_DOUBLINGS_MAX = 16


@dataclass(frozen=True, slots=True)
class RetryRefusal:
    """Reason for no further attempt."""

    code: Code
    because: str


def refusal(spec: JobSpec, status: JobStatus, failure: Failure, progressed: bool, now: float) -> RetryRefusal | None:
    """Return why this failure, when it is charged, ends the job; None if it does not.

    `progressed` says that the attempt made a new commit.
    """
    if failure.cause in FREE:
        return None
    recovery = spec.recovery
    if is_repeated(spec, status, failure):
        when = "at once, before any step" if ends_at_once(spec, status, failure) else f"after step {failure.step}"
        because = f"{failure.cause}: twice the same {when}, so a third try would end alike"
        return RetryRefusal(Code.REPEATED_FAILURE, f"{because}: {failure.message}")
    budget = recovery.budget(failure.cause)
    spent = sum(charge.cause == failure.cause for charge in _in_window(status.restarts.recent, recovery, now))
    if budget is not None and spent >= budget:
        allowed = (
            f"{budget} restart{'' if budget == 1 else 's'} per {recovery.window_hours} h" if budget else "no restarts"
        )
        return RetryRefusal(Code.BUDGET_SPENT, f"{failure.cause}: {failure.message}; its budget allows {allowed}")
    fruitless = 0 if progressed else status.restarts.without_progress + 1
    if fruitless >= recovery.stop_after_no_progress:
        return RetryRefusal(
            Code.CRASH_LOOP,
            f"{fruitless} attempts in a row made no new checkpoint; the last: {failure.cause}: {failure.message}",
        )
    return None


def charge(
    spec: JobSpec, restarts: Restarts, failure: Failure, progressed: bool, now: float, restarting: bool
) -> Restarts:
    """The account after this failure.

    `progressed` says that the attempt made a new commit; `restarting`, that another attempt will follow, so that the
    failure counts as a restart.
    """
    recent = _in_window(restarts.recent, spec.recovery, now)
    if failure.cause not in FREE:
        recent = (*recent, Restart(at=now, cause=failure.cause))
    fruitless = restarts.without_progress
    if progressed:
        fruitless = 0
    elif failure.cause not in FREE:
        fruitless += 1
    return restarts.model_copy(
        update={
            "total": restarts.total + restarting,
            "by_cause": restarts.by_cause | {failure.cause: restarts.by_cause.get(failure.cause, 0) + 1},
            "recent": recent,
            "without_progress": fruitless,
        }
    )


def backoff_seconds(
    recovery: Recovery, uid: str, attempt: int, failure: Failure, status: JobStatus, progressed: bool
) -> float:
    """The pause before the attempt after `attempt`, in seconds.

    There is none after an attempt that made a new commit (`progressed`). Otherwise it doubles with every attempt in a
    row that made none, or that a preemption ended; between half and all of that is taken, the same share by everybody
    who computes it. `status` is the one after the charge.
    """
    if progressed:
        return 0.0
    repeats = status.preemptions_in_a_row if failure.cause in FREE else status.restarts.without_progress
    full = min(recovery.backoff_seconds_max, recovery.backoff_seconds * 2.0 ** min(max(0, repeats - 1), _DOUBLINGS_MAX))
    return full * (0.5 + 0.5 * _fraction(f"{uid}/{attempt}"))


def remaining_backoff_seconds(recovery: Recovery, retry_at: float | None, now: float) -> float:
    """Return the remaining pause; 0 when the next attempt may begin. A moment further off than any pause can be means
    that the clock went back."""
    left = (retry_at or now) - now
    return left if 0 < left <= recovery.backoff_seconds_max else 0.0


def preemptions_in_a_row(before: int, failure: Failure) -> int:
    return before + 1 if failure.cause == Cause.PREEMPTION else 0


def capacity_order(spec: JobSpec, status: JobStatus, now: float) -> tuple[str, ...]:
    """The capacities in the order in which to ask for them; empty if there is no preference.

    Spot that keeps being taken away is given a rest.
    """
    capacity = spec.gang.capacity
    if capacity.prefer == "any":
        return ()
    if capacity.prefer == "on-demand":
        return ("on-demand", "spot")
    last = status.attempts[-1].ended_at if status.attempts else None
    recently = last is not None and now - last < FALL_BACK_SECONDS
    if recently and status.preemptions_in_a_row >= capacity.fall_back_after_preemptions:
        return ("on-demand", "spot")
    return ("spot", "on-demand")


def charge_failed_node(
    spec: JobSpec, status: JobStatus, failure: Failure, now: float
) -> tuple[tuple[NodeFault, ...], tuple[ExcludedNode, ...]]:
    """Node faults and excluded nodes after this failure; what is over is dropped."""
    recovery = spec.recovery
    seconds = recovery.exclude_hours * 3600.0
    faults = tuple(fault for fault in status.node_faults if abs(now - fault.at) < seconds)
    excluded = tuple(entry for entry in status.excluded_nodes if is_excluded(entry, recovery, now))
    if not chargeable(failure) or failure.node is None:
        return faults, excluded
    hopeless = failure.exit_code == ExitCode.PREFLIGHT_EXCLUDE
    why = f"{failure.cause}: {failure.message}"
    return charge_node(recovery, faults, excluded, failure.node, why, now, hopeless)


def charge_node(
    recovery: Recovery,
    faults: tuple[NodeFault, ...],
    excluded: tuple[ExcludedNode, ...],
    node: str,
    why: str,
    now: float,
    at_once: bool = False,
) -> tuple[tuple[NodeFault, ...], tuple[ExcludedNode, ...]]:
    """Charge one more fault to a node; enough of them exclude it, or one that leaves no hope (at_once)."""
    faults = (*faults, NodeFault(node=node, at=now, why=why[:300]))
    count = sum(fault.node == node for fault in faults)
    due = at_once or count >= recovery.exclude_node_after
    if due and all(entry.node != node for entry in excluded):
        words = f"{count} failures of this job within {recovery.exclude_hours} h; the last: {why}"[:300]
        excluded = (*excluded, ExcludedNode(node=node, until=now + recovery.exclude_hours * 3600.0, why=words))
    return faults, excluded


def exclude_node(
    recovery: Recovery,
    excluded: tuple[ExcludedNode, ...],
    failure: Failure,
    now: float,
    hours_max: float = float("inf"),
) -> tuple[ExcludedNode, ...]:
    """The failure's node is avoided from now on."""
    if failure.node is None or any(entry.node == failure.node for entry in excluded):
        return excluded
    until = now + min(hours_max, recovery.exclude_hours) * 3600.0
    return (*excluded, ExcludedNode(node=failure.node, until=until, why=failure.message[:300]))


def is_excluded(entry: ExcludedNode, recovery: Recovery, now: float) -> bool:
    """Return whether the node is still avoided. An end further off than the rule allows means that the clock went back,
    or the rule was relaxed."""
    return 0 < entry.until - now <= recovery.exclude_hours * 3600.0


def _in_window(recent: tuple[Restart, ...], recovery: Recovery, now: float) -> tuple[Restart, ...]:
    """Charges from the future (the clock went back) still count."""
    return tuple(entry for entry in recent if now - entry.at < recovery.window_hours * 3600.0)


def _fraction(text: str) -> float:
    """A number in [0, 1) that follows from the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48
