"""What to do about one job: pure, total, and told in the order in which things matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from muster.contract.signals import TrainerPhase
from muster.contract.status import STATUS_VERSION, Attempt, GangStatus, JobStatus, Phase
from muster.operator.core.budgets import remaining_backoff_seconds
from muster.operator.core.causes import Verdict, contradicted, hung, judge, never_met, vanished, word_awaited
from muster.operator.core.codes import GIVEN_UP, Code, code_of
from muster.operator.core.decision import ACTIONS_MAX, Action, CreateWorker, Decision, RemoveJob
from muster.operator.core.endings import (
    amend,
    checkpoint_status,
    clear,
    close,
    end,
    fail,
    finish,
    reason_to_release,
    requeue,
    stop,
    sweep,
)
from muster.operator.core.findings import updates as findings
from muster.operator.core.ledger import active_seconds
from muster.operator.core.moves import ATTEMPTS_KEPT, between_attempts, move, report
from muster.operator.core.observed import Observed, Reservation, WorkerState
from muster.operator.core.roll import Roll, call_roll
from muster.operator.core.skips import data_skip
from muster.operator.core.stalls import Stall, check_running, check_starting

MORE_SECONDS = 0.2  # between two parts of many actions: about what a watch takes to show the first
LOOK_SECONDS = 5.0  # how often a gang that starts, runs or stops is looked at without news

Rule = Callable[[Roll], Decision | None]


def decide(seen: Observed) -> Decision:
    """The first rule that has an opinion decides. Total: every state that a status can be in has its rule."""
    roll = call_roll(seen)
    for rule in RULES:
        if (decision := rule(roll)) is not None:
            return decision
    raise AssertionError(f"no rule for phase {seen.status.phase}")


def newer(roll: Roll) -> Decision | None:
    """A status in a form that we don't know: another, newer operator is responsible."""
    version = roll.status.schema_version
    if version <= STATUS_VERSION:
        return None
    because = (
        f"the status has schema version {version} and this operator knows {STATUS_VERSION}: not touched; "
        "upgrade the operator, or stop the older one if a newer one runs beside it"
    )
    return Decision(roll.status, code=Code.NEWER_STATUS, because=because)


def finished(roll: Roll) -> Decision | None:
    """A job that is over keeps sweeping, and goes when it is deleted or its time to live is up."""
    if not roll.status.phase.terminal:
        return None
    if not roll.empty:
        return _stay(roll, sweep(roll, (*roll.mine, *roll.older)), LOOK_SECONDS)
    if roll.seen.deleting:
        return _stay(roll, (RemoveJob(),), LOOK_SECONDS, trusts_absence=True)
    ttl = roll.seen.spec.ttl_seconds_after_finished
    if ttl is None:
        return _stay(roll)
    left = (roll.status.finished_at or roll.seen.now) + ttl - roll.seen.now
    return _stay(roll, wake_after=left) if left > 0 else _stay(roll, (RemoveJob(),), LOOK_SECONDS, trusts_absence=True)


def done(roll: Roll) -> Decision | None:
    """All workers ended well: that counts, whatever else was wished for meanwhile."""
    if not roll.all_done or roll.older or between_attempts(roll.status) or roll.seen.deleting:
        return None
    because = f"all {roll.gang.wanted} workers finished"
    return _turn(roll, finish(roll, because))


def wished(roll: Roll) -> Decision | None:
    """The user (or a deadline) wants it to end. A stronger wish replaces a weaker one, also while stopping."""
    seen, status = roll.seen, roll.status
    ends_as, code = status.ends_as, code_of(status.code) if status.phase is Phase.STOPPING else None
    if ends_as is Phase.SUCCEEDED:
        return None
    if seen.deleting:
        wanted = (Phase.CANCELLED, Code.DELETING, "the job was deleted")
    elif ends_as is Phase.CANCELLED or code in GIVEN_UP:
        return None
    elif seen.spec.cancel:
        wanted = (Phase.CANCELLED, Code.CANCELLING, "the user cancelled the job")
    elif code is Code.DEADLINE_EXCEEDED:
        return None
    elif _deadline_left(roll) <= 0:
        seconds = seen.spec.active_deadline_seconds
        wanted = (
            Phase.FAILED,
            Code.DEADLINE_EXCEEDED,
            f"the job was active for longer than its deadline of {seconds} s",
        )
    elif seen.spec.suspend and status.phase is not Phase.SUSPENDED:
        wanted = (Phase.SUSPENDED, Code.SUSPENDING, "the user suspended the job")
    else:
        return None
    if (ends_as, code) == wanted[:2]:
        return None
    return _turn(roll, stop(roll, *wanted))


