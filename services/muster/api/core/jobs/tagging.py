"""`PATCH /jobs/{id}`: a job's tags and note, which the cluster never sees."""

from __future__ import annotations

import time

from sqlalchemy import delete, insert

from muster.api.core.access import checked
from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Principal
from muster.api.core.database.tables import JobRow, JobTagRow
from muster.api.core.errors import ApiError
from muster.api.core.jobs import repository
from muster.api.core.services import Services
from muster.words.annotations import TAGS_MAX, JobAnnotations

WRONG = "The tags or the note are not valid"


async def annotate(services: Services, caller: Principal, job_id: str, change: JobAnnotations) -> JobRow:
    """Change the tags and the note of a job, also of one that has ended. Raises ApiError job_not_found, forbidden, and
    invalid_annotations for too many tags."""
    async with services.database.write() as session:
        row = checked(caller, await repository.get(session, job_id, lock=True), job_id, act=True)
        before = {"tags": row.tags.split(), "note": row.note}
        kept = set(row.tags.split() if change.tags is None else change.tags)
        tags = sorted((kept | {*change.add_tags}) - {*change.remove_tags})
        if len(tags) > TAGS_MAX:
            detail = f"Job {row.name!r} would have {len(tags)} tags, and may have {TAGS_MAX}: remove some of them."
            raise ApiError("invalid_annotations", detail)
        note = row.note if change.note is None else change.note.strip()
        if before == {"tags": tags, "note": note}:
            return row
        row.tags, row.note, row.noted_at = " ".join(tags), note, time.time()
        await session.execute(delete(JobTagRow).where(JobTagRow.job_seq == row.seq))
        if tags:
            await session.execute(insert(JobTagRow), [{"job_seq": row.seq, "tag": tag} for tag in tags])
        after = {"tags": tags, "note": note}
        record(session, caller, AuditedAct("job.annotated", row.id, row.project, before, after))
    services.hub.tell(job_id)
    return row
