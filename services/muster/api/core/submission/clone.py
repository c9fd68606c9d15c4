"""A new job like another one, with changes: a JSON merge patch (RFC 7396) on its spec."""

from __future__ import annotations

import copy
import re
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core import idempotency
from muster.api.core.access import checked, owns
from muster.api.core.callers import Principal
from muster.api.core.database.tables import JobRow
from muster.api.core.errors import ApiError
from muster.api.core.http.body import off_the_loop
from muster.api.core.idempotency import AttemptedRequest
from muster.api.core.jobs import repository
from muster.api.core.services import Services
from muster.api.core.submission.drafts import parse_submission
from muster.api.core.submission.service import SubmissionService, SubmittedJob
from muster.api.core.submission.storing import ExtraRows
from muster.documents.document import Document
from muster.recipe.document import JobSpec
from muster.words.base import FAULTS_MAX, DocumentProblem, InvalidDocument, dump, parse
from muster.words.names import DEFAULT_PROJECT, JOB_NAME, Label
from muster.words.redaction import HIDDEN, redact_spec, without_env_values

# A clone starts afresh: what its original was told to do while it ran is not part of what it is.
_NOT_COPIED = ("suspend", "cancel", "cancelReason")
_TRIES = 5
_NAME_LENGTH_MAX = 48


async def clone(
    services: Services, caller: Principal, job_id: str, changes: dict[str, Any], attempted: AttemptedRequest | None
) -> SubmittedJob:
    """Raises ApiError job_not_found, invalid_job, name_taken."""
    for _ in range(_TRIES - 1):
        try:
            return await _clone(services, caller, job_id, changes, attempted)
        except ApiError as error:
            # Of two clones at one moment one must look for another name; a name that was asked for is not replaced.
            if error.code != "name_taken" or changes.get("name"):
                raise
    return await _clone(services, caller, job_id, changes, attempted)


async def _clone(
    services: Services, caller: Principal, job_id: str, changes: dict[str, Any], attempted: AttemptedRequest | None
) -> SubmittedJob:
    async with services.database.read() as session:
        row = checked(caller, await repository.get(session, job_id), job_id)
        replay = await idempotency.recall(session, attempted)
        if replay is not None:
            return SubmittedJob(replay, replayed=True)
        name = changes.get("name") or await free_name(session, row)
    changed = Document(_document(row, name, changes.get("spec") or {}, owns(caller, row)))
    submission = await off_the_loop(lambda: parse_submission(changed))
    extra = ExtraRows(data={"clonedFrom": row.id})
    return await services[SubmissionService].submit(caller, submission, attempted, extra)


async def free_name(session: AsyncSession, row: JobRow) -> str:
    """Return the first free name in the namespace: `demo` → `demo-2`, `demo-2` → `demo-3` …"""
    stem = re.sub(r"-\d{1,6}$", "", row.name)
    taken = await repository.names_like(session, row.namespace, stem[: _NAME_LENGTH_MAX - 7])
    match = re.search(r"-(\d{1,6})$", row.name)
    number = int(match[1]) + 1 if match else 2
    while True:
        suffix = f"-{number}"
        name = stem[: _NAME_LENGTH_MAX - len(suffix)].rstrip("-") + suffix
        if name not in taken and JOB_NAME.fullmatch(name):
            return name
        number += 1


def parse_request(body: Document) -> dict[str, Any]:
    """Raises ApiError invalid_job."""
    document = body.data
    faults: list[DocumentProblem] = []
    if not isinstance(document, dict):
        faults.append(DocumentProblem("", "must be a mapping with name and spec, or nothing"))
    else:
        faults += [
            DocumentProblem(str(key), "unknown key; there are name and spec")
            for key in document
            if key not in ("name", "spec")
        ]
        if not isinstance(document.get("name"), str | None):
            faults.append(DocumentProblem("name", "must be text"))
        if not isinstance(document.get("spec"), dict | None):
            faults.append(DocumentProblem("spec", "must be a mapping: the changes to the spec"))
    if faults:
        problems = tuple(body.located(fault) for fault in faults[:FAULTS_MAX])
        raise ApiError("invalid_job", f"The clone is not valid: {faults[0]}", errors=problems)
    assert isinstance(document, dict)
    return document


def _document(row: JobRow, name: str, changes: dict[str, Any], own: bool) -> dict[str, Any]:
    """Return the document to submit. The values of `runtime.env` in another person's job are hidden, and are refused
    with their paths unless the changes give them again."""
    try:
        parse(JobSpec, row.spec)
    except InvalidDocument as error:
        detail = (
            f"The spec of job {row.name!r} is of another version of Muster and can't be copied: {error.problems[0]}"
        )
        raise ApiError("invalid_job", detail, errors=error.problems) from None
    original = row.spec if own else without_env_values(row.spec)
    spec = {key: value for key, value in original.items() if key not in _NOT_COPIED}
    labels = row.labels | {Label.PROJECT: row.project}
    return {
        "metadata": {"name": name, "namespace": row.namespace, "labels": labels},
        "spec": merge_patch(spec, changes),
    }


def editable(caller: Principal, row: JobRow, name: str) -> dict[str, Any]:
    """The job's document under another name, for somebody to change: without what is as it would be anyway, and without
    secrets, which `with_values_of` puts back. Raises ApiError invalid_job for a spec of another version."""
    whole = _document(row, name, {}, owns(caller, row))
    spec = parse(JobSpec, whole["spec"])
    short = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)
    metadata: dict[str, Any] = {"name": name}
    if row.namespace != "default":
        metadata["namespace"] = row.namespace
    if row.labels or row.project != DEFAULT_PROJECT:
        metadata["labels"] = whole["metadata"]["labels"]
    # A value that is the default of its field and not of its place in the document has to be said.
    same = parse(JobSpec, short) == spec
    return {"metadata": metadata, "spec": redact_spec(short if same else dump(spec))}


def with_values_of(caller: Principal, row: JobRow, document: Any) -> Any:
    """The document with the values of `runtime.env` that `editable` hid, by the variables' names; those of somebody
    else's job stay hidden, and so are refused with their paths."""
    if not owns(caller, row):
        return document
    kept = {each["name"]: each["value"] for each in _env_of({"spec": row.spec}) if each.get("value")}
    filled = copy.deepcopy(document)
    for each in _env_of(filled):
        if each.get("value") == HIDDEN and each.get("name") in kept:
            each["value"] = kept[each["name"]]
    return filled


def _env_of(document: Any) -> list[dict[str, Any]]:
    """The variables of a document that nobody has checked."""
    here = document
    for key in ("spec", "runtime", "env"):
        here = here.get(key) if isinstance(here, dict) else None
    return [each for each in here if isinstance(each, dict)] if isinstance(here, list) else []


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7396: mappings are merged, null removes a key, everything else replaces."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result
