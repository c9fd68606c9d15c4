"""The files that a job names: found when it is submitted, kept from deletion while it lives."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.database.tables import FileRow, JobFileRow
from muster.api.core.errors import ApiError
from muster.api.core.submission.drafts import Step, SubmissionDraft
from muster.api.core.submission.facts import NamedFile, SubmissionFacts
from muster.replies.files import FileStatus, Purpose
from muster.storage.contents import UploadedContents
from muster.words.base import DocumentProblem

_SOURCE = "spec.program.source"
_WAITS = {
    FileStatus.UPLOADING: "has not arrived: send the rest of it",
    FileStatus.CHECKING: "is being read through: submit the job when its status is ready",
}


def named_files(contents: UploadedContents | None) -> Step:
    """The step of a submission that finds the addresses of the files that the job names. `contents` is None where no
    files are kept."""

    def step(draft: SubmissionDraft, facts: SubmissionFacts) -> SubmissionDraft:
        addresses, faults = dict[str, str](), list[DocumentProblem]()
        for named in facts.files:
            row = named.row
            if named.path == _SOURCE and row is not None and row.purpose != Purpose.SOURCE:
                words = f"file {row.id} was uploaded for {row.purpose}, and a program's source is one for source"
                faults.append(
                    DocumentProblem(named.path, f"{words}: `muster files upload --purpose source ARCHIVE.tar.gz`")
                )
            elif row is not None and row.status == FileStatus.READY and row.key and contents is not None:
                addresses[row.id] = contents.address(row.key)
            else:
                faults.append(DocumentProblem(named.path, _why_not(named, draft.project)))
        draft = draft.with_faults(*faults)
        if not addresses:
            return draft
        keep = functools.partial(_refer, addresses=addresses)
        return replace(draft, files=addresses, companions=(*draft.companions, keep))

    return step


def _why_not(named: NamedFile, project: str) -> str:
    file_id, row = named.file_id, named.row
    if row is None:
        return f"there is no file {file_id} in project {project!r}; `muster files ls` lists them"
    if row.status == FileStatus.FAILED:
        return f"nothing can be learnt from file {file_id}: {row.fault}"
    return f"file {file_id} {_WAITS.get(FileStatus(row.status), 'can not be read')}"


async def _refer(session: AsyncSession, job_id: str, addresses: Mapping[str, str]) -> None:
    """Keep the files from deletion as long as the job lives. Raises ApiError invalid_job where one was deleted since it
    was found."""
    query = select(FileRow.id).where(FileRow.id.in_(addresses)).with_for_update()
    there = set((await session.scalars(query)).all())
    if gone := sorted(addresses.keys() - there):
        raise ApiError("invalid_job", f"File {gone[0]} was deleted while the job was being submitted.")
    session.add_all(JobFileRow(job_id=job_id, file_id=each, address=address) for each, address in addresses.items())
    await session.flush()
