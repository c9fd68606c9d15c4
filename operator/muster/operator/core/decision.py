"""What the core decides. It leaves no choice to whoever carries it out."""

from __future__ import annotations

from dataclasses import dataclass

from muster.contract.status import JobStatus


@dataclass(frozen=True, slots=True)
class CreateWorker:
    """Let worker `worker` of `attempt` exist on `node`. Idempotent: one that exists already is left alone.

    nodes: where every worker of the gang is, in worker order. resume_step: the commit to load, 0 for a fresh start.
    """

    attempt: int
    worker: int
    node: str
    nodes: tuple[str, ...]
    resume_step: int


@dataclass(frozen=True, slots=True)
class RemoveWorker:
    """Make this worker be gone: ask it to stop, end it by force after the grace, then forget it. An exited one is only
    swept. Idempotent. grace_seconds 0: at once, and without waiting for a node that does not answer.
    """

    attempt: int
    worker: int
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class RemoveJob:
    """The object itself may go: its gang is gone. A worker that was created too late to be seen goes with it (its owner
    reference in Kubernetes, a last sweep elsewhere); it can't have begun to train, the fence refuses it.
    """


# A very large gang is made and cleared in several passes, so that a wish or a failure is noticed between them.
ACTIONS_MAX = 500

Action = CreateWorker | RemoveWorker | RemoveJob


@dataclass(frozen=True, slots=True)
class Decision:
    """status: what the status should be. actions: what to do, only if the status says so already (they are empty when
    it is to change). wake_after: seconds until the job should be looked at even if nothing is heard; None: only on
    news. trusts_absence: rests on something not being there, so it holds only for a fresh observation.
    """

    status: JobStatus
    actions: tuple[Action, ...] = ()
    wake_after: float | None = None
    code: str = ""
    because: str = ""
    trusts_absence: bool = False
