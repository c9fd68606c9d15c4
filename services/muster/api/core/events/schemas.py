"""Events as REST shows them."""

from __future__ import annotations

from muster.api.core.database.tables import EventRow
from muster.contract.replies import Event
from muster.contract.views import with_times


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