def stopping(roll: Roll) -> Decision | None:
    """Clear the gang away, close the attempt when it is gone, and only then give the nodes back."""
    status, closed = roll.status, between_attempts(roll.status)
    if status.phase is not Phase.STOPPING and (status.phase is not Phase.RESTARTING or closed):
        return None
    failing = status.phase is Phase.RESTARTING or status.code in GIVEN_UP
    if failing and not closed and (better := amend(roll)) is not None:
        return _turn(roll, better)
    if failing and not closed and (patience := word_awaited(roll)) > 0:
        return _stay(roll, (), patience)
    if not roll.empty:
        return _stay(roll, clear(roll), LOOK_SECONDS)
    return _turn(roll, end(roll) if closed else close(roll), trusts_absence=True)


def suspended(roll: Roll) -> Decision | None:
    if roll.status.phase is not Phase.SUSPENDED:
        return None
    if not roll.empty:
        return _stay(roll, sweep(roll, (*roll.mine, *roll.older)), LOOK_SECONDS)
    if roll.seen.spec.suspend:
        return _stay(roll)
    because = "the user resumed the job; asking for nodes"
    return _turn(
        roll, move(roll, Code.AWAITING_ADMISSION, because, Phase.QUEUED, queued_at=roll.seen.now, retry_at=None)
    )


def queued(roll: Roll) -> Decision | None:
    """In the queue: begin when the ledger holds nodes for this very request."""
    seen, status = roll.seen, roll.status
    if status.phase is not Phase.QUEUED:
        return None
    if not roll.empty:
        return _stay(roll, sweep(roll, (*roll.mine, *roll.older)), LOOK_SECONDS)
    pause = remaining_backoff_seconds(seen.spec.recovery, status.retry_at, seen.now)
    if pause > 0:
        return _stay(roll, wake_after=pause)
    granted = _reservation(seen, status.reservation)
    if granted is not None:
        gang = GangStatus(
            wanted=len(granted.nodes),
            nodes=granted.nodes,
            pool=granted.pool,
            capacity=granted.capacity,
            instance_type=granted.instance_type,
        )
        return _turn(roll, _mint(roll, gang), trusts_absence=True)
    if seen.wait is not None:
        return _turn(roll, move(roll, code_of(seen.wait.code), seen.wait.because))
    if status.code in (Code.CREATED, Code.BACKING_OFF):
        return _turn(roll, move(roll, Code.AWAITING_ADMISSION, "in the queue; not yet considered"))
    return _stay(roll)


def holding(roll: Roll) -> Decision | None:
    """RESTARTING with the attempt closed: after a pause the next one on the same nodes, or back into the queue."""
    seen, status = roll.seen, roll.status
    if status.phase is not Phase.RESTARTING:
        return None
    if not roll.empty:
        return _stay(roll, sweep(roll, (*roll.mine, *roll.older)), LOOK_SECONDS)
    pause = remaining_backoff_seconds(seen.spec.recovery, status.retry_at, seen.now)
    if (because := reason_to_release(roll, pause)) is not None:
        return _turn(roll, requeue(roll, because), trusts_absence=True)
    if pause > 0:
        return _stay(roll, wake_after=pause)
    return _turn(roll, _mint(roll, status.gang), trusts_absence=True)


def broken(roll: Roll) -> Decision | None:
    """STARTING or RUNNING by a status that can't be true (somebody edited it): begin anew rather than guess."""
    status, gang = roll.status, roll.gang
    if status.phase not in (Phase.STARTING, Phase.RUNNING):
        return None
    if len(set(gang.nodes)) == gang.wanted > 0 and not between_attempts(status):
        return None
    what = f"{status.phase} with {len(gang.nodes)} nodes for {gang.wanted} workers"
    return _turn(roll, fail(roll, contradicted(roll, f"the status contradicts itself: {what}; beginning anew")))


def failed(roll: Roll) -> Decision | None:
    """STARTING or RUNNING, and something is wrong with the gang."""
    status = roll.status
    if (verdict := judge(roll)) is not None and not _only_said(roll, verdict):
        return _turn(roll, fail(roll, verdict))
    if status.phase is Phase.RUNNING and roll.missing:
        return _turn(roll, fail(roll, vanished(roll)), trusts_absence=True)
    return None


