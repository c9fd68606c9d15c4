"""Files in the database. Functions on a session: who opens it also commits it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.database.tables import FileRow, JobFileRow, JobRow, ProjectRow
from muster.api.core.errors import ApiError
from muster.replies.files import FileStatus
from muster.storage.contents import UploadedContents
from muster.storage.errors import StorageError


@dataclass(frozen=True)
class FileFilter:
    """Filter of files. Every given condition must hold."""

    project: str | None = None
    purpose: str | None = None
    status: str | None = None
    name: str | None = None
    arrived: bool = False  # none that is on its way
    visible: Collection[str] | None = None  # the projects that the caller may see; None for all


@dataclass(frozen=True)
class FileLikeness:
    """Attributes that two attempts of one request to create a file have in common. `sha256` is None for a file that has
    yet to arrive."""

    project: str
    name: str
    purpose: str
    bytes: int
    sha256: str | None = None


async def get(session: AsyncSession, file_id: str, lock: bool = False) -> FileRow | None:
    query = select(FileRow).where(FileRow.id == file_id)
    return (await session.scalars(query.with_for_update() if lock else query)).one_or_none()


async def page(
    session: AsyncSession, chosen: FileFilter, past_seq: int | None, limit: int, oldest_first: bool = False
) -> list[FileRow]:
    """The newest files older than `past_seq`, newest first; or the oldest that are newer, oldest first."""
    query = select(FileRow).order_by(FileRow.seq.asc() if oldest_first else FileRow.seq.desc()).limit(limit)
    for column, value in (
        (FileRow.project, chosen.project),
        (FileRow.purpose, chosen.purpose),
        (FileRow.status, chosen.status),
        (FileRow.name, chosen.name),
    ):
        if value is not None:
            query = query.where(column == value)
    if chosen.arrived:
        query = query.where(FileRow.status != FileStatus.UPLOADING)
    if chosen.visible is not None:
        query = query.where(FileRow.project.in_(chosen.visible))
    if past_seq is not None:
        query = query.where(FileRow.seq > past_seq if oldest_first else FileRow.seq < past_seq)
    return list((await session.scalars(query)).all())


async def newest_like(session: AsyncSession, owner: str, like: FileLikeness, since: float) -> FileRow | None:
    """The newest file of this owner that is like that, begun since then; where there is no digest, one on its way."""
    query = select(FileRow).where(
        FileRow.owner == owner,
        FileRow.project == like.project,
        FileRow.name == like.name,
        FileRow.purpose == like.purpose,
        FileRow.bytes == like.bytes,
        FileRow.created_at >= since,
        FileRow.status == FileStatus.UPLOADING if like.sha256 is None else FileRow.sha256 == like.sha256,
    )
    return (await session.scalars(query.order_by(FileRow.seq.desc()).limit(1))).one_or_none()


async def lock_project(session: AsyncSession, project: str) -> ProjectRow | None:
    """Lock the project, so that transactions that count references to bytes, or the bytes of a project, run one after
    the other."""
    return await session.get(ProjectRow, project, with_for_update=True)


async def bytes_of(session: AsyncSession, project: str) -> int:
    """Return the total size of the project's files; an upload in progress counts with its whole size."""
    total = select(func.coalesce(func.sum(FileRow.bytes), 0)).where(FileRow.project == project)
    return int((await session.execute(total)).scalar_one())


async def on_their_way(session: AsyncSession) -> dict[str, int]:
    """The size of each file that is not whole, by its id."""
    query = select(FileRow.id, FileRow.bytes).where(FileRow.status == FileStatus.UPLOADING)
    return {row.id: row.bytes for row in await session.execute(query)}


async def drop(session: AsyncSession, row: FileRow, contents: UploadedContents) -> None:
    """Take the row away, and the bytes where no other file has them. The project is locked by `lock_project`, so nobody
    begins to share them meanwhile. Raises ApiError files_unavailable."""
    await session.execute(delete(FileRow).where(FileRow.id == row.id))
    query = select(func.count()).select_from(FileRow).where(FileRow.key == row.key)
    if row.key is None or (await session.execute(query)).scalar_one():
        return
    try:
        await asyncio.to_thread(contents.delete, row.key)
    except StorageError as error:
        raise ApiError("files_unavailable", f"{error}", headers={"Retry-After": "5"}) from error


async def live_jobs(session: AsyncSession, file_id: str) -> list[str]:
    """The names of the jobs that have not ended and read the file."""
    query = (
        select(JobRow.name)
        .join(JobFileRow, JobFileRow.job_id == JobRow.id)
        .where(JobFileRow.file_id == file_id, JobRow.live.is_(True))
        .order_by(JobRow.seq)
        .limit(5)
    )
    return list((await session.scalars(query)).all())
