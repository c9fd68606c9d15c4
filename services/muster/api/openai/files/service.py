"""Files for requests in OpenAI's terms, by the same service as `/api/v1/files`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Final

from muster.api.core.callers import Principal
from muster.api.core.database.tables import FileRow
from muster.api.core.errors import ApiError
from muster.api.core.services import Services
from muster.api.data.files import parts, repository, service
from muster.api.data.files.arrivals import FilePlaces
from muster.api.data.files.repository import FileFilter, FileLikeness
from muster.api.data.files.service import NewFile
from muster.api.openai.files.form import FileForm
from muster.api.openai.files.replies import FILE_PREFIX, PART_PREFIX, UPLOAD_PREFIX
from muster.api.openai.files.requests import CompleteUpload, CreateFile, CreateUpload, nested
from muster.api.openai.fine_tuning.retries import RETRY_SECONDS
from muster.api.openai.requests import invalid_request
from muster.replies.files import FileStatus, Purpose
from muster.storage.contents import ending_of
from muster.words.base import DocumentProblem, InvalidDocument, parse

FORM_BYTES: Final = 20_000  # that a form may have beside its file: boundaries, headers, fields
# The service's words for what is wrong, as a form has them and as the body of an upload has them.
_OF_FORM: Final = {"name": "file", "bytes": "file", "body": "file"}
_OF_UPLOAD: Final = {"name": "filename", "parts": "part_ids"}
_OF_PART: Final = {"bytes": "data"}


async def create_file(
    services: Services, caller: Principal, project: str | None, form: FileForm, size: int | None, retry: bool
) -> FileRow:
    """Take in a form's file, or find the one that the first try of this request has made. Raises ApiError."""
    home = project or caller.home
    with _as_openai_error(_OF_FORM, "file"):
        most = max(0, size - FORM_BYTES) if size is not None else None
        spool = await service.receive(services, caller, home, most, form.chunks())
        try:
            checked = _checked(form)
            name = named(form.filename, checked.purpose)
            if retry and (row := await _made_before(services, caller, spool, home, name, checked.purpose)) is not None:
                return row
            new = NewFile(home, name, checked.purpose, None, lifetime_seconds=checked.lifetime_seconds)
            return await service.adopt(services, caller, new, spool)
        finally:
            service.drop(services, spool)


def _checked(form: FileForm) -> CreateFile:
    try:
        return parse(CreateFile, nested(form.fields))
    except InvalidDocument as invalid:
        raise invalid_request(invalid.problems) from None


async def _made_before(
    services: Services, caller: Principal, spool: str, project: str, name: str, purpose: str
) -> FileRow | None:
    staging = services[FilePlaces].staging
    digest, size = staging.digest(spool), staging.size(spool) or 0
    if digest is None:
        return None
    like = FileLikeness(project, name, purpose, size, digest)
    return await service.made_before(services, caller, like, RETRY_SECONDS)


def named(filename: str, purpose: str) -> str:
    """The file's name. Data without an ending that gives its format is read as JSON lines, which is all that OpenAI
    takes: programs send bytes under the name `upload`."""
    is_data = purpose in (Purpose.FINE_TUNE, Purpose.EVALS)
    return f"{filename}.jsonl" if filename and is_data and not ending_of(filename) else filename


async def list_files(
    services: Services, caller: Principal, chosen: FileFilter, after: str | None, limit: int, oldest_first: bool
) -> list[FileRow] | None:
    """Return the files that have arrived, those after `after`; None if that is no file that the caller may see."""
    async with services.database.read() as session:
        past = None
        if after is not None:
            row = await repository.get(session, after)
            if row is None or caller.role_in(row.project) is None:
                return None
            past = row.seq
        return await repository.page(session, chosen, past, limit, oldest_first)


# -- uploads ----------------------------------------------------------------------------------------------------------


