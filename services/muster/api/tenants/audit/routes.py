"""`/audit`: read by admins, and by maintainers what concerns their projects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.callers import Caller, Principal, Scope, needs
from muster.api.core.database.tables import AuditRow
from muster.api.core.http.openapi import example_reply, problems
from muster.api.core.http.paging import cursor_of, seq_of
from muster.api.core.http.path_parts import NO_NUL
from muster.api.core.http.reply import Reply, reply_of
from muster.api.core.roles import Role
from muster.api.core.services import ServicesDependency
from muster.words.base import Time
from muster.words.times import rfc3339

router = APIRouter(prefix="/audit", tags=["audit"])
Word = Annotated[str | None, Query(max_length=128, pattern=NO_NUL)]


class AuditLine(Reply):
    """`address` is the peer's, as the API saw it: behind a proxy, the proxy's. `token` is the id of the one used."""

    id: int
    at: Time
    person: str
    token: str
    address: str
    action: str
    subject: str
    project: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class AuditPage(Reply):
    """`next_cursor` asks for the next page; it is null on the last."""

    items: list[AuditLine]
    next_cursor: str | None


_EXAMPLE: dict[str, Any] = {
    "id": 17,
    "at": rfc3339(1_795_000_000.0),
    "person": "ann",
    "token": "0c2c31c1-96f9-4f3c-8a39-5b2f9a0f4d11",
    "address": "10.0.3.7",
    "action": "member.changed",
    "subject": "bob",
    "project": "nlp",
    "before": {"role": "viewer"},
    "after": {"role": "member"},
}


@dataclass(frozen=True)
class AuditFilter:
    """Filter of the audit log. Every given condition must hold."""

    person: str | None = None
    project: str | None = None
    action: str | None = None
    subject: str | None = None


@router.get(
    "",
    dependencies=[Depends(needs(Scope.ADMIN))],
    summary="Read the audit",
    responses={
        200: example_reply({"items": [_EXAMPLE], "nextCursor": None}, "A page, newest first"),
        **problems("invalid_cursor"),
    },
)
async def read_audit(
    services: ServicesDependency,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=1000, description="Lines per page.")] = 100,
    cursor: Annotated[str | None, Query(max_length=200, description="`nextCursor` of the page before.")] = None,
    person: Word = None,
    project: Word = None,
    action: Word = None,
    subject: Word = None,
) -> AuditPage:
    """Returns the audit log, newest first: who changed what, from which address, with the values before and after.
    Admins see every entry, and maintainers see the entries of their projects."""
    chosen, before = AuditFilter(person, project, action, subject), seq_of(cursor) if cursor else None
    async with services.database.read() as session:
        rows = await _page(session, caller, chosen, before, limit + 1)
    items = [reply_of(AuditLine, row, id=row.seq) for row in rows[:limit]]
    return AuditPage(items=items, next_cursor=cursor_of(rows[limit - 1].seq) if len(rows) > limit else None)


async def _page(
    session: AsyncSession, caller: Principal, chosen: AuditFilter, before_seq: int | None, limit: int
) -> list[AuditRow]:
    """The newest lines older than `before_seq` that the caller may see: an admin all, a maintainer their projects'."""
    query = select(AuditRow).order_by(AuditRow.seq.desc()).limit(limit)
    if not caller.rules:
        maintained = [name for name in _named(caller) if (caller.role_in(name) or Role.VIEWER).covers(Role.MAINTAINER)]
        query = query.where(AuditRow.project.in_(maintained))
    for column, value in (
        (AuditRow.person, chosen.person),
        (AuditRow.project, chosen.project),
        (AuditRow.action, chosen.action),
        (AuditRow.subject, chosen.subject),
    ):
        if value is not None:
            query = query.where(column == value)
    if before_seq is not None:
        query = query.where(AuditRow.seq < before_seq)
    return list((await session.scalars(query)).all())


def _named(caller: Principal) -> set[str]:
    return {*caller.roles, *([caller.project] if caller.project else [])}
