"""Events as REST shows them."""

from __future__ import annotations

from typing import Any

from muster.api.reply import Reply
from muster.api.tables import EventRow
from muster.contract.base import Time
from muster.contract.views import with_times


class Event(Reply):
    """Something that happened to a job. Its `id` counts 1, 2, 3 … within the job."""

    id: int
    job_id: str
    type: str
    at: Time
    attempt: int | None
    message: str
    data: dict[str, Any]


class EventList(Reply):
    """Send `last_id` as `after` for the next ones."""

    items: list[Event]
    last_id: int


def event_of(row: EventRow) -> Event:
    return Event(
        id=row.number,
        job_id=row.job_id,
        type=row.type,
        at=row.at,
        attempt=row.attempt,
        message=row.body["message"],
        data=with_times(row.body["data"]),
    )
