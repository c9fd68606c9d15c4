"""Resolution of `training_file` and `validation_file` to addresses that the workers can read."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from muster.api.core.callers import Principal
from muster.api.core.database.tables import FileRow
from muster.api.core.services import Services
from muster.api.data.files import repository
from muster.api.openai.requests import refused
from muster.recipe.data_formats import FORMATS, fits_task, wrong_format
from muster.recipe.objectives import Task
from muster.replies.files import FileStatus, Purpose
from muster.words.address import AddressError, data_address
from muster.words.names import FILE_ID

# A gigabyte of conversations is read through in less; OpenAI's client waits ten minutes for an answer.
CHECK_SECONDS_MAX: Final = 120.0
LOOK_SECONDS: Final = 0.2


@dataclass(frozen=True)
class TrainingFile:
    """Data file of a job. `examples` is None if nobody has counted them yet."""

    source: str
    format: str
    examples: int | None = None

    def as_source(self) -> dict[str, str]:
        return {"source": self.source, "format": self.format}


async def training_file(services: Services, caller: Principal, named: str, param: str, task: Task) -> TrainingFile:
    """A file that is still read through is waited for, as programs name it as soon as it has arrived. Raises ApiError
    invalid_request that names `param`."""
    form = FORMATS[task][0]
    if FILE_ID.fullmatch(named):
        row = await _read_through(services, caller, named, param)
        checked = row.checked or {}
        candidates = [each for each in (checked.get("format"), *checked.get("others", ())) if each is not None]
        form_of_task = next((each for each in candidates if fits_task(each, task)), next(iter(candidates), None))
        if form_of_task is not None and not fits_task(form_of_task, task):
            raise refused(param, f"{row.name} ({named}): {wrong_format(form_of_task, task)}")
        return TrainingFile(named, form_of_task or form, checked.get("samples"))
    if "://" not in named:
        words = "must be an uploaded file's id, or an address that the workers can read (s3://bucket/chat.jsonl)"
        raise refused(param, f"{words}, not {named[:200]!r}")
    try:
        data_address(named)
    except AddressError as error:
        raise refused(param, str(error)) from None
    return TrainingFile(named, form)


async def _read_through(services: Services, caller: Principal, named: str, param: str) -> FileRow:
    deadline = time.monotonic() + CHECK_SECONDS_MAX
    while True:
        async with services.database.read() as session:
            row = await repository.get(session, named)
        if row is None or caller.role_in(row.project) is None:
            raise refused(param, f"there is no file {named}; upload it first")
        if row.status == FileStatus.FAILED:
            raise refused(param, f"nothing can be learnt from {named}: {row.fault}")
        if row.status == FileStatus.READY:
            break
        if row.status == FileStatus.UPLOADING or time.monotonic() > deadline:
            words = "has not arrived" if row.status == FileStatus.UPLOADING else "is still read through"
            raise refused(param, f"{named} {words}: create the job when the file's status is processed")
        await asyncio.sleep(LOOK_SECONDS)
    if not Purpose(row.purpose).is_data:
        raise refused(param, f"{named} has the purpose {row.purpose} and is not read through: upload it as fine-tune")
    return row
