"""Rejections of workers by the API server, and whether they may pass by themselves. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from muster.kube.errors import ApiError
from muster.operator.core.observed import Rejection
from muster.operator.kubernetes.gangs.protocol import MisnamedObject
from muster.operator.kubernetes.render import UnrenderableJob

WHY_LENGTH_MAX = 500
# Of a 403 (Forbidden), which admission answers to nearly everything: what passes by itself, or by the hand of somebody
# who runs the cluster. The words are those of Kubernetes' quota admission, RBAC, namespace lifecycle and start-up.
_PASSING = (
    "exceeded quota",
    "status unknown for quota",
    "cannot create resource",
    "cannot get resource",
    "being terminated",
    "not yet ready to handle request",
)
_FINAL = frozenset({400, 404, 422})  # BadRequest, NotFound (of what the job names), Invalid


@dataclass(frozen=True, slots=True)
class WorkerRejection:
    """Reason why a worker was not created."""

    kind: Rejection
    why: str
    since: float  # when it was first rejected, in seconds since the epoch
    answered: bool = False  # whether the API server said no; without an answer the worker may well be there

    def first_seen(self, before: WorkerRejection | None) -> WorkerRejection:
        """The same, but since `before`, if the worker was rejected then already."""
        return WorkerRejection(self.kind, self.why, before.since, self.answered) if before else self


def rejected(error: Exception, now: float) -> WorkerRejection:
    why = (error.message if isinstance(error, ApiError) else str(error))[:WHY_LENGTH_MAX] or repr(error)
    return WorkerRejection(_kind(error), why, now, isinstance(error, ApiError))


def _kind(error: Exception) -> Rejection:
    if isinstance(error, (MisnamedObject, UnrenderableJob)):
        return Rejection.PERMANENT
    if not isinstance(error, ApiError):
        return Rejection.TEMPORARY  # no answer, or a part of the platform is missing
    if error.status == 403:
        passes = any(words in error.message for words in _PASSING)
        return Rejection.TEMPORARY if passes else Rejection.PERMANENT
    return Rejection.PERMANENT if error.status in _FINAL else Rejection.TEMPORARY
