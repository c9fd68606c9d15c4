"""A job as somebody types it on a page: its faults at their lines, what it would do and cost, and making it."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, replace
from typing import Any

from muster.api.core import idempotency
from muster.api.core.callers import Principal
from muster.api.core.database.tables import JobRow
from muster.api.core.errors import ApiError
from muster.api.core.http.body import document_of, off_the_loop
from muster.api.core.idempotency import AttemptedRequest
from muster.api.core.planning.whole_plan import whole_plan
from muster.api.core.services import Services
from muster.api.core.submission import clone
from muster.api.core.submission.drafts import parse_submission
from muster.api.core.submission.service import SubmissionService, SubmittedJob
from muster.api.core.submission.storing import ExtraRows
from muster.documents.document import Document
from muster.plan.proposal import JobWishes, ProposalFacts, ProposedJob, preliminary
from muster.plan.proposal import propose as propose_job
from muster.recipe.document import Submission
from muster.recipe.job_inputs import with_addresses
from muster.storage.errors import StorageError
from muster.storage.proposing import look_for_proposal
from muster.words.address import parse_address
from muster.words.base import DocumentProblem

LOOK_SECONDS_MAX = 4.0  # somebody waits for the form's answer, and the rules of thumb are an answer too


@dataclass(frozen=True)
class CheckedText:
    """Result of checking a text: `faults` say why it would be refused, or fail at its start, each with its line where
    the text has one. `plan` is the dry run's reply (replies.Plan); None for a text that would be refused."""

    faults: tuple[DocumentProblem, ...] = ()
    plan: dict[str, Any] | None = None


async def check(services: Services, caller: Principal, text: str, original: JobRow | None = None) -> CheckedText:
    """Return what would become of the text if it were submitted. Nothing is written. `original` is the job from which
    it was cloned."""
    try:
        document, submission = await _read(caller, text, original)
        plan = await whole_plan(services, caller, submission)
    except ApiError as refused:
        if refused.status >= 500:
            raise
        return CheckedText(tuple(refused.errors) or (DocumentProblem("", refused.detail),))
    reasons = plan["refusals"] or plan["faults"]
    faults = tuple(document.located(DocumentProblem(each["path"], each["message"])) for each in reasons)
    return CheckedText(faults, plan if plan["accepted"] else None)


async def submit(
    services: Services, caller: Principal, text: str, key: str, original: JobRow | None = None
) -> SubmittedJob:
    """Submit the text. The same text under the same key makes one job, however often it is sent.

    Raises ApiError as a submission does, each fault with its line.
    """
    document, submission = await _read(caller, text, original)
    body_hash = idempotency.hash_of(document.data)
    again = AttemptedRequest(caller.token, "POST /jobs", f"form-{idempotency.hash_of(key, body_hash)}", body_hash)
    extra = ExtraRows(data={"clonedFrom": original.id} if original is not None else {})
    try:
        return await services[SubmissionService].submit(caller, submission, again, extra)
    except ApiError as refused:
        raise replace(refused, errors=tuple(map(document.located, refused.errors))) from None


async def propose(services: Services, caller: Principal, wishes: JobWishes) -> ProposedJob:
    """Return the job that somebody may want, by what its model and data are; by rules of thumb where they can't be
    looked at. The check of its text says why."""
    try:
        submission = parse_submission(Document(preliminary(wishes)))
        drafted = await services[SubmissionService].draft(caller, submission)
        spec = with_addresses(drafted.spec, drafted.files)
        if drafted.faults:
            return propose_job(wishes, ProposalFacts())
        folder = parse_address(spec.training_config.data.train[0].source)
        look = functools.partial(look_for_proposal, spec.training_config, services.settings.cluster == "local")
        answer = await services.folders.run(folder, look, seconds=LOOK_SECONDS_MAX)
    except (ApiError, StorageError):
        return propose_job(wishes, ProposalFacts())
    return propose_job(wishes, answer.facts)


async def _read(caller: Principal, text: str, original: JobRow | None) -> tuple[Document, Submission]:
    def read() -> tuple[Document, Submission]:
        document = document_of(text.encode(), "yaml")
        if original is not None:
            document = dataclasses.replace(document, data=clone.with_values_of(caller, original, document.data))
        return document, parse_submission(document)

    return await off_the_loop(read)
