"""`/jobs/{id}/checkpoints/{step}:export`: a model or an adapter, made of a commit and fetched, or written to S3."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.responses import StreamingResponse

from muster.api.core.access import find_job
from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Caller, reads, writes
from muster.api.core.checkpoints.routes import Step
from muster.api.core.database.tables import JobRow, ProjectRow
from muster.api.core.errors import ApiError, invalid_parameter
from muster.api.core.http.body import parsed, read_body
from muster.api.core.http.openapi import body, example_reply, problems
from muster.api.core.http.path_parts import JobId
from muster.api.core.http.ranges import ranged
from muster.api.core.jobs.repository import folder_of
from muster.api.core.limits import ProjectLimits, is_under
from muster.api.core.services import Services, ServicesDependency
from muster.api.data.exports.making import ExportOrder, ExportProgress, ModelExports, available
from muster.api.data.exports.schemas import Dtype, Export, ExportRequest, Format
from muster.api.data.exports.tar import TarArchive
from muster.words.address import AddressError, parse_address

router = APIRouter(prefix="/jobs", tags=["jobs"])

WAIT_SECONDS = 10.0  # that a request waits for a model before it answers 202: an adapter is made by then
BLOCK_BYTES = 1 << 20
READS_BETWEEN_MARKS = 256  # a reader marks the folder as read every 256 MiB

_FormatQuery = Annotated[Format, Query(description="The whole model, or its adapter alone.")]
_DtypeQuery = Annotated[Dtype, Query(description="`bf16` halves what is in fp32.")]
_EmaQuery = Annotated[bool, Query(description="The mean of the weights, where the job kept one.")]
_MAKING = {
    "state": "making",
    "step": 120,
    "done": 16_777_216,
    "total": 50_331_648,
    "bytes": None,
    "files": [],
    "to": None,
}
_READY = {
    **_MAKING,
    "state": "ready",
    "done": 50_331_648,
    "bytes": 50_340_864,
    "files": [{"path": "config.json", "bytes": 512}, {"path": "model.safetensors", "bytes": 50_331_648}],
}
_REFUSED = ("job_not_found", "checkpoint_not_found", "checkpoint_unusable", "storage_unavailable", "export_unavailable")
_BYTES = {"schema": {"type": "string", "format": "binary"}, "example": "(a tar archive)"}


@router.get(
    "/{job_id}/checkpoints/{step}:export",
    response_model=Export,
    dependencies=[reads],
    summary="Fetch a checkpoint's model",
    operation_id="fetch_export",
    responses={
        200: {"description": "The archive, or the file; to who accepts JSON alone, what is in it",
              "content": {"application/json": {"example": _READY}, "application/x-tar": _BYTES,
                          "application/octet-stream": _BYTES}},
        202: {**example_reply(_MAKING, "It is being made: ask again"), "model": Export},
        206: {"description": "The part that `Range` asks for",
              "content": {"application/x-tar": _BYTES, "application/octet-stream": _BYTES}},
        **problems(*_REFUSED, "export_file_not_found", "range_unsatisfiable"),
    },
)  # fmt: skip
async def fetch_export(
    request: Request,
    services: ServicesDependency,
    caller: Caller,
    job_id: JobId,
    step: Step,
    format: _FormatQuery = "transformers",
    dtype: _DtypeQuery = "keep",
    ema: _EmaQuery = False,
    file: Annotated[
        str | None, Query(max_length=300, description="One file of it, by its path; left out: all as tar.")
    ] = None,
) -> Response:
    """Returns a checkpoint as a model folder for transformers or as an adapter for peft, with the tokenizer and the
    chat template, as a tar archive or file by file. The first request starts the export and is answered with 202 until
    it is ready; the result is kept for an hour after it was last read. Use `Range` to resume a broken download."""
    row = await find_job(services, caller, job_id)
    order, exports = _export_order(row, step, format, dtype, ema), services[ModelExports]
    if not await asyncio.to_thread(exports.made, order):
        progress, _ = _made_here(exports, order)
        await exports.wait(order, WAIT_SECONDS)
        _refuse_failure(progress)
        if not exports.made(order):
            return _still(order, progress)
    folder = exports.folder(order)
    if request.headers.get("accept", "") == "application/json":
        return JSONResponse(await asyncio.to_thread(_document, order, folder, ""))
    if file is not None:
        return await _one_file(request, folder, file)
    archive = await asyncio.to_thread(TarArchive, folder, f"{row.name}-{order.name}")
    name = f"{row.name}-{order.name}.tar"

    async def read(start: int, stop: int) -> AsyncIterator[bytes]:
        return _blocks(archive.read, folder, start, stop)

    return await ranged(request, read, archive.bytes, archive.tag, name, "application/x-tar")


@router.post(
    "/{job_id}/checkpoints/{step}:export",
    response_model=Export,
    dependencies=[writes],
    summary="Make a checkpoint's model, or write it to S3",
    operation_id="make_export",
    responses={
        200: example_reply(_READY, "It is made, and written where that was asked for"),
        202: {**example_reply(_MAKING, "It is being made: ask again"), "model": Export},
        **problems(*_REFUSED, "invalid_document", "body_too_large", "unsupported_media_type"),
    },
    openapi_extra=body(ExportRequest, {"format": "transformers", "to": "s3://models/stdlib-60m"}, required=False),
)
async def make_export(
    request: Request, services: ServicesDependency, caller: Caller, job_id: JobId, step: Step
) -> JSONResponse:
    """Starts the export of a checkpoint. Repeat the request to get its progress. With `to`, the API writes the files to
    that address, which requires that it has the permission to write there; in a project with a `checkpointPrefix`, the
    address must be below that prefix."""
    asked = await read_body(
        request, parsed(ExportRequest, "invalid_parameter", "The request is not valid"), optional=True
    )
    row = await find_job(services, caller, job_id, act=True)
    order, exports, to = (
        _export_order(row, step, asked.format, asked.dtype, asked.ema),
        services[ModelExports],
        asked.to or "",
    )
    if to:
        await _refuse_place(services, row, to)
    if not to and await asyncio.to_thread(exports.made, order):
        return JSONResponse(await asyncio.to_thread(_document, order, exports.folder(order), ""))
    progress, begun = _made_here(exports, order, to)
    if to and begun:
        async with services.database.write() as session:
            record(
                session, caller, AuditedAct("checkpoint.exported", row.id, row.project, after={"step": step, "to": to})
            )
    await exports.wait(order, WAIT_SECONDS, to)
    _refuse_failure(progress)
    if progress.ended_at is None:
        return _still(order, progress)
    return JSONResponse(await asyncio.to_thread(_document, order, exports.folder(order), to))


def _export_order(row: JobRow, step: int, format: str, dtype: str, ema: bool) -> ExportOrder:
    if (folder := folder_of(row)) is None:
        raise ApiError("checkpoint_not_found", f"Job {row.name!r} does not say where it commits.")
    return ExportOrder(row.id, folder, step, format, dtype, ema)


def _made_here(exports: ModelExports, order: ExportOrder, to: str = "") -> tuple[ExportProgress, bool]:
    if not available() and not exports.made(order):
        detail = (
            "The API has no trainer beside it, which makes models: `muster export` makes it where there is one and the "
            f"commits under {order.folder} can be read."
        )
        raise ApiError("export_unavailable", detail)
    return exports.begin(order, to)


def _refuse_failure(progress: ExportProgress) -> None:
    if progress.fault:
        code = "checkpoint_unusable" if progress.is_users else "storage_unavailable"
        raise ApiError(code, progress.fault, headers={} if progress.is_users else {"Retry-After": "30"})


async def _refuse_place(services: Services, row: JobRow, to: str) -> None:
    try:
        address = parse_address(to)
    except AddressError as error:
        raise invalid_parameter("to", str(error)) from None
    if address.scheme != "s3" or not address.path:
        raise invalid_parameter("to", f"must be s3://bucket/folder, not {to[:100]!r}")
    async with services.database.read() as session:
        project = await session.get_one(ProjectRow, row.project)
    below = ProjectLimits.model_validate(project.limits).checkpoint_prefix
    if below and not is_under(to, below):
        raise invalid_parameter("to", f"project {row.project!r} writes under {below}; name a folder there")


def _still(order: ExportOrder, progress: ExportProgress) -> JSONResponse:
    document = {**_MAKING, "step": order.step, "done": progress.done, "total": progress.total}
    return JSONResponse(document, status_code=202, headers={"Retry-After": "1"})


def _document(order: ExportOrder, folder: Path, to: str) -> dict[str, Any]:
    sizes = {path: path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    total = sum(sizes.values())
    return {
        "state": "sent" if to else "ready",
        "step": order.step,
        "done": total,
        "total": total,
        "bytes": TarArchive(folder, "model").bytes,
        "files": [{"path": path.relative_to(folder).as_posix(), "bytes": size} for path, size in sizes.items()],
        "to": to or None,
    }


async def _blocks(read: Callable[[int, int], bytes], folder: Path, start: int, stop: int) -> AsyncIterator[bytes]:
    for number, at in enumerate(range(start, stop, BLOCK_BYTES)):
        if number % READS_BETWEEN_MARKS == 0:
            await asyncio.to_thread(os.utime, folder)  # else it would be removed from under a slow reader
        yield await asyncio.to_thread(read, at, min(at + BLOCK_BYTES, stop))


def _file_in(folder: Path, name: str) -> Path:
    """Raises ApiError export_file_not_found for what is none of the model's own files."""
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() == name:
            return path
    raise ApiError("export_file_not_found", f"The model has no file {name[:100]!r}; accept JSON to see which it has.")


async def _one_file(request: Request, folder: Path, name: str) -> StreamingResponse:
    path = await asyncio.to_thread(_file_in, folder, name)
    about = await asyncio.to_thread(path.stat)

    def piece(start: int, stop: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    async def read(start: int, stop: int) -> AsyncIterator[bytes]:
        return _blocks(piece, folder, start, stop)

    return await ranged(request, read, about.st_size, f"{about.st_mtime_ns}-{about.st_size}", path.name)
