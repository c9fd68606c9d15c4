"""The files that a job names: found when it is submitted, kept from deletion while it lives."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.database.tables import FileRow, JobFileRow
from muster.api.core.errors import ApiError
from muster.api.core.services import Services
from muster.contract.base import Problem
from muster.contract.file_replies import FileStatus, Purpose
from muster.contract.job_inputs import files_named
from muster.contract.spec import JobSpec

_SOURCE = "spec.program.source"
_WAITS = {
    FileStatus.UPLOADING: "has not arrived: send the rest of it",
    FileStatus.CHECKING: "is being read through: submit the job when its status is ready",
}


async def resolve(services: Services, project: str, spec: JobSpec) -> tuple[dict[str, str], tuple[Problem, ...]]:
    """The address of each file that the job names, and what is wrong with the names. Files of another project are not
    there."""
    named = files_named(spec)
    if not named:
        return {}, ()
    async with services.database.read() as session:
        query = select(FileRow).where(FileRow.id.in_({file_id for _, file_id in named}), FileRow.project == project)
        rows = {row.id: row for row in await session.scalars(query)}
    addresses, faults = dict[str, str](), list[Problem]()
    for path, file_id in named:
        row = rows.get(file_id)
        if path == _SOURCE and row is not None and row.purpose != Purpose.SOURCE:
            words = f"file {file_id} was uploaded for {row.purpose}, and a program's source is one for source"
            faults.append(Problem(path, f"{words}: `muster files upload --purpose source ARCHIVE.tar.gz`"))
        elif row is not None and row.status == FileStatus.READY and row.key and services.files.contents is not None:
            addresses[file_id] = services.files.contents.address(row.key)
        else:
            faults.append(Problem(path, _why_not(file_id, row, project)))
    return addresses, tuple(faults)


def _why_not(file_id: str, row: FileRow | None, project: str) -> str:
    if row is None:
        return f"there is no file {file_id} in project {project!r}; `muster files ls` lists them"
    if row.status == FileStatus.FAILED:
        return f"nothing can be learnt from file {file_id}: {row.fault}"
    return f"file {file_id} {_WAITS.get(FileStatus(row.status), 'can not be read')}"


async def refer(session: AsyncSession, job_id: str, addresses: Mapping[str, str]) -> None:
    """Keep the files from deletion as long as the job lives. Raises ApiError invalid_job where one was deleted since it
    was found."""
    if not addresses:
        return
    query = select(FileRow.id).where(FileRow.id.in_(addresses)).with_for_update()
    there = set((await session.scalars(query)).all())
    if gone := sorted(addresses.keys() - there):
        raise ApiError("invalid_job", f"File {gone[0]} was deleted while the job was being submitted.")
    session.add_all(JobFileRow(job_id=job_id, file_id=each, address=address) for each, address in addresses.items())
    await session.flush()
