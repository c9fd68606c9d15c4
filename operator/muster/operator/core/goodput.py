"""Time account of a job. It always balances: the seconds sum to `since` minus the job's creation.

While a gang runs, rank 0's own account (Heartbeat.seconds) says what the time was spent on. Time that it has not
accounted for yet stays open (`since` lags behind) and is booked when it is known, or when the attempt ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.words.signals import Heartbeat
from muster.words.status import Attempt, GoodputAccount, GoodputState, Phase

# What the time of a phase is when no rank says otherwise. Running is open: see above.
_OF_PHASE: dict[Phase, GoodputState | None] = {
    Phase.QUEUED: GoodputState.QUEUE,
    Phase.STARTING: GoodputState.STARTING,
    Phase.RUNNING: None,
    Phase.RESTARTING: GoodputState.DRAINING,
    Phase.STOPPING: GoodputState.DRAINING,
    Phase.SUSPENDED: GoodputState.SUSPENDED,
}


@dataclass(frozen=True, slots=True)
class BookedTime:
    """The account, and what of it belongs to the current attempt (Attempt.seconds)."""

    account: GoodputAccount
    attempt_seconds: dict[str, float]


def rest_of_phase(phase: Phase, ending: bool, between_attempts: bool, waiting: bool = False) -> GoodputState | None:
    """Return the state for time in `phase` that no rank accounts for; None leaves it open.

    `ending` says that the gang's training ends with this write, so what is open now was spent without progress.
    `between_attempts` says that the gang is gone and its nodes are kept through a pause. `waiting` says that another
    scheduler has not placed the gang yet, so it holds nothing.
    """
    if waiting:
        return GoodputState.QUEUE
    if phase == Phase.RUNNING and ending:
        return GoodputState.STALLED
    if phase == Phase.RESTARTING and between_attempts:
        return GoodputState.QUEUE
    return _OF_PHASE.get(phase)


def opened(account: GoodputAccount, created_at: float) -> GoodputAccount:
    """The account, begun at the job's creation if nothing has been booked yet."""
    return account if account.seconds or account.since else _closed_at({}, created_at)


def book(
    account: GoodputAccount,
    attempt_seconds: dict[str, float],
    now: float,
    rest: GoodputState | None,
    beat: Heartbeat | None,
) -> BookedTime:
    """Close the account up to `now`, or, with rest None, up to where the heartbeat's account reaches.

    A clock that went backwards books nothing until it is past `since` again.
    """
    span = now - account.since
    if span <= 0:
        return BookedTime(account, attempt_seconds)
    seconds, mine = dict(account.seconds), dict(attempt_seconds)
    spent = _book_heartbeat(seconds, mine, span, beat) if beat else 0.0
    if rest is None:
        return BookedTime(_closed_at(seconds, account.since + spent), mine)
    left = span - spent
    seconds[rest] = seconds.get(rest, 0.0) + left
    if rest not in (GoodputState.QUEUE, GoodputState.SUSPENDED):
        mine[rest] = mine.get(rest, 0.0) + left
    return BookedTime(_closed_at(seconds, now), mine)


def active_seconds(account: GoodputAccount, phase: Phase, now: float, waiting: bool = False) -> float:
    """Return the seconds in which the job held, or could have held, accelerators: all but the queue and suspension."""
    idle = (GoodputState.QUEUE, GoodputState.SUSPENDED)
    closed = sum(value for state, value in account.seconds.items() if state not in idle)
    return closed + (max(0.0, now - account.since) if _OF_PHASE.get(phase) not in idle and not waiting else 0.0)


def lose(booked: BookedTime, attempt: Attempt, committed_step: int) -> tuple[BookedTime, int]:
    """Productive time after the last commit was for nothing: move it to `lost`. Returns the lost steps too."""
    last = attempt.last_step if attempt.last_step is not None else attempt.resume_step
    trained = last - attempt.resume_step
    lost_steps = max(0, last - max(committed_step, attempt.resume_step))
    if trained <= 0 or not lost_steps:
        return booked, 0
    amount = booked.attempt_seconds.get(GoodputState.PRODUCTIVE, 0.0) * lost_steps / trained
    amount = min(amount, booked.account.seconds.get(GoodputState.PRODUCTIVE, 0.0))
    return BookedTime(
        _closed_at(_moved(booked.account.seconds, amount), booked.account.since), _moved(booked.attempt_seconds, amount)
    ), lost_steps


def _moved(seconds: dict[str, float], amount: float) -> dict[str, float]:
    return seconds | {
        GoodputState.PRODUCTIVE: seconds.get(GoodputState.PRODUCTIVE, 0.0) - amount,
        GoodputState.LOST: seconds.get(GoodputState.LOST, 0.0) + amount,
    }


def _book_heartbeat(seconds: dict[str, float], mine: dict[str, float], span: float, beat: Heartbeat) -> float:
    """Book what rank 0 has accounted for since the last time, at most `span`; returns how much that was."""
    own = beat.seconds
    totals = (
        (GoodputState.LOADING, own.data + own.load),
        (GoodputState.PRODUCTIVE, own.productive),
        (GoodputState.DATA_WAIT, own.data_wait),
        (GoodputState.CHECKPOINT, own.checkpoint),
        (GoodputState.EVALUATION, own.evaluation),
        (GoodputState.DRAINING, own.drain),
    )
    # `lost` was productive when it was booked, but it is only moved when the attempt is over.
    news = [(state, total - mine.get(state, 0.0)) for state, total in totals if total > mine.get(state, 0.0)]
    total = sum(amount for _, amount in news)
    if total <= 0:
        return 0.0
    scale = min(1.0, span / total)
    for state, amount in news:
        seconds[state] = seconds.get(state, 0.0) + amount * scale
        mine[state] = mine.get(state, 0.0) + amount * scale
    return min(span, total)


def _closed_at(seconds: dict[str, float], since: float) -> GoodputAccount:
    return GoodputAccount.model_construct(seconds=seconds, since=since)
