"""`/jobs/{id}/profiles`: traces of a running job's steps, asked for and fetched."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import StreamingResponse

from muster.api.core.access import find_job
from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Caller, reads, writes
from muster.api.core.database.tables import JobRow
from muster.api.core.errors import ApiError, invalid_parameter
from muster.api.core.http.body import parsed, read_body
from muster.api.core.http.openapi import AT, UID, body, example_reply, problems
from muster.api.core.http.path_parts import JobId
from muster.api.core.http.ranges import ranged
from muster.api.core.jobs.repository import folder_of
from muster.api.core.profiles.folder import find_artefact, read_profiles, read_request, still_asked
from muster.api.core.services import Services, ServicesDependency
from muster.storage.errors import StorageError
from muster.storage.store import Store, StoredObject
from muster.words.address import StorageAddress
from muster.words.base import UserError, dump_json
from muster.words.gang import ranks_per_node
from muster.words.profiles import REQUEST_KEY, ProfileOrder, ProfileRequest, ProfilesReply
from muster.words.status import Phase
from muster.words.times import rfc3339

router = APIRouter(prefix="/jobs", tags=["jobs"])

BLOCK_BYTES = 1 << 20

_REQUEST: dict[str, Any] = {
    "id": "0193d0a4c2f17b6e8a5b0f3c9d2e4a61",
    "attempt": 2,
    "steps": 5,
    "ranks": [0],
    "at": rfc3339(AT),
}
_EXAMPLE: dict[str, Any] = {
    "uri": f"file:///var/lib/muster/checkpoints/{UID}/profiles",
    "items": [
        {
            **_REQUEST,
            "step": 121,
            "name": "attempt-2-step-00000121",
            "done": [
                {
                    "rank": 0,
                    "steps": 5,
                    "files": [
                        {"name": "rank-0.trace.json.gz", "bytes": 1_482_310},
                        {"name": "rank-0.memory.pickle", "bytes": 9_300_112},
                    ],
                    "fault": "",
                }
            ],
            "complete": True,
        }
    ],
    "asked": _REQUEST,
}
_BYTES = {"schema": {"type": "string", "format": "binary"}, "example": "(a trace)"}


@router.get(
    "/{job_id}/profiles",
    dependencies=[reads],
    summary="List a job's profiles",
    responses={
        200: example_reply(_EXAMPLE, "Profiles, by attempt and step"),
        **problems("job_not_found", "storage_unavailable"),
    },
)
async def list_profiles(services: ServicesDependency, caller: Caller, job_id: JobId) -> ProfilesReply:
    """Returns the newest twenty profiles in the job's checkpoint folder, and the last request."""
    folder = folder_of(await find_job(services, caller, job_id))
    if folder is None:
        return ProfilesReply(uri=None, items=(), asked=None)
    profiles: ProfilesReply = await _in_store(services, folder, lambda store: _list(store, folder))
    return profiles


@router.post(
    "/{job_id}/profiles",
    status_code=202,
    dependencies=[writes],
    summary="Trace a running job's next steps",
    operation_id="request_profile",
    responses={
        202: example_reply(_REQUEST, "It is asked for"),
        **problems(
            "job_not_found", "job_not_running", "job_finished", "profile_under_way", "storage_unavailable",
            "invalid_parameter", "invalid_document", "body_too_large", "unsupported_media_type",
        ),
    },
    openapi_extra=body(ProfileOrder, {"steps": 5, "ranks": [0]}, required=False),
)  # fmt: skip
async def request_profile(
    request: Request, services: ServicesDependency, caller: Caller, job_id: JobId
) -> ProfileRequest:
    """Requests a profile. Each named rank records its operators, kernels and memory for the given number of steps while
    training continues. The trainer checks for a request every five seconds; `GET` of the same address shows its result
    under its `id`."""
    order = await read_body(
        request, parsed(ProfileOrder, "invalid_parameter", "The request is not valid"), optional=True
    )
    row = await find_job(services, caller, job_id, act=True)
    folder, attempt = _place(row, order)
    asked = ProfileRequest(id=uuid.uuid4().hex, attempt=attempt, steps=order.steps, ranks=order.ranks, at=time.time())
    await _in_store(services, folder, lambda store: _ask(store, asked))
    async with services.database.write() as session:
        after = {"steps": order.steps, "ranks": list(order.ranks)}
        record(session, caller, AuditedAct("profile.asked", row.id, row.project, after=after))
    return asked


