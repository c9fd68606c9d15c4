"""Data of jobs that nobody has submitted yet, looked at by the trainer's own tool, one job at a time."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from muster.api.core.database.tables import ProjectRow
from muster.api.core.errors import ApiError
from muster.api.core.http.reply import Reply
from muster.api.core.limits import ProjectLimits, is_under, read_addresses
from muster.api.core.submission.drafts import SubmissionDraft, invalid_job
from muster.api.data.exports.making import available
from muster.api.data.tool import ToolEnd, run_module
from muster.words.base import DocumentProblem, dump
from muster.words.data_report import DataReport

if TYPE_CHECKING:  # it has an Inspections
    from muster.api.core.services import Services

TOOL = "muster.trainer.train.inspection"
WAIT_SECONDS = 10.0  # that a request waits for a report before it is answered 202
SECONDS_MAX = 300.0  # of one look
KEPT_SECONDS = 600.0  # that a report is kept, and a refusal FAILURE_SECONDS
FAILURE_SECONDS = 5.0
KEPT_MAX = 64
OWN_SETTINGS = ("MUSTER_", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
USERS_FAULTS = (2, 80)  # exit codes of the tool
STORAGE_FAILS = 83


class Inspection(Reply):
    """`reading`: ask again. `ready`: what the trainer found, as `GET /jobs/{id}/data` reports it for a job."""

    state: Literal["reading", "ready"]
    report: DataReport | None = None


@dataclass
class _DataLook:
    """One job's data. `task` returns the report, or raises ApiError."""

    task: asyncio.Task[dict[str, Any]]
    began_at: float = field(default_factory=time.monotonic)

    def is_over(self, now: float) -> bool:
        if not self.task.done():
            return False
        kept = FAILURE_SECONDS if self.task.cancelled() or self.task.exception() else KEPT_SECONDS
        return now - self.began_at > kept


class DataInspections:
    """Data inspections that this process is running, and the reports of recent ones."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(1)  # a look takes several cores
        self._looks: dict[str, _DataLook] = {}

    async def look(self, project: str, training: dict[str, Any]) -> dict[str, Any] | None:
        """The report of this training's data, None while it is being made. Raises ApiError invalid_job,
        storage_unavailable and inspection_unavailable."""
        if not available():
            raise _unavailable("The API has no trainer beside it, which reads data as a job does")
        now = time.monotonic()
        self._looks = {key: each for key, each in self._looks.items() if not each.is_over(now)}
        document = json.dumps(training, sort_keys=True)
        key = hashlib.sha256(f"{project}\n{document}".encode()).hexdigest()
        inspection = self._looks.get(key)
        if inspection is None:
            if len(self._looks) >= KEPT_MAX:
                raise ApiError("rate_limited", "Too much data is being inspected.", headers={"Retry-After": "30"})
            inspection = self._looks[key] = _DataLook(asyncio.create_task(self._report(document)))
            inspection.task.add_done_callback(
                lambda ended: ended.cancelled() or ended.exception()
            )  # if nobody asks again
        done, _ = await asyncio.wait([inspection.task], timeout=WAIT_SECONDS)
        return inspection.task.result() if done else None

    async def stop(self) -> None:
        for each in self._looks.values():
            each.task.cancel()
        await asyncio.gather(*(each.task for each in self._looks.values()), return_exceptions=True)

    async def _report(self, training: str) -> dict[str, Any]:
        # The tool needs what reaches storage, and nothing of the API's own: database, keys, name at the hub.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OWN_SETTINGS)}
        async with self._room:
            try:
                async with asyncio.timeout(SECONDS_MAX):
                    ended = await run_module(TOOL, "--job", "--json", given=training.encode(), environment=environment)
            except TimeoutError:
                raise _unavailable(f"It takes longer than {SECONDS_MAX:g} s") from None
        if ended.code == 0:
            return dump(DataReport.model_validate_json(ended.said))
        raise _refusal(ended)


async def refuse_what_the_api_may_not_read(services: Services, drafted: SubmissionDraft) -> None:
    """The API has rights of its own, which reach further than a job's: on the caller's word it reads uploaded files,
    whose project is known, and what an admin has said that the project's jobs may read. Raises ApiError."""
    async with services.database.read() as session:
        project = await session.get_one(ProjectRow, drafted.project)
    named = ProjectLimits.model_validate(project.limits).data_prefixes or ()
    # No folders: in a cluster they are on the workers' disks, and on one machine a link that somebody puts there would
    # lead the API, which no sandbox holds, to its own files.
    allowed = [prefix for prefix in named if not prefix.startswith("file:")]
    public = ("hf://",)  # asked without a token
    outside = [
        (path, address)
        for path, address in read_addresses(drafted.spec)
        if not address.startswith(public) and not any(is_under(address, prefix) for prefix in allowed)
    ]
    if outside:
        places = ", ".join(f"{path} ({address[:200]})" for path, address in outside[:5])
        raise _unavailable(
            f"The API reads uploaded files, what is public at the hub, and what lies in storage under the dataPrefixes "
            f"of project {drafted.project!r}, and not {places}; upload it"
        )


def with_ids(refused: ApiError, ids: Mapping[str, str]) -> ApiError:
    """The same in the words of who named uploaded files by their ids, and not by where they lie."""

    def public_text(text: str) -> str:
        for address, file_id in ids.items():
            text = text.replace(address, file_id).replace(address.removeprefix("file://"), file_id)
        return text

    faults = tuple(DocumentProblem(fault.path, public_text(fault.message)) for fault in refused.errors)
    return replace(refused, detail=public_text(refused.detail), errors=faults)


def _refusal(ended: ToolEnd) -> ApiError:
    words = ended.complained.decode(errors="replace").strip()
    try:
        said = str(json.loads(words.splitlines()[-1])["error"])
    except (ValueError, IndexError, KeyError, TypeError):
        said = ""
    if ended.code in USERS_FAULTS and said:
        return invalid_job((DocumentProblem("spec.training.data", said),))
    if ended.code == STORAGE_FAILS and said:
        return ApiError("storage_unavailable", said, headers={"Retry-After": "30"})
    how = f"was ended by signal {-ended.code}" if ended.code < 0 else f"ended with code {ended.code}"
    return _unavailable(f"The process that read the data {how}: {said or words[-300:]}")


def _unavailable(why: str) -> ApiError:
    return ApiError("inspection_unavailable", f"{why}; or run `muster data inspect` where the data and a trainer are.")
