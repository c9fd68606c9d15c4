"""Drafts: submissions as they become jobs that can be stored, one step after another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.errors import ApiError
from muster.api.core.submission.facts import SubmissionFacts
from muster.documents.document import Document
from muster.recipe.document import JobSpec, Submission, parse_job
from muster.words.base import DocumentProblem, InvalidDocument
from muster.words.redaction import redact, redact_values, secrets_in


@dataclass(frozen=True)
class InputCommit:
    """A commit of another job that the job will read, and the path of the field that names it."""

    path: str
    folder: str
    step: int


@dataclass(frozen=True)
class SubmissionDraft:
    """A submission with every default filled in. `faults` say why it would be refused; without any it can be stored.
    `files` are the addresses of the uploaded files that it names, by their ids, and `inputs` the commits of other jobs.

    In the transaction that stores the job, each of `conditions` is asked before its rows are written, and may refuse
    it by an ApiError; each of `companions`, which is given the job's id, then writes what belongs to the job.
    """

    name: str
    namespace: str
    project: str
    labels: dict[str, str]
    spec: JobSpec
    faults: tuple[DocumentProblem, ...] = ()
    warnings: tuple[DocumentProblem, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[InputCommit, ...] = ()
    conditions: tuple[Callable[[AsyncSession], Awaitable[None]], ...] = ()
    companions: tuple[Callable[[AsyncSession, str], Awaitable[None]], ...] = ()

    def with_faults(self, *faults: DocumentProblem) -> SubmissionDraft:
        return replace(self, faults=(*self.faults, *faults)) if faults else self


# A step fills in or checks one thing. It does no IO but for looking whether paths of this machine exist.
Step = Callable[[SubmissionDraft, SubmissionFacts], SubmissionDraft]


def parse_submission(document: Document) -> Submission:
    """Raises ApiError invalid_job with its faults and their places; no value of `runtime.env` is repeated in one."""
    try:
        return parse_job(document.data)
    except InvalidDocument as invalid:
        located = tuple(document.located(fault) for fault in invalid.problems)
        raise invalid_job(_without_secrets(located, secrets_in(document.data)), invalid.count) from None


def invalid_job(faults: tuple[DocumentProblem, ...], count: int = 0) -> ApiError:
    """The refusal of a job. `count` is how many faults there are in all, if not all of them are listed."""
    first, more = faults[0], len(faults) - 1
    rest = f" ({more} more in `errors`)" if more else ""
    if count > len(faults):
        rest = f" ({count - 1:,} more, of which `errors` names {more})"
    return ApiError("invalid_job", f"The job is not valid: {first}{rest}", errors=faults)


def _without_secrets(faults: tuple[DocumentProblem, ...], secrets: frozenset[str]) -> tuple[DocumentProblem, ...]:
    return tuple(
        replace(f, path=redact_values(f.path, secrets), message=redact_values(f.message, secrets))
        if f.path.startswith("spec.runtime")
        else replace(f, message=redact(f.message))
        for f in faults
    )
