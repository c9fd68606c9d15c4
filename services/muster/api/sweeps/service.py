"""Operations on sweeps: create, find, cancel. The controller does the rest."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from muster.api.core.access import may_act
from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Principal
from muster.api.core.database.tables import SweepRow
from muster.api.core.errors import ApiError, database_unavailable
from muster.api.core.http.body import off_the_loop
from muster.api.core.idempotency import AttemptedRequest
from muster.api.core.services import Services
from muster.api.core.submission.drafts import SubmissionDraft
from muster.api.core.submission.service import SubmissionService
from muster.api.sweeps import repository
from muster.api.sweeps.controller import SweepWork
from muster.api.sweeps.schemas import Summary
from muster.api.sweeps.trials import SweepDraft, TrialFaults, submissions_of
from muster.documents.document import Document
from muster.recipe.document import Submission
from muster.recipe.sweep import SweepMetric, SweepPhase, parse_sweep
from muster.words.base import DocumentProblem, InvalidDocument, dump
from muster.words.names import Label

_TRIES = 3


@dataclass(frozen=True)
class CreatedSweep:
    """A sweep that was stored. `replayed` says that an earlier request with the same Idempotency-Key stored it."""

    row: SweepRow
    replayed: bool


@dataclass(frozen=True)
class CheckedSweep:
    """A sweep's document with every trial that it makes, and what is wrong with any of them."""

    draft: SweepDraft
    submissions: list[Submission]
    faults: TrialFaults


def parse_document(body: Document) -> CheckedSweep:
    """The sweep and all its trials. Raises ApiError invalid_sweep with its faults and their places."""
    try:
        sweep, template = parse_sweep(body.data)
    except InvalidDocument as invalid:
        raise invalid_sweep(tuple(body.located(fault) for fault in invalid.problems)) from None
    drafted = SweepDraft(str(uuid.uuid4()), sweep, template)
    submissions, faults = submissions_of(drafted)
    if faults.by_fault:
        raise invalid_sweep(tuple(body.located(fault) for fault in faults.problems()))
    return CheckedSweep(drafted, submissions, faults)


def invalid_sweep(faults: tuple[DocumentProblem, ...]) -> ApiError:
    rest = f" ({len(faults) - 1} more in `errors`)" if len(faults) > 1 else ""
    return ApiError("invalid_sweep", f"The sweep is not valid: {faults[0]}{rest}", errors=faults)


async def create(
    services: Services, caller: Principal, body: Document, attempted: AttemptedRequest | None
) -> CreatedSweep:
    """Store the sweep, all of whose trials would be accepted now. Raises ApiError; then nothing was stored."""
    if (before := await _replay(services, attempted)) is not None:
        return before
    checked = await off_the_loop(lambda: parse_document(body))
    first = await _drafted(services, caller, checked)
    row = _row(caller, checked, first, attempted)
    for _ in range(_TRIES):
        try:
            async with services.database.write() as session:
                session.add(row)
                after = {"name": row.name, "trials": checked.draft.sweep.size}
                record(session, caller, AuditedAct("sweep.created", row.id, row.project, after=after))
        except IntegrityError:
            if (before := await _replay(services, attempted)) is not None:
                return before
            await _refuse_taken_name(services, row)
            row = _row(caller, checked, first, attempted)
            continue  # whoever was in the way has ended
        services[SweepWork].wake.set()
        return CreatedSweep(row, replayed=False)
    raise database_unavailable()


async def _drafted(services: Services, caller: Principal, checked: CheckedSweep) -> SubmissionDraft:
    """The first trial with all its defaults. Raises ApiError for what the platform or the project refuses of any."""
    first: SubmissionDraft | None = None
    judged = dict[
        str, SubmissionDraft
    ]()  # trials that differ by numbers alone are judged once: mostly that is all of them
    shapes = await off_the_loop(lambda: [_shape(submission) for submission in checked.submissions])
    for number, (shape, submission) in enumerate(zip(shapes, checked.submissions, strict=True), 1):
        if (drafted := judged.get(shape)) is None:
            drafted = judged[shape] = await services[SubmissionService].draft(caller, submission)
        checked.faults.add(number, drafted.faults)
        first = first or drafted
    if checked.faults.by_fault or first is None:
        raise invalid_sweep(checked.faults.problems())
    return first


def _shape(submission: Submission) -> str:
    """All of a trial that the platform or its project may refuse. Of what it trains these are words, as addresses and
    names; of numbers only the step of a commit that it reads."""
    spec = dump(submission.spec)
    spec["training"] = _without_numbers(spec.get("training"))
    return json.dumps([submission.namespace, submission.labels.get(Label.PROJECT), spec], sort_keys=True)


def _without_numbers(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _without_numbers(inner, name) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_numbers(inner, key) for inner in value]
    return 0 if isinstance(value, int | float) and key != "step" else value


