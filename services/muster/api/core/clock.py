"""The time that processes which share a database agree on, also where one's own clock is wrong: the database's."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Double, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession


def now_in(session: AsyncSession) -> Any:
    """Return the seconds since the epoch, as part of a statement: when it began. SQLite has this machine's clock."""
    if session.get_bind().dialect.name != "postgresql":
        return time.time()
    return cast(func.extract("epoch", func.statement_timestamp()), Double)


async def clock(session: AsyncSession) -> float:
    """Return the seconds since the epoch, now."""
    now = now_in(session)
    return now if isinstance(now, float) else float((await session.execute(select(now))).scalar_one())
