"""`/files`: data that jobs read, uploaded by one request or, resumably, by tus 1.0."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from starlette.responses import StreamingResponse

from muster.api.core.access import project_role
from muster.api.core.callers import Caller, Scope, needs
from muster.api.core.database.tables import FileRow
from muster.api.core.errors import ApiError
from muster.api.core.http.openapi import example_reply, problems
from muster.api.core.http.paging import cursor_of, seq_of
from muster.api.core.http.ranges import ranged
from muster.api.core.http.reply import reply_of
from muster.api.core.roles import Role
from muster.api.core.services import ServicesDependency
from muster.api.data.files import service, tus
from muster.api.data.files.repository import FileFilter
from muster.api.data.files.service import NewFile
from muster.api.data.files.staging import CHECKSUMS
from muster.replies.files import File, FileList, FileStatus, Purpose
from muster.words.times import rfc3339

router = APIRouter(prefix="/files", tags=["files"])
reads, writes = Depends(needs(Scope.READ)), Depends(needs(Scope.WRITE))

NO_NUL = r"^[^\x00]*$"  # PostgreSQL has no such text
FileId = Annotated[str, Path(description="The file's id.", min_length=1, max_length=64, pattern=NO_NUL)]
TusResumable = Annotated[str | None, Header(description="`1.0.0`, for an upload by tus.")]
_AT = 1_795_000_000.0
_EXAMPLE: dict[str, Any] = {
    "id": "file-0a1b2c3d4e5f6g7h8i9j0k1l",
    "project": "nlp",
    "owner": "ann",
    "name": "chat.jsonl",
    "purpose": "fine-tune",
    "status": "ready",
    "bytes": 7_340_032,
    "received": 7_340_032,
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "fault": None,
    "format": "openai-chat",
    "samples": 4_800,
    "uncompressedBytes": 7_340_032,
    "tokensEstimated": 1_650_000,
    "unchecked": None,
    "createdAt": rfc3339(_AT),
    "expiresAt": None,
}
_BEGINS = ("project_not_found", "file_too_large", "no_space", "files_unavailable", "body_too_slow")
_SENDS = ("checksum_mismatch", "upload_conflict", "upload_busy", "unsupported_media_type", "upload_protocol")
_BYTES = {"schema": {"type": "string", "format": "binary"}, "example": '{"messages": […]}\n'}


@router.options(
    "",
    status_code=204,
    response_class=Response,
    dependencies=[reads],
    summary="Ask what uploads may be",
    responses={204: {"description": "Tus-Version, Tus-Extension, Tus-Max-Size, Tus-Checksum-Algorithm"}, **problems()},
)
async def describe_uploads(services: ServicesDependency) -> Response:
    """Describes the supported parts of the tus protocol, in headers."""
    headers = {
        "Tus-Resumable": tus.VERSION,
        "Tus-Version": tus.VERSION,
        "Tus-Extension": tus.EXTENSIONS,
        "Tus-Max-Size": str(services.settings.file_bytes_max),
        "Tus-Checksum-Algorithm": ",".join(CHECKSUMS),
    }
    return Response(status_code=204, headers=headers)


@router.post(
    "",
    status_code=201,
    dependencies=[writes],
    summary="Upload a file, or begin to",
    responses={
        201: example_reply(_EXAMPLE, "Its bytes have arrived, or can be sent now"),
        **problems(*_BEGINS, *_SENDS),
    },
    openapi_extra={
        "requestBody": {
            "required": False,
            "description": "The file itself.",
            "content": {"application/octet-stream": _BYTES},
        }
    },
)
async def upload_file(
    request: Request,
    response: Response,
    services: ServicesDependency,
    caller: Caller,
    name: Annotated[str, Query(max_length=1_000, description="The file's name; its ending tells the format.")] = "",
    purpose: Annotated[str, Query(max_length=100, description=f"One of {', '.join(Purpose)}.")] = "",
    project: Annotated[str, Query(max_length=64, pattern=NO_NUL, description="Left out: the caller's own.")] = "",
    sha256: Annotated[str, Query(max_length=100, description="In hex: what arrives is compared with it.")] = "",
    lifetime_seconds: Annotated[
        str, Query(alias="lifetimeSeconds", max_length=20, description="It is deleted so long after it is ready.")
    ] = "",
    tus_resumable: TusResumable = None,
    upload_length: Annotated[str | None, Header(description="tus: the whole file's bytes.")] = None,
    upload_metadata: Annotated[str | None, Header(description="tus: filename, purpose, project, in Base64.")] = None,
    upload_checksum: Annotated[str | None, Header(description="tus: an algorithm and a digest in Base64.")] = None,
) -> File:
    """Uploads a file. The body is the file and the query describes it; the upload is complete when the response
    arrives. Data files are checked afterwards: their status is `checking`, then `ready`, or `failed` with the first bad
    line. With `Tus-Resumable`, the headers describe the file and the body is empty or holds its first part; continue
    with HEAD and PATCH requests to the `Location` of the response until all bytes have arrived."""
    chunks = _chunks(request)
    if request.headers.get("content-type", "").lower().startswith("multipart/"):
        raise ApiError(
            "unsupported_media_type",
            "The body is the file itself, not a form that holds it: send its bytes (curl --data-binary @FILE, in place "
            "of -F file=@FILE). The OpenAI routes, /v1/files, take forms.",
        )
    if tus_resumable is None:
        new = NewFile(
            project=project or caller.home,
            name=name,
            purpose=purpose,
            bytes=_length(request),
            sha256=sha256.lower() or None,
            lifetime_seconds=tus.lifetime(lifetime_seconds),
        )
        row = await service.save(services, caller, new, chunks)
        response.headers["Location"] = f"/api/v1/files/{row.id}"
        return file_reply(row)
    tus.must_speak(tus_resumable)
    checksum = tus.checksum_of(upload_checksum)
    row = await service.create(
        services, caller, tus.new_file(tus.announced(upload_length, upload_metadata), caller.home)
    )
    if request.headers.get("content-type", "").lower() == tus.MEDIA_TYPE:
        row = await service.append(services, caller, row.id, 0, chunks, checksum)
    have = service.received(services, row) or 0
    response.headers.update({"Location": f"/api/v1/files/{row.id}", **tus.headers_of(row, have)})
    return file_reply(row, have)


def _length(request: Request) -> int | None:
    """Return the length of the body, or None if it is sent without an announced length."""
    length = request.headers.get("content-length")
    return int(length) if length is not None else None if "transfer-encoding" in request.headers else 0


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
        if chunk:
            yield chunk


@router.get(
    "",
    dependencies=[reads],
    summary="List files",
    responses={
        200: example_reply({"items": [_EXAMPLE], "nextCursor": None}, "A page, newest first"),
        **problems("invalid_cursor", "project_not_found"),
    },
)
async def list_files(
    services: ServicesDependency,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=500, description="Files per page.")] = 50,
    cursor: Annotated[str | None, Query(max_length=200, description="`nextCursor` of the page before.")] = None,
    project: Annotated[str | None, Query(max_length=64, pattern=NO_NUL, description="Only of this project.")] = None,
    purpose: Annotated[Purpose | None, Query(description="Only for this.")] = None,
    status: Annotated[FileStatus | None, Query(description="Only in this state.")] = None,
    name: Annotated[str | None, Query(max_length=255, pattern=NO_NUL, description="Exactly this name.")] = None,
) -> FileList:
    """Returns the files of the projects that the caller may see, newest first, including uploads in progress."""
    if project is not None:
        project_role(caller, project, Role.VIEWER)
    chosen = FileFilter(project, purpose, status, name, visible=caller.visible_projects)
    rows = await service.page(services, chosen, seq_of(cursor) if cursor else None, limit + 1)
    items = [file_reply(row, received) for row, received in rows[:limit]]
    return FileList(items=items, next_cursor=cursor_of(rows[limit - 1][0].seq) if len(rows) > limit else None)


@router.get(
    "/{file_id}",
    dependencies=[reads],
    summary="Get a file",
    responses={200: example_reply(_EXAMPLE, "What is known of it"), **problems("file_not_found")},
)
async def get_file(services: ServicesDependency, caller: Caller, file_id: FileId) -> File:
    """Returns a file: its status, how many bytes have arrived, what it contains, and what is wrong with it and
    where."""
    row = await service.find(services, caller, file_id)
    return file_reply(row, service.received(services, row))


@router.get(
    "/{file_id}/content",
    response_class=StreamingResponse,
    dependencies=[reads],
    summary="Read a file",
    responses={
        200: {"description": "Its bytes", "content": {"application/octet-stream": _BYTES}},
        206: {"description": "The part that `Range` asks for", "content": {"application/octet-stream": _BYTES}},
        **problems("file_not_found", "file_unfit", "files_unavailable", "range_unsatisfiable"),
    },
)
async def read_file(
    request: Request, services: ServicesDependency, caller: Caller, file_id: FileId
) -> StreamingResponse:
    """Returns the content of a file as it was uploaded. Use `Range` to read a part of it, for example to resume a
    broken download."""
    row = await service.find(services, caller, file_id)

    async def read(start: int, stop: int) -> AsyncIterator[bytes]:
        return await service.content(services, row, start, stop)

    return await ranged(request, read, row.bytes, row.sha256 or row.id, row.name)


@router.head(
    "/{file_id}",
    response_class=Response,
    dependencies=[reads],
    summary="Ask how much of an upload has arrived",
    responses={
        200: {"description": "Upload-Offset and Upload-Length"},
        **problems("file_not_found", "upload_protocol"),
    },
)
async def head_file(
    services: ServicesDependency, caller: Caller, file_id: FileId, tus_resumable: TusResumable = None
) -> Response:
    """Returns the progress of an upload. `Upload-Offset` is where the next PATCH request must begin."""
    row = await service.find(services, caller, file_id)
    tus.must_speak(tus_resumable)
    headers = tus.headers_of(row, service.received(services, row) or 0) | {"Upload-Length": str(row.bytes)}
    return Response(headers=headers | ({"Upload-Metadata": row.upload_metadata} if row.upload_metadata else {}))


@router.patch(
    "/{file_id}",
    status_code=204,
    response_class=Response,
    dependencies=[writes],
    summary="Send more of an upload",
    responses={
        204: {"description": "They have arrived; `Upload-Offset` says how many there are now"},
        **problems("file_not_found", "file_too_large", "no_space", "files_unavailable", "body_too_slow", *_SENDS),
    },
    openapi_extra={
        "requestBody": {"required": True, "description": "The bytes that follow.", "content": {tus.MEDIA_TYPE: _BYTES}}
    },
)
async def send_file(
    request: Request,
    services: ServicesDependency,
    caller: Caller,
    file_id: FileId,
    upload_offset: Annotated[str | None, Header(description="How many bytes have arrived.")] = None,
    tus_resumable: TusResumable = None,
    upload_checksum: Annotated[str | None, Header(description="An algorithm and a digest in Base64.")] = None,
) -> Response:
    """Appends the bytes that follow the first `Upload-Offset` bytes of the file. Bytes that have arrived are kept when
    the connection breaks; with `Upload-Checksum`, either the whole body is kept or nothing."""
    row = await service.find(services, caller, file_id, act=True)
    tus.must_speak(tus_resumable)
    if request.headers.get("content-type", "").lower() != tus.MEDIA_TYPE:
        raise ApiError("unsupported_media_type", f"The body must be {tus.MEDIA_TYPE}.")
    offset, checksum = tus.offset_of(upload_offset), tus.checksum_of(upload_checksum)
    length = request.headers.get("content-length")
    if length is not None and offset + int(length) > row.bytes:
        raise ApiError("file_too_large", f"The upload has {row.bytes} bytes, and this would be {offset + int(length)}.")
    row = await service.append(services, caller, file_id, offset, _chunks(request), checksum)
    have = service.received(services, row)
    return Response(status_code=204, headers=tus.headers_of(row, have or 0))


@router.delete(
    "/{file_id}",
    status_code=204,
    response_class=Response,
    dependencies=[writes],
    summary="Delete a file or an upload",
    responses={
        204: {"description": "It is gone; its bytes go with the last file that has them"},
        **problems("file_not_found", "file_in_use", "files_unavailable"),
    },
)
async def delete_file(services: ServicesDependency, caller: Caller, file_id: FileId) -> Response:
    """Deletes a file. The request is refused while a job that has not ended reads the file."""
    await service.remove(services, caller, file_id)
    return Response(status_code=204, headers={"Tus-Resumable": tus.VERSION})


def file_reply(row: FileRow, received: int | None = None) -> File:
    """Return the reply of a file. `received` is None if all bytes have arrived, or this machine has nothing of
    it."""
    checked = row.checked or {}
    uploading = row.status == FileStatus.UPLOADING
    return reply_of(
        File,
        row,
        received=(received or 0) if uploading else row.bytes,
        sha256=None if uploading else row.sha256,
        format=checked.get("format"),
        samples=checked.get("samples"),
        uncompressed_bytes=checked.get("bytes"),
        tokens_estimated=checked.get("tokens_estimated"),
        unchecked=checked.get("unknown") or None,
    )
