"""Is the gang hung? Told from heartbeats alone, with a deadline for each thing that a rank may be doing.

A clock that jumps must not kill a healthy gang. So a stall is first suspected, in the status, and believed only when
the very same heartbeat is still the newest a while later.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.contract.signals import Heartbeat, TrainerPhase
from muster.contract.status import Suspicion
from muster.operator.core.observed import Observed, WorkerState
from muster.operator.core.roll import Roll

# Without progress, at most. Generous: torch's own collective time-out is 600 s, and a false alarm costs a restart, so
# only what is silent for longer than any healthy phase is called hung.
LIMIT_SECONDS: dict[TrainerPhase, float] = {
    TrainerPhase.INIT: 600.0,  # rendezvous: 600 s is torchrun's own join time-out
    TrainerPhase.DATA: 3600.0,  # tokenizing a corpus
    TrainerPhase.LOAD: 1800.0,  # ByteCheckpoint (arXiv 2407.20143) reads 405B in 129 s; slow buckets take longer
    TrainerPhase.STEP: 300.0,  # until the job's own pace is known
    TrainerPhase.EVALUATION: 900.0,
    TrainerPhase.CHECKPOINT: 900.0,  # blocked by a save; 30 minutes were seen when a barrier was stranded (marin#9213)
    TrainerPhase.DRAIN: 600.0,
    TrainerPhase.DONE: 300.0,
}
STEPS_MAX = 10.0  # a step may take so many times the last one …
STEP_SECONDS_MIN = 120.0  # … but is not called hung before: shared storage and busy machines do stop for a minute
SILENT_SECONDS = 60.0  # a rank rewrites its heartbeat every second, whatever it does
CONFIRM_SHARE = 0.5  # of the limit, between suspicion and belief
CONFIRM_SECONDS_MIN = 30.0
STARTING_SECONDS = 600.0  # DLRover's pending time-out


@dataclass(frozen=True, slots=True)
class Stall:
    """suspicion: to be kept in the status; None clears it. confirmed: believed now. wake_after: when to look again."""

    suspicion: Suspicion | None
    confirmed: bool = False
    wake_after: float | None = None


def check_running(roll: Roll) -> Stall:
    """Collective training moves together, so the gang is as alive as the rank that moved last."""
    seen, attempt = roll.seen, roll.status.attempt
    beats = [beat for worker in roll.mine for beat in worker.heartbeats if beat.attempt == attempt]
    if not beats:
        return Stall(None)
    newest = max(beats, key=lambda beat: beat.progressed_at)
    beat_at = max(beat.at for beat in beats)
    limit = _limit(newest)
    # Both times are of the worker's own clock, so a skew between machines cancels out.
    idle = beat_at - newest.progressed_at
    if idle > limit:
        why = f"no progress for {idle:.0f} s in phase {newest.phase} at step {newest.step} (limit {limit:.0f} s)"
        suspicion = Suspicion(at=seen.now, progressed_at=newest.progressed_at, why=why)
        return _weigh(seen, suspicion, max(CONFIRM_SECONDS_MIN, limit * CONFIRM_SHARE))
    silent = seen.now - beat_at
    if silent > SILENT_SECONDS:
        why = (
            f"no sign of life from any rank for {silent:.0f} s; last seen in phase {newest.phase} at step {newest.step}"
        )
        suspicion = Suspicion(at=seen.now, beat_at=beat_at, progressed_at=newest.progressed_at, why=why)
        return _weigh(seen, suspicion, CONFIRM_SECONDS_MIN)
    return Stall(None)


def check_starting(roll: Roll, created_at: float) -> Stall:
    """A gang whose ranks have not met when the time for it is up."""
    seen = roll.seen
    waited = seen.now - created_at
    if waited <= STARTING_SECONDS:
        return Stall(None, wake_after=max(1.0, STARTING_SECONDS - waited) if waited >= 0 else STARTING_SECONDS)
    why = f"the ranks did not meet within {STARTING_SECONDS:.0f} s{_who_is_missing(roll)}"
    return _weigh(seen, Suspicion(at=seen.now, why=why), CONFIRM_SECONDS_MIN)


def _weigh(seen: Observed, now: Suspicion, confirm_seconds: float) -> Stall:
    """now: what looks hung at this moment. Confirmed when it already did, with the same heartbeat, that long ago."""
    before = seen.status.suspicion
    if before is None or seen.now < before.at:
        return Stall(now, wake_after=confirm_seconds)
    left = before.at + confirm_seconds - seen.now
    if left > 0:
        return Stall(before, wake_after=max(0.1, left))
    if (before.beat_at, before.progressed_at) == (now.beat_at, now.progressed_at):
        return Stall(before, confirmed=True)
    return Stall(now, wake_after=confirm_seconds)


def _limit(beat: Heartbeat) -> float:
    limit = LIMIT_SECONDS[beat.phase]
    if beat.phase is TrainerPhase.STEP and beat.last_step is not None:
        return max(STEP_SECONDS_MIN, STEPS_MAX * beat.last_step.step_seconds)
    return limit


def _who_is_missing(roll: Roll) -> str:
    """Names the first worker that is not up, and the world's word for why."""
    up = {worker.worker for worker in roll.mine if worker.state is WorkerState.RUNNING}
    absent = [index for index in range(roll.gang.wanted) if index not in up]
    if not absent:
        return ""
    first = next((worker for worker in roll.mine if worker.worker == absent[0]), None)
    reason = f" ({first.reason})" if first and first.reason else ""
    node = roll.gang.nodes[absent[0]] if absent[0] < len(roll.gang.nodes) else "its node"
    others = f", nor are {len(absent) - 1} more" if len(absent) > 1 else ""
    return f": worker {absent[0]} on {node}{reason} is not up{others}"
