"""`/v1/fine_tuning/jobs`: create, list, retrieve, cancel, pause, resume, events, checkpoints."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from fastapi.responses import JSONResponse

from muster.api.core.callers import Caller, Scope, needs
from muster.api.core.errors import ApiError, invalid_parameter
from muster.api.core.events import repository as events
from muster.api.core.http.body import parsed, read_body
from muster.api.core.http.openapi import body, example_reply, problems
from muster.api.core.idempotency import IdempotencyKey, attempted, hash_of
from muster.api.core.jobs.repository import folder_of
from muster.api.core.services import Services, ServicesDependency
from muster.api.openai import fine_tunes
from muster.api.openai.fine_tunes import FineTune, FineTuneFilter
from muster.api.openai.fine_tuning import examples, service
from muster.api.openai.fine_tuning.replies import (
    CHECKPOINT_PREFIX,
    EVENT_PREFIX,
    FineTuningCheckpoint,
    FineTuningCheckpointList,
    FineTuningEventList,
    FineTuningJob,
    FineTuningJobList,
    checkpoint_reply,
    event_reply,
    job_reply,
)
from muster.api.openai.fine_tuning.requests import EXAMPLE, CreateFineTuningJob
from muster.api.openai.fine_tuning.retries import ROUTE, RepeatableRequest, RetryCount
from muster.api.openai.fine_tuning.service import Act
from muster.documents.document import Document
from muster.storage.errors import StorageError
from muster.words.base import UserError

router = APIRouter(prefix="/fine_tuning/jobs", tags=["openai"])
reads, writes = Depends(needs(Scope.READ)), Depends(needs(Scope.WRITE))

_NO_NUL = r"^[^\x00]*$"
FineTuneId = Annotated[
    str,
    Path(description="`ftjob-…`", min_length=1, max_length=80, pattern=_NO_NUL),
]
After = Annotated[str | None, Query(max_length=120, pattern=_NO_NUL, description="The last id of the page before.")]
ProjectHeader = Annotated[
    str | None,
    Header(
        alias="OpenAI-Project",
        max_length=64,
        pattern=r"^[\x21-\x7e]*$",
        description="The project; left out, the token's own.",
    ),
]
_METADATA = re.compile(r"metadata\[(.{1,64})\]", re.DOTALL)


def _check(document: Document) -> tuple[Any, CreateFineTuningJob]:
    return document.data, parsed(CreateFineTuningJob, "invalid_request", "The request is not valid")(document)


@router.post(
    "",
    response_model=FineTuningJob,
    dependencies=[writes],
    summary="Create a fine-tuning job",
    responses={
        200: example_reply(examples.JOB, "Stored, or found where this is a retry"),
        **problems(
            "invalid_document",
            "invalid_request",
            "model_not_found",
            "project_not_found",
            "queue_full",
            "body_too_large",
            "unsupported_media_type",
            "idempotency_key_reused",
        ),
    },
    openapi_extra=body(CreateFineTuningJob, EXAMPLE),
)
async def create_fine_tuning_job(
    request: Request,
    services: ServicesDependency,
    caller: Caller,
    key: IdempotencyKey,
    retries: RetryCount = 0,
    project: ProjectHeader = None,
) -> JSONResponse:
    """Creates a job that fine-tunes a mapped model, or one that was fine-tuned from it. A retry by OpenAI's client
    returns the job that its first attempt created, and so does every request with the same Idempotency-Key."""
    document, asked = await read_body(request, _check)
    again = attempted(key, ROUTE, document, project)
    repeatable = RepeatableRequest(caller, hash_of(document, project), retries > 0)
    tune = await service.create(services, caller, service.FineTuneRequest(asked, project or None, again, repeatable))
    return JSONResponse(_job(tune))


@router.get(
    "",
    response_model=FineTuningJobList,
    dependencies=[reads],
    summary="List fine-tuning jobs",
    responses={200: example_reply(examples.JOB_LIST, "A page, newest first"), **problems("project_not_found")},
)
async def list_fine_tuning_jobs(
    request: Request,
    services: ServicesDependency,
    caller: Caller,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    metadata: Annotated[
        str | None, Query(pattern="^(null)?$", description="`metadata[key]=value` filters; `null`: jobs without any.")
    ] = None,
    project: ProjectHeader = None,
) -> JSONResponse:
    """Returns the fine-tuning jobs that were created through this API, of the projects that the caller may see."""
    asked = ((_METADATA.fullmatch(name), value) for name, value in request.query_params.items())
    pairs = {named[1]: value for named, value in asked if named is not None}
    if any("\x00" in text for pair in pairs.items() for text in pair):
        raise invalid_parameter("query.metadata", "must not contain a NUL character")
    if metadata is not None and pairs:
        raise invalid_parameter("query.metadata", "is either null or pairs, metadata[key]=value")
    chosen = FineTuneFilter(caller.visible_projects, project or None, None if metadata is not None else pairs)
    async with services.database.read() as session:
        tunes = await fine_tunes.page(session, chosen, _uid(after), limit + 1)
    if tunes is None:
        raise invalid_parameter("query.after", "is the id of no fine-tuning job; send the last id of the page before")
    data = [_job(each) for each in tunes[:limit]]
    return JSONResponse({"object": "list", "data": data, "has_more": len(tunes) > limit})


@router.get(
    "/{fine_tuning_job_id}",
    response_model=FineTuningJob,
    dependencies=[reads],
    summary="Retrieve a fine-tuning job",
    operation_id="get_fine_tuning_job",
    responses={200: example_reply(examples.JOB, "The job"), **problems("job_not_found")},
)
async def get_fine_tuning_job(
    services: ServicesDependency, caller: Caller, fine_tuning_job_id: FineTuneId
) -> JSONResponse:
    """Returns a fine-tuning job. Its status stays `running` while its gang restarts; `x_restarts` and the events report
    that."""
    return JSONResponse(_job(await service.find(services, caller, fine_tuning_job_id)))


def _add_act(what: Act, summary: str, story: str, *conflicts: str) -> None:
    async def act(services: ServicesDependency, caller: Caller, fine_tuning_job_id: FineTuneId) -> JSONResponse:
        return JSONResponse(_job(await service.act(services, caller, fine_tuning_job_id, what)))

    router.post(
        f"/{{fine_tuning_job_id}}/{what}",
        response_model=FineTuningJob,
        dependencies=[writes],
        summary=summary,
        description=story,
        operation_id=f"{what}_fine_tuning_job",
        responses={200: example_reply(examples.JOB, "The job as it is now"), **problems("job_not_found", *conflicts)},
    )(act)


_add_act(
    "cancel",
    "Cancel a fine-tuning job",
    "End the job and keep its checkpoints. Its status is `cancelled` when its gang has gone. Repeating it is harmless.",
    "job_finished",
)
_add_act(
    "pause",
    "Pause a fine-tuning job",
    "Stop the gang at a checkpoint and release its nodes. Its status is `paused` when its gang has gone.",
    "job_finished",
    "job_cancelling",
)
_add_act(
    "resume",
    "Resume a fine-tuning job",
    "Let a paused job go on from its last checkpoint. Repeating it is harmless.",
    "job_finished",
    "job_cancelling",
)


@router.get(
    "/{fine_tuning_job_id}/events",
    response_model=FineTuningEventList,
    dependencies=[reads],
    summary="List a fine-tuning job's events",
    responses={200: example_reply(examples.EVENT_LIST, "A page, newest first"), **problems("job_not_found")},
)
async def list_fine_tuning_events(
    services: ServicesDependency,
    caller: Caller,
    fine_tuning_job_id: FineTuneId,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> JSONResponse:
    """Returns the events of a fine-tuning job, newest first. Evaluations have the type `metrics`."""
    tune = await service.find(services, caller, fine_tuning_job_id)
    before = _number(after, f"{EVENT_PREFIX}{tune.job.id}-", "an event")
    async with services.database.read() as session:
        rows = await events.before(session, tune.job.id, before, limit + 1)
    data = [event_reply(row).model_dump(mode="json") for row in rows[:limit]]
    return JSONResponse({"object": "list", "data": data, "has_more": len(rows) > limit})


@router.get(
    "/{fine_tuning_job_id}/checkpoints",
    response_model=FineTuningCheckpointList,
    dependencies=[reads],
    summary="List a fine-tuning job's checkpoints",
    responses={
        200: example_reply(examples.CHECKPOINT_LIST, "A page, newest first"),
        **problems("job_not_found", "storage_unavailable"),
    },
)
async def list_fine_tuning_checkpoints(
    services: ServicesDependency,
    caller: Caller,
    fine_tuning_job_id: FineTuneId,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 10,
) -> JSONResponse:
    """Returns the checkpoints in the job's folder, newest first. Each can be used as a model by its own name."""
    tune = await service.find(services, caller, fine_tuning_job_id)
    before = _number(after, f"{CHECKPOINT_PREFIX}{tune.job.id}-", "a checkpoint")
    rows = [row for row in await _checkpoints(services, tune) if before is None or row.step_number < before]
    data = [row.model_dump(mode="json", exclude_none=True) for row in rows[:limit]]
    first, last = (rows[0].id, rows[:limit][-1].id) if rows else (None, None)
    page = {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(rows) > limit}
    return JSONResponse(page)


async def _checkpoints(services: Services, tune: FineTune) -> list[FineTuningCheckpoint]:
    folder = folder_of(tune.job)
    if folder is None:
        return []
    try:
        commits = await services.folders.run(folder, services.commits.read, folder)
    except (StorageError, UserError) as error:
        raise ApiError("storage_unavailable", str(error), headers={"Retry-After": "5"}) from error
    return [checkpoint_reply(tune, commit) for commit in reversed(commits)]


def _job(tune: FineTune) -> dict[str, Any]:
    return job_reply(tune).model_dump(mode="json")


def _uid(after: str | None) -> str | None:
    return after.removeprefix("ftjob-") if after is not None else None


def _number(after: str | None, prefix: str, what: str) -> int | None:
    """The number at the end of an id of this job's. Raises ApiError invalid_parameter."""
    if after is None:
        return None
    number = after.removeprefix(prefix)
    if after.startswith(prefix) and number.isascii() and number.isdigit() and len(number) < 19:
        return int(number)
    raise invalid_parameter("query.after", f"is not the id of {what} of this job; send the last id of the page before")
