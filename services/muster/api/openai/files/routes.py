"""`/v1/files`: create, list, retrieve, content, delete."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import StreamingResponse

from muster.api.core.access import project_role
from muster.api.core.callers import Caller, Scope, needs
from muster.api.core.errors import invalid_parameter
from muster.api.core.http.openapi import AT, example_reply, problems
from muster.api.core.http.ranges import ranged
from muster.api.core.roles import Role
from muster.api.core.services import ServicesDependency
from muster.api.data.files import service as files
from muster.api.data.files.repository import FileFilter
from muster.api.openai.files import service
from muster.api.openai.files.form import FileForm
from muster.api.openai.files.replies import DeletedFile, FileObject, FileObjectList, file_reply
from muster.api.openai.files.requests import FORM_SCHEMA
from muster.api.openai.fine_tuning.retries import RetryCount
from muster.api.openai.fine_tuning.routes import After, ProjectHeader
from muster.replies.files import Purpose

router = APIRouter(prefix="/files", tags=["openai"])
reads, writes = Depends(needs(Scope.READ)), Depends(needs(Scope.WRITE))

FileId = Annotated[str, Path(description="`file-…`", min_length=1, max_length=64, pattern=r"^[^\x00]*$")]
EXAMPLE: dict[str, Any] = {
    "id": "file-0a1b2c3d4e5f6g7h8i9j0k1l",
    "object": "file",
    "bytes": 7_340_032,
    "created_at": int(AT),
    "expires_at": None,
    "filename": "chat.jsonl",
    "purpose": "fine-tune",
    "status": "processed",
    "status_details": None,
    "x_format": "openai-chat",
    "x_samples": 4_800,
    "x_tokens_estimated": 1_650_000,
}
REFUSED = (
    "invalid_request",
    "invalid_document",
    "project_not_found",
    "file_too_large",
    "files_unavailable",
    "body_too_slow",
    "unsupported_media_type",
)
_LIST = {"object": "list", "data": [EXAMPLE], "first_id": EXAMPLE["id"], "last_id": EXAMPLE["id"], "has_more": False}
_BYTES = {"schema": {"type": "string", "format": "binary"}, "example": '{"messages": […]}\n'}


def form_body(schema: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    """A multipart body that the route reads by itself."""
    content = {"multipart/form-data": {"schema": schema, "example": example}}
    return {"requestBody": {"required": True, "content": content}}


def length_of(request: Request) -> int | None:
    """Return the length of the body, or None if it is sent without an announced length."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() else None


@router.post(
    "",
    dependencies=[writes],
    summary="Upload a file",
    operation_id="create_openai_file",
    responses={200: example_reply(EXAMPLE, "It has arrived, and is read through"), **problems(*REFUSED)},
    openapi_extra=form_body(FORM_SCHEMA, {"purpose": "fine-tune", "file": '{"messages": […]}\n'}),
)
async def create_openai_file(
    request: Request,
    services: ServicesDependency,
    caller: Caller,
    retries: RetryCount = 0,
    project: ProjectHeader = None,
) -> FileObject:
    """Uploads a file, which is stored whole or not at all. Data files are checked afterwards: the status becomes
    `processed`, or `error` with the first bad line. A retry by OpenAI's client returns the file that its first attempt
    created."""
    form = FileForm(request, "file")
    row = await service.create_file(services, caller, project or None, form, length_of(request), retries > 0)
    return file_reply(row)


@router.get(
    "",
    dependencies=[reads],
    summary="List files",
    operation_id="list_openai_files",
    responses={200: example_reply(_LIST, "A page"), **problems("project_not_found")},
)
async def list_openai_files(
    services: ServicesDependency,
    caller: Caller,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Annotated[Literal["asc", "desc"], Query(description="By the time of creation.")] = "desc",
    purpose: Annotated[Purpose | None, Query(description="Only for this.")] = None,
    project: ProjectHeader = None,
) -> FileObjectList:
    """Returns the completely uploaded files of the projects that the caller may see, newest first by default."""
    if project:
        project_role(caller, project, Role.VIEWER)
    chosen = FileFilter(project or None, purpose, arrived=True, visible=caller.visible_projects)
    rows = await service.list_files(services, caller, chosen, after, limit + 1, order == "asc")
    if rows is None:
        raise invalid_parameter("query.after", "is the id of no file; send the last id of the page before")
    data = [file_reply(row) for row in rows[:limit]]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return FileObjectList(data=data, first_id=first, last_id=last, has_more=len(rows) > limit)


@router.get(
    "/{file_id}",
    dependencies=[reads],
    summary="Retrieve a file",
    operation_id="get_openai_file",
    responses={200: example_reply(EXAMPLE, "The file"), **problems("file_not_found")},
)
async def get_openai_file(services: ServicesDependency, caller: Caller, file_id: FileId) -> FileObject:
    """Returns a file: whether it has been checked, and what is wrong with it."""
    return file_reply(await files.find(services, caller, file_id))


@router.get(
    "/{file_id}/content",
    response_class=StreamingResponse,
    dependencies=[reads],
    summary="Retrieve a file's content",
    operation_id="read_openai_file",
    responses={
        200: {"description": "Its bytes", "content": {"application/octet-stream": _BYTES}},
        206: {"description": "The part that `Range` asks for", "content": {"application/octet-stream": _BYTES}},
        **problems("file_not_found", "file_unfit", "files_unavailable", "range_unsatisfiable"),
    },
)
async def read_openai_file(
    request: Request, services: ServicesDependency, caller: Caller, file_id: FileId
) -> StreamingResponse:
    """Returns the content of a file as it was uploaded."""
    row = await files.find(services, caller, file_id)

    async def read(start: int, stop: int) -> AsyncIterator[bytes]:
        return await files.content(services, row, start, stop)

    return await ranged(request, read, row.bytes, row.sha256 or row.id, row.name)


@router.delete(
    "/{file_id}",
    dependencies=[writes],
    summary="Delete a file",
    operation_id="delete_openai_file",
    responses={
        200: example_reply({"id": EXAMPLE["id"], "object": "file", "deleted": True}, "It is gone"),
        **problems("file_not_found", "file_in_use", "files_unavailable"),
    },
)
async def delete_openai_file(services: ServicesDependency, caller: Caller, file_id: FileId) -> DeletedFile:
    """Deletes a file. The request is refused while a job that has not ended reads the file."""
    await files.remove(services, caller, file_id)
    return DeletedFile(id=file_id)
