"""Lints every Decision before it is carried out. What it finds is our mistake, never the user's."""

from __future__ import annotations

from collections.abc import Iterator

from muster.operator.core.codes import Code
from muster.operator.core.decision import CreateWorker, JobDecision, RemoveJob, RemoveWorker
from muster.operator.core.observed import ObservedJob
from muster.words.names import FIRST_INCARNATION, WorkerId
from muster.words.status import STATUS_VERSION, GoodputState, JobStatus, Phase
from muster.words.text import plural

_CODES = frozenset(Code)
_ALIVE = frozenset({Phase.STARTING, Phase.RUNNING})
_EMPTY_HANDED = frozenset({Phase.QUEUED, Phase.SUSPENDED, Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})
_AT_REST = _EMPTY_HANDED - {Phase.QUEUED}
_NEEDS_A_WAKE = frozenset({Phase.STARTING, Phase.RUNNING, Phase.RESTARTING, Phase.STOPPING})
_ROUNDING_SECONDS = 1e-3


class AuditFailed(AssertionError):
    """A decision broke the promises that `faults` says in words."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        self.faults = faults
        super().__init__("; ".join(faults))


def audit(seen: ObservedJob, decision: JobDecision) -> tuple[str, ...]:
    """Return everything that is wrong with the decision; empty if nothing is."""
    faults = list(_general(seen, decision))
    if decision.status is not seen.status and not _only_in_todays_form(seen.status, decision.status):
        faults += _change(seen, decision)
        faults += _books(seen, decision.status)
    for action in decision.actions:
        match action:
            case CreateWorker():
                faults += _creation(seen, decision, action)
            case RemoveWorker():
                faults += _removal(seen, action)
            case RemoveJob():
                faults += _departure(seen, decision)
    return tuple(faults)


def _general(seen: ObservedJob, decision: JobDecision) -> Iterator[str]:
    if decision.code not in _CODES or not decision.because:
        yield f"does not explain itself: code {decision.code!r}, because {decision.because!r}"
    if decision.status != seen.status and decision.actions:
        yield "acts on a status that is not written yet"
    if decision.trusts_absence and not seen.fresh:
        yield "trusts absence in an observation that may be stale"
    if decision.wake_after is not None and not 0 <= decision.wake_after < float("inf"):
        yield f"wakes after {decision.wake_after}"
    quiet = decision.wake_after is None and decision.status == seen.status and decision.code != Code.NEWER_STATUS
    if quiet and seen.status.phase in _NEEDS_A_WAKE:
        yield f"would never look at a job in {seen.status.phase} again"


def _change(seen: ObservedJob, decision: JobDecision) -> Iterator[str]:
    before, after = seen.status, decision.status
    if after.schema_version != before.schema_version:
        yield "changes the status' version together with something else"
    if before.phase.terminal:
        yield f"changes a job that is {before.phase}"
    if after.attempt not in (before.attempt, before.attempt + 1):
        yield f"attempt goes from {before.attempt} to {after.attempt}"
    if after.attempt == before.attempt + 1:
        yield from _attempt_start(seen, decision)
    elif after.resume_step != before.resume_step:
        yield "moves the resume step of a living attempt"
    yield from _incarnations(seen, decision)
    if after.reservation - before.reservation not in ((0, 2) if after.phase in _AT_REST else (0, 1)):
        yield f"reservation goes from {before.reservation} to {after.reservation}"
    sure = _gone(seen) and decision.trusts_absence
    done = _all_done(seen) and after.phase is Phase.SUCCEEDED
    if after.reservation > before.reservation and (after.gang.nodes or not (done or (_closed(before) and sure))):
        yield "gives nodes back while the gang may still be there"
    if before.gang.nodes and not after.gang.nodes and after.reservation == before.reservation:
        yield "drops nodes without giving them back"
    if _closed(after) and not _closed(before) and not (sure or done):
        yield "closes an attempt whose gang may still be there"
    if after.phase in _ALIVE and len(after.gang.nodes) != after.gang.wanted:
        yield f"holds {plural(len(after.gang.nodes), 'node')} for {plural(after.gang.wanted, 'worker')}"
    alone = not seen.spec.gang.share_nodes
    if alone and after.phase in _ALIVE and len(set(after.gang.nodes)) != len(after.gang.nodes):
        yield "puts two workers of a gang on one node"
    if after.phase in _EMPTY_HANDED and after.gang.nodes:
        yield f"{after.phase} with nodes in its hands"
    if after.phase.terminal and not (sure or done):
        yield f"{after.phase} while workers may be there"
    if after.phase is Phase.STOPPING and after.ends_as is None:
        yield "stops without saying for what"
    if after.restarts.total < before.restarts.total or any(
        after.restarts.by_cause.get(cause, 0) < count for cause, count in before.restarts.by_cause.items()
    ):
        yield "forgets restarts"


def _attempt_start(seen: ObservedJob, decision: JobDecision) -> Iterator[str]:
    before, after = seen.status, decision.status
    if not _gone(seen) or not _closed(before) or not decision.trusts_absence:
        yield f"starts attempt {after.attempt} while attempt {before.attempt} may be there"
    committed = seen.committed.step if seen.committed else 0
    if before.checkpoint is not None and (seen.committed is None or seen.commits_unreadable):
        yield f"begins anew although step {before.checkpoint.step} was committed"
    if after.resume_step != committed:
        yield f"resumes from step {after.resume_step} although {committed} is the newest checkpoint"
    if after.phase is not Phase.STARTING:
        yield f"starts an attempt into {after.phase}"
    if before.phase is Phase.QUEUED:
        grant = next((entry for entry in seen.reservations if entry.number == before.reservation), None)
        if grant is None or grant.nodes != after.gang.nodes:
            yield "takes nodes that are not reserved for it"
    elif after.gang.nodes != before.gang.nodes:
        yield "moves to nodes that it did not hold"
    if seen.deleting or seen.spec.cancel or seen.spec.suspend:
        yield "begins an attempt that the user does not want"


def _incarnations(seen: ObservedJob, decision: JobDecision) -> Iterator[str]:
    """Each attempt begins with the first life of every worker, and within it a life is followed by the next."""
    before, after = seen.status, decision.status
    if after.gang.incarnations and after.attempt != before.attempt:
        yield f"starts attempt {after.attempt} with replaced workers"
    if after.gang.incarnations == before.gang.incarnations or after.attempt != before.attempt or not after.gang.nodes:
        return
    for worker in range(after.gang.wanted):
        old, new = before.gang.incarnation(worker), after.gang.incarnation(worker)
        if new not in (old, old + 1):
            yield f"worker {worker} goes from incarnation {old} to {new}"


def _creation(seen: ObservedJob, decision: JobDecision, action: CreateWorker) -> Iterator[str]:
    status, id = seen.status, action.id
    nodes = status.gang.nodes
    if id.attempt != status.attempt or status.phase is not Phase.STARTING:
        yield f"creates a worker of attempt {id.attempt} in {status.phase} of attempt {status.attempt}"
    elif id != status.current(id.worker):
        yield f"creates {id}, which is not the current one"
    if not 0 <= id.worker < len(nodes) or action.node != nodes[id.worker] or action.nodes != nodes:
        yield f"creates worker {id.worker} where it does not belong"
    if action.resume_step != status.resume_step:
        yield "creates a worker that resumes from another step than its attempt"
    if any(worker.attempt < status.attempt for worker in seen.workers):
        yield "creates a worker while one of an earlier attempt may be there"
    elif any((each.attempt, each.worker) == (id.attempt, id.worker) and each.id < id for each in seen.workers):
        yield f"creates {id} while an earlier incarnation of it may be there"
    elif id.incarnation != FIRST_INCARNATION and not decision.trusts_absence:
        yield f"creates {id} without looking whether the incarnation before it is gone"


def _removal(seen: ObservedJob, action: RemoveWorker) -> Iterator[str]:
    status = seen.status
    if _is_newer(status, action.id):
        yield f"removes {action.id}, which is newer than the status (attempt {status.attempt})"
    if action.id == status.current(action.id.worker) and status.phase in (Phase.STARTING, Phase.RUNNING):
        yield f"removes {action.id}, which is alive"
    if action.grace_seconds < 0:
        yield f"gives {action.grace_seconds} s of grace"


def _departure(seen: ObservedJob, decision: JobDecision) -> Iterator[str]:
    if not seen.status.phase.terminal or not _gone(seen) or not decision.trusts_absence:
        yield "removes a job whose gang may be there"
    if not seen.deleting and seen.spec.ttl_seconds_after_finished is None:
        yield "removes a job that nobody wants removed"


def _books(seen: ObservedJob, after: JobStatus) -> Iterator[str]:
    before = seen.status.ledger
    account = after.ledger
    if before.seconds and account.since < before.since:
        yield "the goodput account goes back in time"
    if any(value < -_ROUNDING_SECONDS for value in account.seconds.values()):
        yield f"the goodput account has negative time: {account.seconds}"
    if not account.seconds.keys() <= set(GoodputState):
        yield f"the goodput account has unknown states: {sorted(account.seconds)}"
    booked, passed = sum(account.seconds.values()), account.since - seen.created_at
    if account.since and abs(booked - passed) > _ROUNDING_SECONDS:
        yield f"the goodput account holds {booked:.3f} s of {passed:.3f} s"


def _only_in_todays_form(before: JobStatus, after: JobStatus) -> bool:
    """Return whether only the version of the form changed: what an earlier release wrote is repeated as it is, and the
    next decision corrects it."""
    return after == before.model_copy(update={"schema_version": STATUS_VERSION})


def _closed(status: JobStatus) -> bool:
    return not status.attempts or status.attempts[-1].ended_at is not None


def _all_done(seen: ObservedJob) -> bool:
    """Return whether each worker of the gang ended well, and nobody else is there who could train."""
    status, size = seen.status, seen.status.gang.wanted
    done = {w.worker for w in seen.workers if w.id == status.current(w.worker) and w.exit and w.exit.exit_code == 0}
    here = sum(not _is_newer(status, w.id) for w in seen.workers)
    return len(done) == here == size > 0


def _gone(seen: ObservedJob) -> bool:
    return all(_is_newer(seen.status, worker.id) for worker in seen.workers)


def _is_newer(status: JobStatus, id: WorkerId) -> bool:
    """Return whether a later status than this one has made that worker."""
    return id > status.current(id.worker)
