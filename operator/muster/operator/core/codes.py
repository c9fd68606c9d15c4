"""Every code that a status can carry, in one place. Codes are stable; the words that accompany them may change.

tests/unit/core/test_codes.py walks them all: each must be reached by a decision, and be explained in words.
"""

from __future__ import annotations

from enum import StrEnum

from muster.words.signals import Cause


class Code(StrEnum):
    # Queued
    CREATED = "Created"  # nobody has looked at it yet
    AWAITING_ADMISSION = "AwaitingAdmission"  # in the queue, not yet considered
    AWAITING_CAPACITY = "AwaitingCapacity"  # would fit an empty fleet, does not fit this one
    GANG_TOO_LARGE = "GangTooLarge"  # would not fit an empty fleet
    NODE_TOO_SMALL = "NodeTooSmall"  # one worker asks for more than any node has
    TOPOLOGY_UNSATISFIABLE = "TopologyUnsatisfiable"  # no topology domain is large enough
    NAMESPACE_LIMIT = "NamespaceLimit"  # the namespace's accelerators are all in use
    PROJECT_LIMIT = "ProjectLimit"  # what the project may hold is in use
    PERSON_LIMIT = "PersonLimit"  # what its owner may hold of the project is in use
    MONTH_LIMIT = "MonthLimit"  # what its project or owner may use in a month is used up (also Stopping, Suspended)
    EXCEEDS_LIMIT = "ExceedsLimit"  # more than its namespace, project or owner may ever hold
    BEHIND_EARLIER_GANG = "BehindEarlierGang"  # would fit, but the nodes are kept for a gang that has waited long
    AWAITING_PREEMPTION = "AwaitingPreemption"  # others were asked to commit and make room for it
    AWAITING_SCHEDULER = "AwaitingScheduler"  # another scheduler (Kueue …) admits it
    AWAITING_COMMITS = "AwaitingCommits"  # from which commit to resume can't be told; nothing begins anew instead
    BACKING_OFF = "BackingOff"  # a pause before the next attempt (also in Restarting, where the nodes are kept)
    # Starting
    AWAITING_REMOVAL = "AwaitingRemoval"  # workers of an earlier attempt are still there
    CREATING_WORKERS = "CreatingWorkers"
    AWAITING_WORKERS = "AwaitingWorkers"  # processes are starting
    AWAITING_RANKS = "AwaitingRanks"  # ranks are meeting
    # Running
    PREPARING = "Preparing"  # data, loading a commit: before the first step
    TRAINING = "Training"
    STALLING = "Stalling"  # no progress for suspiciously long
    WOULD_RESTART = "WouldRestart"  # recovery.dryRun: what would be done is only said
    # Restarting: why the attempt ended
    USER_ERROR = "UserError"
    OUT_OF_MEMORY = "OutOfMemory"
    NUMERIC_FAULT = "NumericFault"
    HANG = "Hang"
    INFRASTRUCTURE_FAULT = "InfrastructureFault"
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    STORAGE_FAULT = "StorageFault"
    UNKNOWN_FAULT = "UnknownFault"
    WORKERS_REJECTED = "WorkersRejected"  # a quota or the platform lets no worker exist: nobody's failure
    REGROWING = "Regrowing"  # nothing failed: capacity returned
    # Stopping, and then the phase that it leads to
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    CANCELLING = "Cancelling"
    CANCELLED = "Cancelled"
    DELETING = "Deleting"
    DELETED = "Deleted"
    FINISHING = "Finishing"  # written by an earlier Muster: all ended well
    FINISHED = "Finished"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    BUDGET_SPENT = "BudgetSpent"
    CRASH_LOOP = "CrashLoop"
    REPEATED_FAILURE = "RepeatedFailure"  # the same exception at the same step, twice: deterministic
    # Never in a status: only in a decision
    NEWER_STATUS = "NewerStatus"  # written by a newer Muster; not touched


# There is no further attempt, because of how the last ones ended.
GIVEN_UP = frozenset({Code.BUDGET_SPENT, Code.CRASH_LOOP, Code.REPEATED_FAILURE})


def code_of(text: str) -> Code:
    """The code of a stored status; one that we don't know (an edited or broken status) explains nothing."""
    try:
        return Code(text)
    except ValueError:
        return Code.UNKNOWN_FAULT


OF_CAUSE: dict[Cause, Code] = {
    Cause.USER_ERROR: Code.USER_ERROR,
    Cause.OUT_OF_MEMORY: Code.OUT_OF_MEMORY,
    Cause.NUMERIC: Code.NUMERIC_FAULT,
    Cause.HANG: Code.HANG,
    Cause.INFRASTRUCTURE: Code.INFRASTRUCTURE_FAULT,
    Cause.PREEMPTION: Code.PREEMPTED,
    Cause.EVICTION: Code.EVICTED,
    Cause.STORAGE: Code.STORAGE_FAULT,
    Cause.UNKNOWN: Code.UNKNOWN_FAULT,
}