async def create_upload(
    services: Services, caller: Principal, project: str | None, asked: CreateUpload, retry: bool
) -> FileRow:
    """Create a file that comes in parts, or find the one that the first attempt of this request created. Raises
    ApiError."""
    home, name = project or caller.home, named(asked.filename, asked.purpose)
    if retry:
        like = FileLikeness(home, name, asked.purpose, asked.bytes)
        row = await service.made_before(services, caller, like, RETRY_SECONDS)
        if row is not None and not await asyncio.to_thread(services[FilePlaces].staging.parts, row.id):
            return row
    with _as_openai_error(_OF_UPLOAD, "bytes"):
        new = NewFile(home, name, asked.purpose, asked.bytes, lifetime_seconds=asked.lifetime_seconds)
        return await parts.begin(services, caller, new)


async def add_part(services: Services, caller: Principal, upload_id: str, form: FileForm) -> str:
    """The part's id. Raises ApiError."""
    with _of_upload(upload_id), _as_openai_error(_OF_PART, "data"):
        part = await parts.add(services, caller, _file_of(upload_id), form.chunks())
    if form.fields:
        raise invalid_request(tuple(DocumentProblem(name, "is no field of a part") for name in form.fields))
    return PART_PREFIX + part


async def complete(services: Services, caller: Principal, upload_id: str, asked: CompleteUpload) -> FileRow:
    """The file that the upload has become. Raises ApiError."""
    named_parts = [part.removeprefix(PART_PREFIX) for part in asked.part_ids]
    if len(set(named_parts)) < len(named_parts):
        raise invalid_request((DocumentProblem("part_ids", "names a part twice"),))
    with _of_upload(upload_id), _as_openai_error(_OF_UPLOAD, "md5"):
        return await parts.join(services, caller, _file_of(upload_id), named_parts, asked.md5)


async def cancel(services: Services, caller: Principal, upload_id: str) -> FileRow:
    """The upload as it was. Raises ApiError upload_conflict for one that is a file already."""
    with _of_upload(upload_id):
        row = await service.find(services, caller, _file_of(upload_id), act=True)
    if row.status != FileStatus.UPLOADING:
        raise ApiError("upload_conflict", f"{upload_id} is complete: it is {row.id}, which can be deleted.")
    await service.remove(services, caller, row.id)
    return row


def _file_of(upload_id: str) -> str:
    """The id of the file that the upload becomes."""
    if not upload_id.startswith(UPLOAD_PREFIX):
        raise _no_upload(upload_id)
    return FILE_PREFIX + upload_id.removeprefix(UPLOAD_PREFIX)


def _no_upload(upload_id: str) -> ApiError:
    return ApiError("file_not_found", f"There is no upload with the id {upload_id[:80]!r}: begin one at /v1/uploads.")


@contextlib.contextmanager
def _of_upload(upload_id: str) -> Iterator[None]:
    """Name a missing upload as its caller does, who has never seen the id of the file that it becomes."""
    try:
        yield
    except ApiError as error:
        raise (_no_upload(upload_id) if error.code == "file_not_found" else error) from None


@contextlib.contextmanager
def _as_openai_error(fields: dict[str, str], whole: str) -> Iterator[None]:
    """Say what the service refuses as a 400 that names the request's own field; `whole` is the one that the bytes, or
    their checksum, stand in. A full disk is no fault that a second try cures, so it is no 5xx, which is tried again."""
    try:
        yield
    except ApiError as error:
        if error.code == "invalid_parameter":
            faults = (
                DocumentProblem(fields.get(one.path, one.path), one.message, one.did_you_mean) for one in error.errors
            )
            raise invalid_request(tuple(faults)) from None
        if error.code == "checksum_mismatch":
            raise invalid_request((DocumentProblem(whole, error.detail),)) from None
        if error.code in ("file_too_large", "no_space"):
            raise ApiError("file_too_large", error.detail, (DocumentProblem(whole, error.detail),)) from None
        raise
