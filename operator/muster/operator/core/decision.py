"""Decisions of the core. They leave no choice to their execution."""

from __future__ import annotations

from dataclasses import dataclass

from muster.words.names import WorkerId
from muster.words.status import JobStatus


@dataclass(frozen=True, slots=True)
class CreateWorker:
    """Let this life of a worker exist on `node`. Idempotent: one that exists already is left alone."""

    id: WorkerId
    node: str
    nodes: tuple[str, ...]
    """Nodes of the gang's workers, in worker order."""
    resume_step: int
    """The step of the commit to load; 0 for a fresh start."""


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Make this life of a worker be gone: ask it to stop, end it by force after the grace, then forget it. One that has
    ended is only swept. Idempotent.
    """

    id: WorkerId
    grace_seconds: float
    """0: at once, and without waiting for a node that does not answer."""


@dataclass(frozen=True, slots=True)
class RemoveJob:
    """The object itself may go: its gang is gone. A worker that was created too late to be seen goes with it (its owner
    reference in Kubernetes, a last sweep elsewhere); it can't have begun to train, the fence refuses it.
    """


# A very large gang is made and cleared in several passes, so that a wish or a failure is noticed between them.
ACTIONS_MAX = 500

Action = CreateWorker | RemoveWorker | RemoveJob


@dataclass(frozen=True, slots=True)
class JobDecision:
    """Decision about a job: its next status and the actions to take."""

    status: JobStatus
    """Desired status."""
    actions: tuple[Action, ...] = ()
    """Actions to take, which the status already announces: empty when the status is to change."""
    wake_after: float | None = None
    """Seconds until the job should be looked at even if nothing is heard of it; None: only on news."""
    code: str = ""
    because: str = ""
    trusts_absence: bool = False
    """True if the decision rests on something not being there, so that it holds only for a fresh observation."""