@router.get(
    "/{job_id}/profiles/{profile}/{file}",
    dependencies=[reads],
    summary="Fetch a file of a profile",
    operation_id="fetch_profile",
    response_class=StreamingResponse,
    responses={
        200: {"description": "The file", "content": {"application/octet-stream": _BYTES}},
        206: {"description": "The part that `Range` asks for", "content": {"application/octet-stream": _BYTES}},
        **problems("job_not_found", "profile_not_found", "storage_unavailable", "range_unsatisfiable"),
    },
)
async def fetch_profile(
    request: Request,
    services: ServicesDependency,
    caller: Caller,
    job_id: JobId,
    profile: Annotated[str, Path(max_length=64, description="The profile's `name`.")],
    file: Annotated[str, Path(max_length=64, description="The name of one of its files.")],
) -> StreamingResponse:
    """Returns a file of a profile. Open a trace with Perfetto (ui.perfetto.dev) or chrome://tracing, and a snapshot of
    a GPU's memory with pytorch.org/memory_viz. The files were written by the job's own processes: do not open a
    `pickle` of a job that you would not run."""
    folder = folder_of(await find_job(services, caller, job_id))
    if folder is None:
        raise _no_file(profile, file)
    entry = await _in_store(services, folder, lambda store: find_artefact(store, profile, file))
    if entry is None:
        raise _no_file(profile, file)

    async def read(start: int, stop: int) -> AsyncIterator[bytes]:
        return _blocks(services, folder, entry, start, stop)

    return await ranged(request, read, entry.bytes, entry.tag.strip('"'), f"{profile}-{file}")


def _place(row: JobRow, order: ProfileOrder) -> tuple[StorageAddress, int]:
    """Return the checkpoint folder and the number of the running attempt, which looks for requests there. Raises
    ApiError."""
    if not row.live:
        detail = f"Job {row.name!r} is {row.phase}: only steps that are yet to come can be traced."
        raise ApiError("job_finished", detail, extra={"jobId": row.id, "phase": row.phase})
    folder, attempt = folder_of(row), int(row.status.get("attempt") or 0)
    if row.phase != Phase.RUNNING or folder is None or attempt == 0:
        detail = f"Job {row.name!r} is {row.phase}: {row.status.get('because') or 'it has not begun'}."
        raise ApiError("job_not_running", detail, extra={"jobId": row.id, "phase": row.phase})
    nodes = (row.status.get("gang") or {}).get("wanted") or 1
    ranks = nodes * ranks_per_node(row.spec)
    if order.ranks[-1] >= ranks:
        raise invalid_parameter("ranks", f"there is no rank {order.ranks[-1]}: the gang has {ranks}, numbered from 0")
    return folder, attempt


def _list(store: Store, folder: StorageAddress) -> ProfilesReply:
    return ProfilesReply(
        uri=str(folder.child("profiles")), items=tuple(read_profiles(store)), asked=read_request(store)
    )


def _ask(store: Store, asked: ProfileRequest) -> None:
    before = read_request(store)
    if before is not None and still_asked(store, before, asked):
        detail = f"A profile of {before.steps} steps was asked for and is not complete (request {before.id})."
        raise ApiError("profile_under_way", detail, headers={"Retry-After": "5"})
    store.replace(REQUEST_KEY, dump_json(asked).encode())


async def _in_store(services: Services, folder: StorageAddress, look: Any) -> Any:
    """Return the result of `look`, called in a thread. Raises ApiError storage_unavailable."""
    try:
        return await services.folders.run(folder, look, services.commits.store(folder))
    except (StorageError, UserError) as error:
        raise ApiError("storage_unavailable", str(error), headers={"Retry-After": "5"}) from error


async def _blocks(
    services: Services, folder: StorageAddress, entry: StoredObject, start: int, stop: int
) -> AsyncIterator[bytes]:
    store = services.commits.store(folder)
    for at in range(start, stop, BLOCK_BYTES):
        into = bytearray(min(BLOCK_BYTES, stop - at))
        await services.folders.run(folder, store.read_into, entry.key, at, memoryview(into), entry.tag)
        yield bytes(into)


def _no_file(profile: str, file: str) -> ApiError:
    return ApiError("profile_not_found", f"The job has no file {file!r} of a profile {profile!r}.")