def starting(roll: Roll) -> Decision | None:
    """Let the whole gang exist, and wait until its ranks have met."""
    if roll.status.phase is not Phase.STARTING:
        return None
    if roll.older:
        because = f"{len(roll.older)} workers of earlier attempts are still there"
        status = move(roll, Code.AWAITING_REMOVAL, because)
        return _turn(roll, status, sweep(roll, roll.older), LOOK_SECONDS)
    if not roll.missing and (waiting := next((worker.waiting for worker in roll.mine if worker.waiting), "")):
        # Another scheduler's queue may be long: that is no failure, however long.
        status = move(roll, Code.AWAITING_SCHEDULER, waiting, gang=_gang(roll), suspicion=None)
        return _turn(roll, status, wake_after=LOOK_SECONDS)
    stall = check_starting(roll, _begun_at(roll))
    if stall.confirmed and stall.suspicion is not None:
        verdict = hung if stall.suspicion.rank is not None else never_met
        return _turn(roll, fail(roll, verdict(roll, stall.suspicion)), trusts_absence=True)
    updates: dict[str, Any] = {"gang": _gang(roll), "suspicion": stall.suspicion}
    if roll.missing:
        said = roll.status.because if roll.status.code == Code.CREATING_WORKERS else ""
        because = said or f"creating {len(roll.missing)} workers of attempt {roll.status.attempt} again"
        actions = tuple(_create(roll, index) for index in roll.missing[:ACTIONS_MAX])
        status = move(roll, Code.CREATING_WORKERS, because, **updates)
        return _turn(roll, status, actions, LOOK_SECONDS)
    if roll.ready < roll.gang.wanted:
        reason = next((f"; worker {w.worker} on {w.node}: {w.reason}" for w in roll.mine if w.reason), "")
        because = f"{roll.ready} of {roll.gang.wanted} workers are up{reason}"
        return _turn(roll, move(roll, Code.AWAITING_WORKERS, because, **updates), wake_after=LOOK_SECONDS)
    if roll.beat is None or roll.beat.phase is TrainerPhase.INIT:
        because = f"all {roll.gang.wanted} workers are up; their ranks are meeting"
        return _turn(roll, move(roll, Code.AWAITING_RANKS, because, **updates), wake_after=LOOK_SECONDS)
    return _turn(roll, _running(roll, Stall(None)))


def running(roll: Roll) -> Decision | None:
    """Report progress; stop for a larger gang when one is offered, and for good when the ranks hang."""
    if roll.status.phase is not Phase.RUNNING:
        return None
    stall = check_running(roll)
    if stall.confirmed and roll.seen.spec.recovery.dry_run:
        stall = Stall(roll.status.suspicion, confirmed=True)
    elif stall.confirmed and stall.suspicion is not None:
        # Cached reads repeat old heartbeats; only a fresh one shows that there is really nothing new.
        return _turn(roll, fail(roll, hung(roll, stall.suspicion)), trusts_absence=True)
    offer = _reservation(roll.seen, roll.status.reservation + 1)
    if offer is not None and len(offer.nodes) > roll.gang.wanted:
        because = f"capacity returned: going on with {len(offer.nodes)} nodes instead of {roll.gang.wanted}"
        return _turn(roll, move(roll, Code.REGROWING, because, Phase.RESTARTING, suspicion=None))
    wake_after = min(LOOK_SECONDS, max(0.0, _deadline_left(roll)), stall.wake_after or LOOK_SECONDS)
    return _turn(roll, _running(roll, stall), sweep(roll, roll.older), wake_after)


RULES: tuple[Rule, ...] = (
    newer,
    finished,
    done,
    wished,
    stopping,
    suspended,
    queued,
    holding,
    broken,
    failed,
    starting,
    running,
)


def _turn(
    roll: Roll,
    status: JobStatus,
    actions: tuple[Action, ...] = (),
    wake_after: float | None = None,
    trusts_absence: bool = False,
) -> Decision:
    """Either the status changes, or the actions that it already calls for are due."""
    if status is not roll.status:
        return Decision(status, (), None, status.code, status.because, trusts_absence)
    wake_after = MORE_SECONDS if len(actions) >= ACTIONS_MAX else wake_after
    return Decision(status, actions, wake_after, status.code, status.because, trusts_absence)


def _stay(
    roll: Roll, actions: tuple[Action, ...] = (), wake_after: float | None = None, trusts_absence: bool = False
) -> Decision:
    wake_after = MORE_SECONDS if len(actions) >= ACTIONS_MAX else wake_after
    return Decision(roll.status, actions, wake_after, roll.status.code, roll.status.because, trusts_absence)


