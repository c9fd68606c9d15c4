"""From a document to a job that can be stored: parsed, defaults filled in, `from.job` turned into a folder."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from typing import Any

from muster.api.db import Database
from muster.api.errors import ApiError
from muster.api.jobs import repository
from muster.api.services import Services
from muster.api.tables import JobRow
from muster.contract.address import Address, AddressError, job_folder, parse_address
from muster.contract.base import InvalidDocument, Problem
from muster.contract.model_config import FromCommit
from muster.contract.redaction import redact, redact_values, secrets_in
from muster.contract.spec import JobSpec, Submission, parse_job
from muster.documents.document import Document
from muster.storage.errors import StoreError
from muster.storage.listing import CommitListing

_FROM = "spec.training.model.from"
# They decide which programs and libraries a process loads: a job's own affair in a container, not on a shared machine.
_LOADER_VARIABLES = re.compile(
    r"(LD|DYLD|GIT|SSH)_\w*|PYTHON\w*|PERL5\w*|BASH_ENV|ENV|BROWSER|PAGER|EDITOR|NODE_OPTIONS|PATH|SHELL"
)


@dataclass(frozen=True)
class Draft:
    """A submission with every default filled in. `faults` say why it would be refused; without any it can be stored."""

    name: str
    namespace: str
    labels: dict[str, str]
    spec: JobSpec
    faults: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


def parse_submission(document: Document) -> Submission:
    """Raises ApiError invalid_job with its faults and their places; no value of `runtime.env` is repeated in one."""
    try:
        return parse_job(document.data)
    except InvalidDocument as invalid:
        told = tuple(document.located(fault) for fault in invalid.problems)
        raise invalid_job(_without_secrets(told, secrets_in(document.data)), invalid.count) from None


def invalid_job(faults: tuple[Problem, ...], count: int = 0) -> ApiError:
    """The refusal of a job. `count` is how many faults there are in all, where not all of them are told."""
    first, more = faults[0], len(faults) - 1
    rest = f" ({more} more in `errors`)" if more else ""
    if count > len(faults):
        rest = f" ({count - 1:,} more, of which `errors` names {more})"
    return ApiError("invalid_job", f"The job is not valid: {first}{rest}", errors=faults)


async def draft(services: Services, submission: Submission) -> Draft:
    """Fill in what depends on the platform. Reads the database, where it must, and commit files; writes nothing."""
    namespace = submission.namespace or "default"
    spec, default_checkpoint_uri = submission.spec, services.settings.default_checkpoint_uri
    if spec.checkpoint.uri is None and default_checkpoint_uri is not None:
        spec = _with(spec, checkpoint=_with(spec.checkpoint, uri=default_checkpoint_uri))
    faults = _loader_variables(spec) if services.settings.cluster == "local" else ()
    source = spec.training.model.from_
    if source is not None and source.job is not None and source.uri is None:
        found = await _resolve(services.database, services.commits, namespace, source.job, source)
        if isinstance(found, Problem):
            faults = (*faults, found)
        else:
            model = _with(spec.training.model, from_=_with(source, uri=found))
            spec = _with(spec, training=_with(spec.training, model=model))
    return Draft(submission.name, namespace, submission.labels, spec, faults, await _warnings(spec))


def _loader_variables(spec: JobSpec) -> tuple[Problem, ...]:
    return tuple(
        Problem(
            f"spec.runtime.env[{index}].name",
            f"{variable.name} decides what a process of this machine loads, and may only be set where workers run in "
            "containers; leave it out",
        )
        for index, variable in enumerate(spec.runtime.env)
        if _LOADER_VARIABLES.fullmatch(variable.name)
    )


async def _resolve(
    database: Database, commits: CommitListing, namespace: str, reference: str, source: FromCommit
) -> str | Problem:
    """The folder of the job that `reference` means, if it has the commit; else what is wrong.

    A name means the newest job of that name, as everywhere. An older one that has the commit is never taken instead of
    it, but offered by its id.
    """
    async with database.read() as session:
        candidates = await repository.named(session, namespace, reference)
    if not candidates:
        return Problem(f"{_FROM}.job", f"there is no job {reference!r} in namespace {namespace!r}")
    newest, *older = candidates
    if (folder := await _folder_with(commits, newest, source.step)) is not None:
        return str(folder)
    offer = ""
    for row in older:
        if await _folder_with(commits, row, source.step) is not None:
            offer = f"; an older job of that name has it: name that one by its id, {row.id}"
            break
    if isinstance(source.step, int):
        message = (
            f"job {reference!r} ({newest.id}) has no commit of step {source.step}"
            f"{offer or '; `muster checkpoints ls` lists them'}"
        )
        return Problem(f"{_FROM}.step", message)
    wait = "; wait for its first checkpoint (event checkpoint.committed)"
    message = f"job {reference!r} ({newest.id}) has no commit yet{offer or wait}"
    return Problem(f"{_FROM}.job", message)


def folder_of(row: JobRow) -> Address | None:
    """Where the job commits; None where it does not say (it was not submitted through this API)."""
    base = (row.spec.get("checkpoint") or {}).get("uri")
    try:
        return job_folder(str(base), row.id) if base else None
    except AddressError:  # accepted by an older Muster
        return None


async def _folder_with(commits: CommitListing, row: JobRow, step: int | str) -> Address | None:
    folder = folder_of(row)
    return folder if folder is not None and await _has_commit(commits, folder, row, step) else None


async def _has_commit(commits: CommitListing, folder: Address, row: JobRow, step: int | str) -> bool:
    try:
        steps = [commit.step for commit in await asyncio.to_thread(commits.read, folder)]
    except StoreError:  # we may not look into it: the operator has seen what is in there
        seen = row.status.get("checkpoint")
        return seen is not None and (not isinstance(step, int) or step <= int(seen["step"]))
    return step in steps if isinstance(step, int) else bool(steps)


def _with(model: Any, /, **changes: Any) -> Any:
    return model.model_copy(update=changes)


def _without_secrets(faults: tuple[Problem, ...], secrets: frozenset[str]) -> tuple[Problem, ...]:
    return tuple(
        replace(f, path=redact_values(f.path, secrets), message=redact_values(f.message, secrets))
        if f.path.startswith("spec.runtime")
        else replace(f, message=redact(f.message))
        for f in faults
    )


async def _warnings(spec: JobSpec) -> tuple[Problem, ...]:
    """What is allowed but seldom meant, or looks wrong from this machine."""
    sources = [(f"spec.training.data.train[{i}].source", s.source) for i, s in enumerate(spec.training.data.train)]
    if spec.training.evaluation:
        data = spec.training.evaluation.data
        sources += [(f"spec.training.evaluation.data[{i}].source", s.source) for i, s in enumerate(data)]
    odd = tuple(Problem(f"spec.training.{path}", words) for path, words in spec.training.oddities())
    unseen = await asyncio.to_thread(lambda: [w for path, source in sources if (w := _source_warning(path, source))])
    return (*odd, *unseen)


def _source_warning(path: str, source: str) -> Problem | None:
    address = parse_address(source)
    if address.scheme != "file" or any(letter in address.path for letter in "*?["):
        return None
    if not address.is_absolute:
        return Problem(path, "is a relative path: a worker does not share your working directory; give an absolute one")
    try:
        if not address.local.exists():
            there = f"there is no {address.path[:300]!r} on the API's machine"
            return Problem(path, f"{there}; the workers need it on theirs")
    except (OSError, AddressError):
        return Problem(path, "can't be looked up on the API's machine")
    return None
