"""Entries of the audit log, each written in the transaction of the change that it records."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.callers import Principal
from muster.api.core.database.tables import AuditRow


@dataclass(frozen=True)
class AuditedAct:
    """Action and its subject, for the audit log. `before` and `after` name what changed, and never contain a secret."""

    action: str  # `job.submitted`, `member.changed` …
    subject: str  # the id of a job or token, the name of a project or person
    project: str | None
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


def record(session: AsyncSession, caller: Principal, act: AuditedAct) -> None:
    """Add a line; it is there if, and only if, the session commits."""
    session.add(AuditRow(**act_values(caller, act)))


def act_values(caller: Principal, act: AuditedAct) -> dict[str, Any]:
    """The columns of a line."""
    return {
        "at": time.time(),
        "person": caller.person,
        "token": caller.token,
        "address": caller.address,
        "action": act.action,
        "subject": act.subject,
        "project": act.project,
        "before": act.before,
        "after": act.after,
    }