def _mint(roll: Roll, gang: GangStatus) -> JobStatus:
    """The next attempt. What it resumes from is chosen here, in the write that makes it exist."""
    seen, status = roll.seen, roll.status
    gang = gang.model_copy(update={"ready": 0})
    number, resume_step = status.attempt + 1, seen.committed.step if seen.committed else 0
    attempt = Attempt.model_construct(
        number=number,
        created_at=seen.now,
        nodes=gang.nodes,
        workers=gang.wanted,
        gpus_per_worker=seen.spec.gang.gpus_per_node,
        instance_type=gang.instance_type,
        capacity=gang.capacity,
        world_size=gang.wanted * seen.spec.gang.ranks_per_node,
        resume_step=resume_step,
    )
    whence = f"resuming from step {resume_step}" if resume_step else "from the start"
    return move(
        roll,
        Code.CREATING_WORKERS,
        "; ".join(
            [
                f"attempt {number} on {gang.wanted} node{'s' if gang.wanted > 1 else ''} of pool {gang.pool}, {whence}",
                *seen.notes,
            ]
        ),
        Phase.STARTING,
        attempt=number,
        resume_step=resume_step,
        gang=gang,
        attempts=(*status.attempts, attempt)[-ATTEMPTS_KEPT:],
        checkpoint=checkpoint_status(roll),
        data_skip=data_skip(roll, resume_step),
        retry_at=None,
        started_at=status.started_at if status.started_at is not None else seen.now,
        ends_as=None,
        suspicion=None,
    )


def _create(roll: Roll, index: int) -> CreateWorker:
    nodes = roll.gang.nodes
    return CreateWorker(roll.status.attempt, index, nodes[index], nodes, roll.status.resume_step)


def _running(roll: Roll, stall: Stall) -> JobStatus:
    code, because = _activity(roll, stall)
    updates = {"gang": _gang(roll), "checkpoint": checkpoint_status(roll), "suspicion": stall.suspicion}
    return report(roll, code, because, Phase.RUNNING, **(updates | findings(roll)))


def _activity(roll: Roll, stall: Stall) -> tuple[Code, str]:
    if roll.seen.spec.recovery.dry_run and (would := _would(roll, stall)):
        return Code.WOULD_RESTART, f"nothing is done, for recovery.dryRun is on; else the gang would restart: {would}"
    if stall.suspicion is not None:
        return Code.STALLING, stall.suspicion.why
    gang, beat = roll.gang, roll.beat
    where = f"{gang.wanted} node{'s' if gang.wanted > 1 else ''} of pool {gang.pool}"
    preparing = beat is not None and beat.phase in (TrainerPhase.INIT, TrainerPhase.DATA, TrainerPhase.LOAD)
    if preparing and roll.status.code != Code.TRAINING:
        return Code.PREPARING, f"preparing data and loading state on {where}"
    return Code.TRAINING, f"training on {where}"


def _only_said(roll: Roll, verdict: Verdict) -> bool:
    """In a dry run nothing is ended that has not ended by itself."""
    return verdict.alive and roll.status.phase is Phase.RUNNING and roll.seen.spec.recovery.dry_run


def _would(roll: Roll, stall: Stall) -> str:
    verdict = judge(roll)
    if verdict is not None:
        return f"{verdict.failure.cause}: {verdict.failure.message}"
    return stall.suspicion.why if stall.confirmed and stall.suspicion is not None else ""


def _gang(roll: Roll) -> GangStatus:
    return roll.gang if roll.gang.ready == roll.ready else roll.gang.model_copy(update={"ready": roll.ready})


def _begun_at(roll: Roll) -> float:
    """From when on the ranks could meet: the attempt's beginning, or when the last worker got its place."""
    created_at = roll.status.attempts[-1].created_at if roll.status.attempts else roll.status.since
    placed = [worker.since for worker in roll.mine if worker.state is WorkerState.STARTING]
    return max([created_at, *placed])


def _deadline_left(roll: Roll) -> float:
    """Seconds of activity left; infinite without a deadline or while nothing is active."""
    deadline, status = roll.seen.spec.active_deadline_seconds, roll.status
    if deadline is None or status.phase in (Phase.QUEUED, Phase.SUSPENDED):
        return float("inf")
    return deadline - active_seconds(status.ledger, status.phase, roll.seen.now)


def _reservation(seen: Observed, number: int) -> Reservation | None:
    return next((entry for entry in seen.reservations if entry.number == number), None)
