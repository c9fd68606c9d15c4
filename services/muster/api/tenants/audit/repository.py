"""Entries of the audit log in the database, each written in the transaction of the change that it records."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.callers import Principal
from muster.api.core.database.tables import AuditRow
from muster.contract.projects import Role


@dataclass(frozen=True)
class Act:
    """Action and its subject, for the audit log. `before` and `after` name what changed, and never contain a secret."""

    action: str  # `job.submitted`, `member.changed` …
    subject: str  # the id of a job or token, the name of a project or person
    project: str | None
    before: dict[str, Any] | None = None
    after: dict[str, Any] | None = None


@dataclass(frozen=True)
class Filter:
    """Filter of the audit log. Every given condition must hold."""

    person: str | None = None
    project: str | None = None
    action: str | None = None
    subject: str | None = None


def record(session: AsyncSession, caller: Principal, act: Act) -> None:
    """Add a line; it is there if, and only if, the session commits."""
    session.add(AuditRow(**act_values(caller, act)))


def act_values(caller: Principal, act: Act) -> dict[str, Any]:
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


async def page(
    session: AsyncSession, caller: Principal, wanted: Filter, before_seq: int | None, limit: int
) -> list[AuditRow]:
    """The newest lines older than `before_seq` that the caller may see: an admin all, a maintainer their projects'."""
    query = select(AuditRow).order_by(AuditRow.seq.desc()).limit(limit)
    if not caller.rules:
        maintained = [name for name in _named(caller) if (caller.role_in(name) or Role.VIEWER).covers(Role.MAINTAINER)]
        query = query.where(AuditRow.project.in_(maintained))
    for column, value in (
        (AuditRow.person, wanted.person),
        (AuditRow.project, wanted.project),
        (AuditRow.action, wanted.action),
        (AuditRow.subject, wanted.subject),
    ):
        if value is not None:
            query = query.where(column == value)
    if before_seq is not None:
        query = query.where(AuditRow.seq < before_seq)
    return list((await session.scalars(query)).all())


def _named(caller: Principal) -> set[str]:
    return {*caller.roles, *([caller.project] if caller.project else [])}
