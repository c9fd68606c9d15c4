"""`/v1/uploads`: a file in parts, which may come at the same time and in any order."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request

from muster.api.core.callers import Caller
from muster.api.core.database.tables import FileRow
from muster.api.core.http.body import parsed, read_body
from muster.api.core.http.openapi import AT, body, example_reply, problems
from muster.api.core.services import ServicesDependency
from muster.api.data.files.service import UPLOAD_SECONDS
from muster.api.openai.files import service
from muster.api.openai.files.form import FileForm
from muster.api.openai.files.replies import Upload, UploadPart, upload_reply
from muster.api.openai.files.requests import PART_SCHEMA, CompleteUpload, CreateUpload
from muster.api.openai.files.routes import EXAMPLE as FILE_EXAMPLE
from muster.api.openai.files.routes import REFUSED, form_body, writes
from muster.api.openai.fine_tuning.retries import RetryCount
from muster.api.openai.fine_tuning.routes import ProjectHeader

router = APIRouter(prefix="/uploads", tags=["openai"])

UploadId = Annotated[str, Path(description="`upload_…`", min_length=1, max_length=64, pattern=r"^[^\x00]*$")]
_EXAMPLE: dict[str, Any] = {
    "id": "upload_0a1b2c3d4e5f6g7h8i9j0k1l",
    "object": "upload",
    "bytes": 7_340_032,
    "created_at": int(AT),
    "expires_at": int(AT) + 86_400,
    "filename": "chat.jsonl",
    "purpose": "fine-tune",
    "status": "pending",
    "file": None,
}
_PART = {
    "id": "part_0a1b2c3d4e5f60718293a4b5",
    "object": "upload.part",
    "created_at": int(AT) + 2,
    "upload_id": _EXAMPLE["id"],
}
_BEGIN = {"filename": "chat.jsonl", "purpose": "fine-tune", "bytes": 7_340_032, "mime_type": "application/jsonl"}
_WRONG = ("invalid_request", "invalid_document", "unsupported_media_type", "body_too_large", "body_too_slow")


def _reply(row: FileRow, cancelled: bool = False) -> Upload:
    return upload_reply(row, row.created_at + UPLOAD_SECONDS, cancelled)


@router.post(
    "",
    dependencies=[writes],
    summary="Begin an upload in parts",
    responses={
        200: example_reply(_EXAMPLE, "Parts can be sent"),
        **problems(*_WRONG, "project_not_found", "file_too_large", "files_unavailable"),
    },
    openapi_extra=body(CreateUpload, _BEGIN),
)
async def create_upload(
    request: Request,
    services: ServicesDependency,
    caller: Caller,
    retries: RetryCount = 0,
    project: ProjectHeader = None,
) -> Upload:
    """Creates an upload in parts. An upload that is not completed within a day is deleted."""
    asked = await read_body(request, parsed(CreateUpload, "invalid_request", "The request is not valid"))
    return _reply(await service.create_upload(services, caller, project or None, asked, retries > 0))


@router.post(
    "/{upload_id}/parts",
    dependencies=[writes],
    summary="Send a part",
    responses={200: example_reply(_PART, "It has arrived"), **problems(*REFUSED, "file_not_found", "upload_conflict")},
    openapi_extra=form_body(PART_SCHEMA, {"data": '{"messages": […]}\n'}),
)
async def create_upload_part(
    request: Request, services: ServicesDependency, caller: Caller, upload_id: UploadId
) -> UploadPart:
    """Adds a part to an upload. Parts may have any size, and several may be sent at once. Send a part again if its
    response was lost: only the parts that are named at completion count."""
    part = await service.add_part(services, caller, upload_id, FileForm(request, "data"))
    return UploadPart(id=part, created_at=int(time.time()), upload_id=upload_id)


@router.post(
    "/{upload_id}/complete",
    dependencies=[writes],
    summary="Complete an upload",
    responses={
        200: example_reply({**_EXAMPLE, "status": "completed", "file": FILE_EXAMPLE}, "It is a file"),
        **problems(*_WRONG, "file_not_found", "file_too_large", "upload_conflict", "files_unavailable"),
    },
    openapi_extra=body(CompleteUpload, {"part_ids": [_PART["id"]]}),
)
async def complete_upload(
    request: Request, services: ServicesDependency, caller: Caller, upload_id: UploadId
) -> Upload:
    """Completes an upload. The given parts, in the given order, become the file, which must have the announced number
    of bytes. Repeating the request is harmless."""
    asked = await read_body(request, parsed(CompleteUpload, "invalid_request", "The request is not valid"))
    return _reply(await service.complete(services, caller, upload_id, asked))


@router.post(
    "/{upload_id}/cancel",
    dependencies=[writes],
    summary="Cancel an upload",
    responses={
        200: example_reply({**_EXAMPLE, "status": "cancelled"}, "Nothing of it is left"),
        **problems("file_not_found", "upload_conflict", "files_unavailable"),
    },
)
async def cancel_upload(services: ServicesDependency, caller: Caller, upload_id: UploadId) -> Upload:
    """Cancels an upload and deletes the bytes that have arrived."""
    return _reply(await service.cancel(services, caller, upload_id), cancelled=True)
