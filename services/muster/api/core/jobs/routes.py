"""`/jobs`: list, get, annotate, delete, cancel, suspend, resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import StringConstraints
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.access import find_job
from muster.api.core.callers import Caller, reads, writes
from muster.api.core.errors import invalid_parameter
from muster.api.core.http.body import parsed, read_body
from muster.api.core.http.openapi import body, example_reply, problems
from muster.api.core.http.paging import cursor_of, seq_of
from muster.api.core.http.path_parts import NO_NUL, JobId
from muster.api.core.jobs import examples, removal, repository, service, tagging
from muster.api.core.jobs.repository import JobFilter
from muster.api.core.jobs.schemas import job_document, job_summary
from muster.api.core.services import ServicesDependency
from muster.api.core.waits.estimates import start_seconds
from muster.replies.jobs import Job, JobList
from muster.words.annotations import JobAnnotations
from muster.words.status import Phase
from muster.words.text import nearest

router = APIRouter(prefix="/jobs", tags=["jobs"])

# A word and not one of those we know: a newer operator may have phases that this API only mirrors.
PhaseName = Annotated[str, StringConstraints(pattern="^[A-Z][A-Za-z]{1,31}$")]


@router.get(
    "",
    response_model=JobList,
    dependencies=[reads],
    summary="List jobs",
    responses={
        200: example_reply(examples.JOB_LIST, "A page, newest first"),
        **problems("invalid_cursor", "invalid_parameter"),
    },
)
async def list_jobs(
    services: ServicesDependency,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=500, description="Jobs per page.")] = 50,
    cursor: Annotated[str | None, Query(max_length=200, description="`nextCursor` of the page before.")] = None,
    phase: Annotated[list[PhaseName] | None, Query(max_length=16, description="Any of these phases.")] = None,
    name: Annotated[str | None, Query(max_length=255, pattern=NO_NUL, description="Exactly this name.")] = None,
    namespace: Annotated[str | None, Query(max_length=255, pattern=NO_NUL)] = None,
    project: Annotated[str | None, Query(max_length=64, pattern=NO_NUL, description="Only of this project.")] = None,
    owner: Annotated[str | None, Query(max_length=64, pattern=NO_NUL, description="Only this person's.")] = None,
    label: Annotated[list[str] | None, Query(max_length=16, description="`key=value`; all of them must match.")] = None,
    live: Annotated[bool | None, Query(description="Only jobs that have not ended (true) or have (false).")] = None,
    tag: Annotated[str | None, Query(max_length=64, pattern=NO_NUL, description="Only jobs with this tag.")] = None,
) -> JSONResponse:
    """Returns the jobs of the projects that the caller may see, newest first. Filters can be combined. The cursor stays
    valid while jobs are added."""
    visible = caller.visible_projects
    chosen = JobFilter(tuple(phase or ()), name, namespace, _labels(label), live, project, owner, visible, tag=tag)
    before = seq_of(cursor) if cursor else None
    async with services.database.read() as session:
        await _refuse_unknown_phases(session, chosen.phases)
        rows = await repository.page(session, chosen, before, limit + 1)
    more = len(rows) > limit
    starts = await start_seconds(services, rows)
    items = [job_summary(row, starts.get(row.id)) for row in rows[:limit]]
    return JSONResponse({"items": items, "nextCursor": cursor_of(rows[limit - 1].seq) if more else None})


async def _refuse_unknown_phases(session: AsyncSession, phases: Sequence[str]) -> None:
    """A phase that nobody knows would be answered by an empty list. A newer operator's is known by the jobs in it."""
    unknown = set(phases) - set(Phase)
    if unknown and (unknown := unknown - await repository.phases_among(session, unknown)):
        word = min(unknown)
        raise invalid_parameter("query.phase", f"{word!r} is not one of {', '.join(Phase)}", nearest(word, Phase))