def _row(
    caller: Principal, checked: CheckedSweep, first: SubmissionDraft, attempted: AttemptedRequest | None
) -> SweepRow:
    sweep, evaluation = checked.draft.sweep, first.spec.training_config.evaluation
    assert evaluation is not None, "each trial has one"
    metric = SweepMetric(name=evaluation.metric, better=evaluation.direction())
    summary = Summary(because=f"{sweep.size} trials are to come")
    return SweepRow(
        id=checked.draft.id,
        name=checked.draft.name,
        project=first.project,
        owner=caller.person,
        granted=str(caller.role_in(first.project)) if caller.signed_in is not None else None,
        document={"sweep": dump(sweep), "job": _pinned(checked.draft, first)},
        metric=dump(metric),
        created_at=time.time(),
        live=True,
        cancelled=False,
        phase=SweepPhase.RUNNING,
        summary=summary.model_dump(mode="json"),
        version=0,
        finished_at=None,
        request=f"{attempted.owner}:{attempted.key}" if attempted is not None else None,
        request_hash=attempted.body_hash if attempted is not None else "",
    )


def _pinned(drafted: SweepDraft, first: SubmissionDraft) -> dict[str, Any]:
    """The job's document with the folders and steps of the commits that it reads: a name means the newest job that has
    it, and `best` the best by then, which would not be the same to every trial. The namespace and the project are the
    first trial's, too."""
    template = dict(drafted.template)
    for path, source in first.spec.input_commits().items():
        if source.uri is not None and not any(each.startswith(path) for each in drafted.sweep.parameters):
            template = _with(template, ["spec", *path.split(".")], {"uri": source.uri, "step": source.step})
    return template


def _with(document: Mapping[str, Any], path: list[str], more: dict[str, Any]) -> dict[str, Any]:
    """The document with `more` in the mapping at that path, where there is one."""
    if not path:
        return {**document, **more}
    inner = document.get(path[0])
    return {**document, path[0]: _with(inner, path[1:], more)} if isinstance(inner, Mapping) else dict(document)


async def _replay(services: Services, attempted: AttemptedRequest | None) -> CreatedSweep | None:
    """Return the sweep that this request created before, or None. Raises ApiError idempotency_key_reused."""
    if attempted is None:
        return None
    async with services.database.read() as session:
        row = await repository.by_request(session, f"{attempted.owner}:{attempted.key}")
    if row is None:
        return None
    if row.request_hash != attempted.body_hash:
        detail = f"Idempotency-Key {attempted.key!r} came before with another body (it made sweep {row.id})."
        raise ApiError("idempotency_key_reused", f"{detail} Use a new key for a new request.")
    return CreatedSweep(row, replayed=True)


async def _refuse_taken_name(services: Services, row: SweepRow) -> None:
    async with services.database.read() as session:
        holder = await repository.live_with_name(session, row.project, row.name)
    if holder is not None:
        detail = f"Project {row.project!r} has a live sweep named {row.name!r} ({holder}). "
        detail += "Choose another name, or wait for that sweep or cancel it."
        raise ApiError("sweep_name_taken", detail, extra={"sweepId": holder})


async def find(services: Services, caller: Principal, sweep_id: str) -> SweepRow:
    """Raises ApiError sweep_not_found, in the same words for what is not there and what the caller may not see."""
    async with services.database.read() as session:
        return seen(caller, await repository.get(session, sweep_id), sweep_id)


def seen(caller: Principal, row: SweepRow | None, sweep_id: str) -> SweepRow:
    if row is None or caller.role_in(row.project) is None:
        raise ApiError("sweep_not_found", f"There is no sweep {sweep_id!r}; `muster sweep ls` lists the sweeps.")
    return row


async def cancel(services: Services, caller: Principal, sweep_id: str) -> SweepRow:
    """Ask for the sweep's end: no trial starts any more, and those that run are cancelled. Repeating it is harmless.

    Raises ApiError sweep_not_found, forbidden, sweep_finished.
    """
    async with services.database.write() as session:
        row = seen(caller, await repository.get(session, sweep_id, lock=True), sweep_id)
        if not may_act(caller, row.project, row.owner):
            detail = f"Sweep {row.name!r} is {row.owner}'s; its owner or a maintainer of the project may do that."
            raise ApiError("forbidden", detail)
        _request_end(session, caller, row)
    services[SweepWork].wake.set()
    return row


def _request_end(session: AsyncSession, caller: Principal, row: SweepRow) -> None:
    if row.cancelled:
        return
    if not row.live:
        raise ApiError("sweep_finished", f"Sweep {row.name!r} is {row.phase}, so it can't be cancelled any more.")
    row.cancelled, row.phase = True, SweepPhase.STOPPING
    record(session, caller, AuditedAct("sweep.cancelled", row.id, row.project, {"cancel": False}, {"cancel": True}))
