"""Submissions: planned, or stored as jobs. The relay carries them to the cluster afterwards."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy.exc import IntegrityError

from muster.api.core import idempotency
from muster.api.core.callers import Principal
from muster.api.core.database.recent import RecentAnswers
from muster.api.core.database.tables import ProjectRow
from muster.api.core.errors import ApiError, database_unavailable
from muster.api.core.idempotency import AttemptedRequest
from muster.api.core.jobs import repository
from muster.api.core.projects import namespace_of
from muster.api.core.services import Services
from muster.api.core.submission import input_pins
from muster.api.core.submission.admission import admission
from muster.api.core.submission.drafts import Step, SubmissionDraft, invalid_job
from muster.api.core.submission.facts import SubmissionFacts, SubmissionProject, read_facts
from muster.api.core.submission.operator_previews import OperatorPreviews
from muster.api.core.submission.schemas import finding, plan_document
from muster.api.core.submission.storing import NO_EXTRA_ROWS, ExtraRows, JobWriter, accepted
from muster.recipe.document import Submission
from muster.words.names import Label

_TRIES = 3  # a lost race against another process is looked at anew; the second look finds who won


@dataclass(frozen=True)
class SubmittedJob:
    """A job that was stored. `replayed` says that an earlier request with the same Idempotency-Key stored it."""

    document: dict[str, Any]
    replayed: bool


class SubmissionService:
    """Submissions of one app: what it knows is read once (`SubmissionFacts`), and each of `steps` makes the next draft
    of it."""

    def __init__(self, services: Services, steps: Sequence[Step]) -> None:
        self._services, self._steps = services, steps
        self._previews = OperatorPreviews(services.settings)
        self._writer = JobWriter(services.database)
        self._projects = RecentAnswers[SubmissionProject](ProjectRow)
        self._projects.watch(services.database.sessions)

    async def draft(self, caller: Principal, submission: Submission) -> SubmissionDraft:
        """Fill in what depends on the platform and the project. Writes nothing.

        Raises ApiError project_not_found, or forbidden where the caller may not submit to the project.
        """
        facts = await read_facts(self._services, self._projects, caller, submission)
        # In a thread: steps look up every path that the job names. A sweep does so for each trial.
        return await asyncio.to_thread(self._drafted, submission, facts)

    def _drafted(self, submission: Submission, facts: SubmissionFacts) -> SubmissionDraft:
        labels = {key: value for key, value in submission.labels.items() if key not in (Label.PROJECT, Label.OWNER)}
        namespace = submission.namespace or namespace_of(facts.project)
        first = SubmissionDraft(submission.name, namespace, facts.project.name, labels, submission.spec)
        return functools.reduce(lambda draft, step: step(draft, facts), self._steps, first)

    async def plan(self, caller: Principal, submission: Submission) -> dict[str, Any]:
        """Return what a submission would do, also to other jobs, and why it would be refused. Nothing is written."""
        drafted = await self.draft(caller, submission)
        refusals = [finding("invalid_job", fault) for fault in drafted.faults]
        async with self._services.database.read() as session:
            taken = await repository.live_with_name(session, drafted.namespace, drafted.name)
            for condition in drafted.conditions:
                try:
                    await condition(session)
                except ApiError as refused:
                    refusals.append({"code": refused.code, "path": "metadata.labels", "message": refused.detail})
        if taken:
            words = _name_taken(drafted, taken).detail
            refusals.append({"code": "name_taken", "path": "metadata.name", "message": words})
        admitted = None if refusals else await admission(self._services.database, self._previews, caller, drafted)
        return plan_document(drafted, refusals, admitted)

    async def submit(
        self,
        caller: Principal,
        submission: Submission,
        attempted: AttemptedRequest | None,
        extra: ExtraRows = NO_EXTRA_ROWS,
    ) -> SubmittedJob:
        """Store the job, its first event and the reply in one commit. Raises ApiError; then nothing was stored."""
        drafted = await self.draft(caller, submission)
        if drafted.faults:
            # What was right when the request first came may be wrong when it is repeated: the first answer holds.
            if replayed := await self._replay(attempted):
                return replayed
            raise invalid_job(drafted.faults)
        job_id, stored = str(uuid.uuid4()), False
        try:
            drafted, note = await input_pins.reserve(self._services, drafted, job_id)
        except ApiError:
            if replayed := await self._replay(attempted):
                return replayed
            raise
        extra = replace(extra, note=extra.note + note)
        try:
            for _ in range(_TRIES):
                new = accepted(caller, drafted, attempted, extra, job_id)
                try:
                    await self._writer.store(new)
                except IntegrityError:  # of the key, which a first try has stored, or of the name
                    if replayed := await self._replay(attempted):
                        return replayed
                    await self._refuse_taken_name(drafted)
                    continue  # whoever was in the way is gone already
                stored = True
                self._services.metrics.submissions.inc()
                self._services.relay.wake.set()
                return SubmittedJob(new.document, replayed=False)
            raise database_unavailable()
        finally:
            if not stored:
                await input_pins.release(self._services, drafted, job_id)

    async def _replay(self, attempted: AttemptedRequest | None) -> SubmittedJob | None:
        """The first reply to this request, if it has been answered before."""
        if attempted is None:
            return None
        async with self._services.database.read() as session:
            reply = await idempotency.recall(session, attempted)
        return SubmittedJob(reply, replayed=True) if reply is not None else None

    async def _refuse_taken_name(self, drafted: SubmissionDraft) -> None:
        async with self._services.database.read() as session:
            holder = await repository.live_with_name(session, drafted.namespace, drafted.name)
        if holder is not None:
            raise _name_taken(drafted, holder)


def _name_taken(drafted: SubmissionDraft, holder: str) -> ApiError:
    detail = (
        f"Namespace {drafted.namespace!r} has a live job named {drafted.name!r} ({holder}). "
        "Choose another name, or wait for that job or cancel it."
    )
    return ApiError("name_taken", detail, extra={"jobId": holder})
