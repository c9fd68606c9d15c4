"""Operations on files: create, append, upload, find, read and delete.

A file is uploaded by one request (`save`; or `receive` and `adopt`, where the bytes come before their description), or
created (`create`) and then sent by any number of requests (`append`), or in parts (`parts`). `arrivals` does the rest
after the last byte: it stores the file by its content's hash, and checks it if it is data.

A file is uploaded by one request (`save`; or `receive` and `adopt`, where it comes before what is said of it), or begun
(`create`) and sent by any number of them (`append`), or in parts (`parts`). When its last byte has arrived the rest is
`arrivals`' work: it is put away by what it holds, and read through if it is data.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import string
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from sqlalchemy import delete
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.access import project_not_found, project_role
from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Principal
from muster.api.core.clock import clock
from muster.api.core.database.tables import FileRow, ProjectRow
from muster.api.core.errors import ApiError, invalid_parameter
from muster.api.core.limits import ProjectLimits
from muster.api.core.roles import Role
from muster.api.core.services import Services
from muster.api.data.files import repository
from muster.api.data.files.arrivals import FilePlaces
from muster.api.data.files.repository import FileFilter, FileLikeness
from muster.api.data.files.staging import ExpectedChecksum
from muster.replies.files import FileStatus, Purpose
from muster.storage.contents import UploadedContents
from muster.storage.errors import NotFound, StorageError
from muster.words.text import nearest
from muster.words.text import size as text_size

UPLOAD_SECONDS = 24 * 3600.0  # from its begin: what has not arrived by then is dropped
SAVE_SECONDS = 3600.0  # of an upload by one request, whose sender can't go on with it
NAME_LENGTH_MAX = 255
READ_BYTES = 1 << 20
_ID_LETTERS = string.ascii_lowercase + string.digits
_SHA256 = re.compile(r"[0-9a-f]{64}")
Chunks: TypeAlias = AsyncIterator[bytes]


@dataclass(frozen=True)
class NewFile:
    """Description of a new file. `bytes` is None if the sender does not know the size before the end, and `sha256`, in
    hex, is None if the sender does not give it. The file is deleted `lifetime_seconds` after it is ready; None keeps
    it."""

    project: str
    name: str
    purpose: str
    bytes: int | None
    sha256: str | None = None
    lifetime_seconds: float | None = None
    upload_metadata: str = ""  # tus' Upload-Metadata, which is given back as it came


async def create(services: Services, caller: Principal, new: NewFile) -> FileRow:
    """Create an upload of a known size. Raises ApiError invalid_parameter, project_not_found, forbidden,
    file_too_large, no_space, files_unavailable."""
    assert new.bytes is not None, "without a size there is only `save`"
    return await begin(services, caller, new, new.bytes, UPLOAD_SECONDS, needs=new.bytes)


async def append(
    services: Services,
    caller: Principal,
    file_id: str,
    offset: int,
    chunks: Chunks,
    checksum: ExpectedChecksum | None = None,
) -> FileRow:
    """Add to an upload what follows its first `offset` bytes. With the last byte it becomes `checking`.

    What has arrived stays when `chunks` break off; with a `checksum` all of the request or nothing. Raises ApiError
    file_not_found, forbidden, upload_conflict, upload_busy, checksum_mismatch, file_too_large, no_space.
    """
    row = await find(services, caller, file_id, act=True)
    if row.status != FileStatus.UPLOADING:
        raise ApiError("upload_conflict", f"All {row.bytes} bytes of {row.id} have arrived.")
    have = await services[FilePlaces].staging.write(row.id, offset, chunks, row.bytes, checksum)
    return await arrived(services, caller, row.id) if have == row.bytes else row


async def save(services: Services, caller: Principal, new: NewFile, chunks: Chunks) -> FileRow:
    """Upload a whole file: it is there when this returns, or nothing of it. Raises ApiError as `create` and `append`
    do."""
    row = await begin(services, caller, new, new.bytes or 0, SAVE_SECONDS, needs=new.bytes or 0)
    staging = services[FilePlaces].staging
    try:
        most = new.bytes if new.bytes is not None else await _room(services, row.project)
        have = await staging.write(row.id, 0, chunks, most)
        if have == 0 or (new.bytes is not None and have != new.bytes):
            raise empty() if have == 0 else invalid_parameter("body", f"ends after {have} of {new.bytes} bytes")
        return await arrived(services, caller, row.id, have)
    except BaseException:
        await asyncio.shield(_forget(services, row.id))
        raise


async def receive(services: Services, caller: Principal, project: str, size: int | None, chunks: Chunks) -> str:
    """Take in the bytes of a file of which more is known afterwards; returns their name among the uploads, for `adopt`
    or `drop`. `size` is what its sender says that they are at most. Raises ApiError as `create` and `append` do, and
    then nothing of them is left."""
    project_role(caller, project, Role.MEMBER)
    contents_of(services)
    staging, spool = services[FilePlaces].staging, new_spool()
    most = await _room(services, project)
    if size is not None and size > most:
        raise ApiError("file_too_large", f"The file has {text_size(size)}, and there is room for {text_size(most)}.")
    try:
        staging.make(spool)
        await staging.write(spool, 0, chunks, most)
    except BaseException:
        staging.remove(spool)
        raise
    return spool


async def adopt(services: Services, caller: Principal, new: NewFile, spool: str) -> FileRow:
    """A file of the bytes that `receive` has taken in, which are gone from there then. Raises ApiError as `create`
    does."""
    staging = services[FilePlaces].staging
    try:
        total = staging.size(spool) or 0
        row = await begin(services, caller, replace(new, bytes=total), total, SAVE_SECONDS, needs=0)
        try:
            return await arrived(services, caller, row.id, spool=spool)
        except BaseException:
            await asyncio.shield(_forget(services, row.id))
            raise
    finally:
        staging.remove(spool)


async def made_before(services: Services, caller: Principal, like: FileLikeness, seconds: float) -> FileRow | None:
    """The newest file of the caller's that is `like` this one and was begun in the last `seconds`: what an earlier try
    of the same request has made."""
    async with services.database.read() as session:
        return await repository.newest_like(session, caller.person, like, await clock(session) - seconds)


def new_spool() -> str:
    """A name among the uploads that no file has."""
    return f"spool-{secrets.token_hex(12)}"


def drop(services: Services, spool: str) -> None:
    """Forget what `receive` has taken in."""
    services[FilePlaces].staging.remove(spool)


async def find(services: Services, caller: Principal, file_id: str, act: bool = False) -> FileRow:
    """The file, if the caller may see it and, where that is asked for, act on it. Raises ApiError file_not_found, and
    forbidden."""
    async with services.database.read() as session:
        row = await repository.get(session, file_id)
    return _checked(caller, row, file_id, act)


async def page(
    services: Services, chosen: FileFilter, before_seq: int | None, limit: int
) -> list[tuple[FileRow, int | None]]:
    """Return the files, newest first, each with how much of it has arrived."""
    async with services.database.read() as session:
        rows = await repository.page(session, chosen, before_seq, limit)
    return await asyncio.to_thread(lambda: [(row, received(services, row)) for row in rows])


def received(services: Services, row: FileRow) -> int | None:
    """Return the number of bytes that have certainly arrived, or None if this machine has nothing of the upload."""
    return services[FilePlaces].staging.size(row.id) if row.status == FileStatus.UPLOADING else row.bytes


async def content(services: Services, row: FileRow, start: int = 0, stop: int | None = None) -> AsyncIterator[bytes]:
    """Return the bytes [start, stop) of a file. Raises ApiError file_unfit at once, and StorageError while it is
    read."""
    contents = contents_of(services)
    if row.key is None or row.status not in (FileStatus.READY, FileStatus.FAILED):
        raise ApiError("file_unfit", f"File {row.id} is {row.status}: it can be read when it is ready.")
    key, end = row.key, row.bytes if stop is None else min(stop, row.bytes)
    try:
        about = await asyncio.to_thread(contents.store.about, key)
    except (NotFound, StorageError) as error:
        raise ApiError("files_unavailable", f"{error}", headers={"Retry-After": "5"}) from error

    def read(at: int) -> bytes:
        into = memoryview(bytearray(min(READ_BYTES, end - at)))
        contents.store.read_into(key, at, into, about.tag)
        return bytes(into)

    async def blocks() -> AsyncIterator[bytes]:
        for at in range(start, end, READ_BYTES):
            yield await asyncio.to_thread(read, at)

    return blocks()


async def remove(services: Services, caller: Principal, file_id: str) -> None:
    """Delete a file, or an upload. Its bytes go with the last file that has them. Raises ApiError file_not_found,
    forbidden, file_in_use, files_unavailable."""
    row = await find(services, caller, file_id, act=True)
    async with services.database.write() as session:
        await repository.lock_project(session, row.project)
        row = _checked(caller, await repository.get(session, file_id, lock=True), file_id, act=True)
        if jobs := await repository.live_jobs(session, file_id):
            seen = ", ".join(jobs)
            raise ApiError("file_in_use", f"File {file_id} is read by {seen}: wait until that has ended, or cancel it.")
        await repository.drop(session, row, contents_of(services))
        before = {"name": row.name, "bytes": row.bytes, "status": row.status}
        record(session, caller, AuditedAct("file.deleted", row.id, row.project, before))
    services[FilePlaces].staging.remove(file_id)
    if (arrivals := services[FilePlaces].arrivals) is not None:
        arrivals.work.wake.set()  # which ends its check


def contents_of(services: Services) -> UploadedContents:
    """Raises ApiError files_unavailable where no place for files is set."""
    if (contents := services[FilePlaces].contents) is None:
        detail = (
            "No place for files is set: MUSTER_API_FILES_URI names one that the workers read too, s3://bucket/files."
        )
        raise ApiError("files_unavailable", detail)
    return contents


async def begin(services: Services, caller: Principal, new: NewFile, total: int, lives: float, needs: int) -> FileRow:
    """The row and an upload without a byte, which `needs` so many bytes of the disk until it is whole."""
    project_role(caller, new.project, Role.MEMBER)
    contents_of(services)
    _refuse(new)
    if total > services.settings.file_bytes_max:
        raise _too_large(total, services.settings.file_bytes_max, "one file may have", "MUSTER_API_FILE_BYTES_MAX")
    row = FileRow(
        id="file-" + "".join(secrets.choice(_ID_LETTERS) for _ in range(24)),
        project=new.project,
        owner=caller.person,
        name=new.name,
        purpose=new.purpose,
        status=FileStatus.UPLOADING,
        bytes=total,
        sha256=new.sha256,
        key=None,
        fault=None,
        checked=None,
        upload_metadata=new.upload_metadata,
        lifetime_seconds=new.lifetime_seconds,
    )
    staging = services[FilePlaces].staging
    async with services.database.write() as session:
        project = await repository.lock_project(session, new.project)
        if project is None:
            raise project_not_found(new.project)
        row.created_at = await clock(session)
        row.expires_at = row.created_at + lives
        await _refuse_full_project(session, project.name, ProjectLimits.model_validate(project.limits), total)
        coming = await repository.on_their_way(session)
        room = await asyncio.to_thread(lambda: staging.room() - staging.missing(coming))
        if needs > room:
            room_for, wanted_room = text_size(max(0, room)), text_size(needs) if needs else "some"
            detail = f"The disk of {staging.folder} has room for {room_for}, and the upload needs {wanted_room}."
            raise ApiError("no_space", detail)
        staging.make(row.id)
        session.add(row)
    return row


def _refuse(new: NewFile) -> None:
    """Check what can be checked before a byte is read. Raises ApiError invalid_parameter."""
    purposes = [str(each) for each in Purpose]
    if new.purpose not in purposes:
        words = f"{new.purpose[:80]!r} is not one of {', '.join(purposes)}"
        raise invalid_parameter("purpose", words, nearest(new.purpose, purposes))
    name = new.name
    if not name.strip() or len(name) > NAME_LENGTH_MAX or not name.isprintable() or set(name) & set("/\\"):
        words = f"must be a file's name, of at most {NAME_LENGTH_MAX} printable characters, without a folder"
        raise invalid_parameter("name", words)
    if new.bytes is not None and new.bytes <= 0:
        raise empty()
    if new.sha256 is not None and not _SHA256.fullmatch(new.sha256):
        raise invalid_parameter("sha256", "must be 64 hexadecimal digits in small letters")


def empty() -> ApiError:
    return invalid_parameter("bytes", "the file is empty; there is nothing to keep")


def _too_large(total: int, most: int, whose: str, where: str) -> ApiError:
    return ApiError("file_too_large", f"The file has {text_size(total)}; {whose} {text_size(most)} ({where}).")


async def _refuse_full_project(session: AsyncSession, project: str, limits: ProjectLimits, total: int) -> None:
    if limits.file_bytes is None:
        return
    have = await repository.bytes_of(session, project)
    if have + total > limits.file_bytes:
        usage = f"project {project!r} has files of {text_size(have)} and may have"
        raise _too_large(total, limits.file_bytes, usage, "its limit fileBytes")


async def _room(services: Services, project: str) -> int:
    """Return the maximum bytes of a file of unknown size. Raises ApiError project_not_found."""
    async with services.database.read() as session:
        row = await session.get(ProjectRow, project)
        if row is None:  # an admin has a role everywhere, also where nothing is
            raise project_not_found(project)
        limit = ProjectLimits.model_validate(row.limits).file_bytes
        left = limit - await repository.bytes_of(session, project) if limit is not None else None
        coming = await repository.on_their_way(session)
    staging = services[FilePlaces].staging
    room = await asyncio.to_thread(lambda: staging.room() - staging.missing(coming))
    return max(0, min(room, services.settings.file_bytes_max, *([left] if left is not None else [])))


async def arrived(
    services: Services, caller: Principal, file_id: str, total: int | None = None, spool: str | None = None
) -> FileRow:
    """Accept a file whose bytes are all here, under the name `spool` if one is given. Its sender's description is
    compared with it, where that needs no reading."""
    staging = services[FilePlaces].staging
    digest = staging.digest(spool or file_id)
    async with services.database.write() as session:
        row = _checked(caller, await repository.get(session, file_id, lock=True), file_id, act=True)
        if row.status != FileStatus.UPLOADING:
            return row
        if digest is not None and row.sha256 not in (None, digest):
            detail = f"What has arrived has the SHA-256 {digest}, and {row.sha256} was announced. Upload it again."
            await session.execute(delete(FileRow).where(FileRow.id == file_id))
            wrong = ApiError("checksum_mismatch", detail)
        else:
            wrong = None
            if spool is not None:
                staging.rename(spool, file_id)
            row.status, row.expires_at = FileStatus.CHECKING, None
            row.bytes = row.bytes if total is None else total
            row.sha256 = digest or row.sha256
            after: dict[str, Any] = {"name": row.name, "bytes": row.bytes, "purpose": row.purpose}
            record(session, caller, AuditedAct("file.uploaded", row.id, row.project, after=after))
    if wrong is not None:
        staging.remove(file_id)
        raise wrong
    if (arrivals := services[FilePlaces].arrivals) is not None:
        arrivals.work.wake.set()
    return row


async def _forget(services: Services, file_id: str) -> None:
    """Drop an upload that its sender can't go on with; one that is whole stays."""
    async with services.database.write() as session:
        gone = delete(FileRow).where(FileRow.id == file_id, FileRow.status == FileStatus.UPLOADING)
        if (await session.execute(gone.returning(FileRow.id))).scalar_one_or_none() is None:
            return
    services[FilePlaces].staging.remove(file_id)


def _checked(caller: Principal, row: FileRow | None, file_id: str, act: bool) -> FileRow:
    role = caller.role_in(row.project) if row is not None else None
    if row is None or role is None:
        words = f"There is no file with the id {file_id[:80]!r}; `muster files ls` lists the files."
        raise ApiError("file_not_found", words)
    if act and not (role.covers(Role.MAINTAINER) or (role.covers(Role.MEMBER) and caller.person == row.owner)):
        detail = (
            f"File {row.id} is {row.owner}'s; in project {row.project!r} you are a {role}. Its owner or a maintainer "
            "may do that."
        )
        raise ApiError("forbidden", detail)
    return row