def _labels(given: list[str] | None) -> tuple[tuple[str, str], ...]:
    if any("\x00" in text for text in given or ()):
        raise invalid_parameter("query.label", "must not contain a NUL character")
    pairs = [text.partition("=") for text in given or ()]
    if any(not key or not equals for key, equals, _ in pairs):
        raise invalid_parameter("query.label", "must be key=value")
    return tuple((key, value) for key, _, value in pairs)


@router.get(
    "/{job_id}",
    response_model=Job,
    dependencies=[reads],
    summary="Get a job",
    responses={200: example_reply(examples.JOB, "The job"), **problems("job_not_found")},
)
async def get_job(services: ServicesDependency, caller: Caller, job_id: JobId) -> JSONResponse:
    """Returns a job: its spec with all defaults filled in, and its status. Only the job's owner sees the values of
    `runtime.env`."""
    return JSONResponse(job_document(await find_job(services, caller, job_id), services.prices, caller.person))


@router.patch(
    "/{job_id}",
    response_model=Job,
    dependencies=[writes],
    summary="Change a job's tags and note",
    responses={
        200: example_reply(examples.JOB, "Changed"),
        **problems(
            "job_not_found", "invalid_document", "unsupported_media_type", "body_too_large", "invalid_annotations"
        ),
    },
    openapi_extra=body(JobAnnotations, {"addTags": ["baseline"], "note": "the run of the paper's table 2"}),
)
async def annotate_job(request: Request, services: ServicesDependency, caller: Caller, job_id: JobId) -> JSONResponse:
    """Updates what people write at a job, also at one that has ended; nothing of how it runs changes. Fields that are
    left out change nothing."""
    change = await read_body(request, parsed(JobAnnotations, "invalid_annotations", tagging.WRONG))
    row = await tagging.annotate(services, caller, job_id, change)
    return JSONResponse(job_document(row, services.prices, caller.person))


@router.delete(
    "/{job_id}",
    status_code=204,
    response_class=Response,
    dependencies=[writes],
    summary="Delete a job",
    responses={
        204: {"description": "Its record and logs are gone"},
        **problems("job_not_found", "job_live", "job_needed", "job_leaving", "storage_unavailable"),
    },
)
async def delete_job(
    services: ServicesDependency,
    caller: Caller,
    job_id: JobId,
    checkpoints: Annotated[
        bool, Query(description="Its checkpoints too; refused while one is pinned or an unfinished job needs them.")
    ] = False,
) -> Response:
    """Deletes a job that has ended: its record, events, attempts and logs. Its checkpoints are kept unless
    `checkpoints` is set. The audit log records who deleted it."""
    await removal.remove(services, caller, job_id, checkpoints)
    return Response(status_code=204)


Verb = Literal["cancel", "suspend", "resume"]
_VERBS: dict[str, Any] = {"cancel": service.cancel, "suspend": service.suspend, "resume": service.resume}


def _add_verb(verb: Verb, summary: str, story: str) -> None:
    async def act(services: ServicesDependency, caller: Caller, job_id: JobId) -> JSONResponse:
        row = await _VERBS[verb](services, caller, job_id)
        return JSONResponse(job_document(row, services.prices, caller.person))

    router.post(
        f"/{{job_id}}:{verb}",
        response_model=Job,
        dependencies=[writes],
        summary=summary,
        description=story,
        operation_id=f"{verb}_job",
        responses={
            200: example_reply(examples.JOB, "The job, with the request in its spec"),
            **problems("job_not_found", *_CONFLICTS[verb]),
        },
    )(act)


_CONFLICTS = {
    "cancel": ("job_finished",),
    "suspend": ("job_finished", "job_cancelling"),
    "resume": ("job_finished", "job_cancelling"),
}
_add_verb(
    "cancel",
    "Cancel a job",
    "End the job and keep its record and checkpoints. Repeating it is harmless, also when the job is Cancelled "
    "already; a job that Succeeded or Failed answers 409 job_finished.",
)
_add_verb(
    "suspend",
    "Suspend a job",
    "Stop the gang at a checkpoint and release its nodes until the job is resumed. Repeating it is harmless.",
)
_add_verb("resume", "Resume a job", "Let a suspended job go on from its last checkpoint. Repeating it is harmless.")
