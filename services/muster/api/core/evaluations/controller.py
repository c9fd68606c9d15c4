"""Controller of evaluations: for each checkpoint of another job it submits one job, and notes what came of it.

An evaluation is a job that the cluster never has. Each round reads the rows and the checkpoints anew, decides
(decisions.py), submits, and writes what it has seen. The row of an evaluation of one checkpoint is written in the
transaction that stores its job, with the step in its key: so there is never a second job for one checkpoint, whoever
races and whatever crashes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import structlog

from muster.api.core import evaluation_rows
from muster.api.core.acting import acting_for, platform_for
from muster.api.core.background import BackgroundWork
from muster.api.core.callers import Principal
from muster.api.core.database.tables import EvaluationRow, EvaluationRunRow, JobRow
from muster.api.core.errors import ApiError
from muster.api.core.evaluations.decisions import REFUSED, EvaluationDecision, EvaluationRun, EvaluationState, decide
from muster.api.core.events import repository as events
from muster.api.core.events.types import events_between
from muster.api.core.idempotency import AttemptedRequest, hash_of
from muster.api.core.jobs import repository as job_rows
from muster.api.core.jobs import service as jobs
from muster.api.core.services import Services
from muster.api.core.submission.drafts import parse_submission
from muster.api.core.submission.service import SubmissionService
from muster.api.core.submission.storing import ExtraRows
from muster.documents.document import Document
from muster.storage.errors import StoreError
from muster.storage.listing import CommitSummary
from muster.words.address import parse_address
from muster.words.base import dump
from muster.words.names import Label
from muster.words.program import EVALUATED
from muster.words.status import JobStatus, Phase

log = structlog.get_logger("muster.api.evaluations")

# How often evaluations are looked at: a checkpoint that retention removes sooner is not one that was kept.
EVALUATION_SECONDS = 2.0
# Of the jobs whose document names none: evaluations wait for everybody, and make room for everybody.
PRIORITY = -100
_ROUTE = "POST /jobs evaluation"
_NAME_LENGTH_MAX = 48
_NOT_COPIED = ("suspend", "cancel", "cancelReason")


class EvaluationWork(BackgroundWork):
    """The controller's rounds."""


@dataclass(frozen=True)
class _EvaluationFacts:
    """An evaluation as it was read, before the checkpoints of its target were listed."""

    evaluation: EvaluationRow
    row: JobRow
    target: JobRow | None
    runs: Sequence[tuple[EvaluationRunRow, JobRow | None]]

    @property
    def after(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.row.spec["program"]["after"])

    @property
    def token(self) -> str:
        return f"evaluation-{self.row.id}"


async def step(services: Services) -> bool:
    """Carry every live evaluation on. Raises the database's refusals."""
    async with services.database.read() as session:
        ids = [row.id for _, row in await evaluation_rows.live(session)]
    for job_id in ids:
        await _carry_on(services, job_id)
    return False


async def _carry_on(services: Services, job_id: str) -> None:
    async with services.database.read() as session:
        row, evaluation = await job_rows.get(session, job_id), await session.get(EvaluationRow, job_id)
        if row is None or evaluation is None or not row.live:
            return
        target = await job_rows.get(session, evaluation.target_id)
        seen = _EvaluationFacts(evaluation, row, target, await evaluation_rows.runs(session, job_id))
    # After the target was read: where that had ended, nothing is saved any more that this listing does not show.
    checkpoints, hindrance = await _checkpoints(services, seen)
    decision = decide(_situation(seen, checkpoints), hindrance)
    if decision.phase in (Phase.STOPPING, Phase.CANCELLED):
        await _cancel(services, seen)
    if decision.starts:
        hindrance = await _start(services, seen, decision.starts)
        async with services.database.read() as session:
            seen = _EvaluationFacts(evaluation, row, target, await evaluation_rows.runs(session, job_id))
        decision = decide(_situation(seen, checkpoints), hindrance)
    await _keep(services, seen, decision)


async def _checkpoints(services: Services, seen: _EvaluationFacts) -> tuple[tuple[CommitSummary, ...] | None, str]:
    """The checkpoints of the target, or why they can't be listed."""
    folder = parse_address(seen.after["uri"])
    try:
        return await services.folders.run(folder, services.commits.read, folder), ""
    except StoreError as error:
        return None, f"the checkpoints can't be listed: {error}"


def _situation(seen: _EvaluationFacts, checkpoints: Sequence[CommitSummary] | None) -> EvaluationState:
    return EvaluationState(
        each=seen.after["each"],
        target=seen.after["job"],
        target_ended=seen.target is None or not seen.target.live,
        checkpoints=None if checkpoints is None else [(each.step, each.best) for each in checkpoints],
        runs=[EvaluationRun(run.step, _phase_of(run, job)) for run, job in seen.runs],
        cancelled=bool(seen.row.spec.get("cancel")),
        suspended=bool(seen.row.spec.get("suspend")),
    )


def _phase_of(run: EvaluationRunRow, job: JobRow | None) -> str:
    """A job that is gone was deleted, which only an ended one can be."""
    if job is not None:
        return job.phase
    return run.phase if EvaluationRun(run.step, run.phase).over else Phase.CANCELLED


# --- starting and ending the jobs ---


async def _start(services: Services, seen: _EvaluationFacts, steps: Sequence[int]) -> str:
    """Submit the evaluations of these steps as their owner. Return what hinders the next one, empty where nothing
    does."""
    row = seen.row
    caller = await acting_for(services, seen.token, row.owner, row.project, seen.evaluation.granted)
    if caller is None:
        return f"{row.owner} may not submit to project {row.project!r} any more"
    hindrance = ""
    for each in steps:
        try:
            await _submit(services, caller, seen, each)
        except ApiError as error:
            if error.code == "database_unavailable":
                raise
            if error.code != "invalid_job":
                hindrance = f"the evaluation of step {each} can't start yet: {error.detail}"
                break
            if await _is_there(services, seen, each):
                await _refuse(services, seen, each, error.detail)
    await _cancel_if_late(services, seen)
    return hindrance


async def _submit(services: Services, caller: Principal, seen: _EvaluationFacts, step: int) -> None:
    evaluation_id = seen.row.id
    document = document_of(seen.row, seen.evaluation.target_id, step)
    attempted = AttemptedRequest(caller.token, _ROUTE, f"{evaluation_id}/step-{step}", hash_of(document))
    extra = ExtraRows(
        rows=lambda job_id: [_run_row(evaluation_id, step, job_id)],
        data={"evaluation": evaluation_id, "step": step},
        note=f", the evaluation {seen.row.name} of step {step} of job {seen.after['job']}",
    )
    await services[SubmissionService].submit(caller, parse_submission(Document(document)), attempted, extra)


def document_of(row: JobRow, target_id: str, step: int) -> dict[str, Any]:
    """The document of the job that evaluates a checkpoint: the same for the same checkpoint, whenever it is made."""
    program = row.spec["program"]
    commit = {"job": target_id, "uri": program["after"]["uri"], "step": step}
    inputs = {**program["inputs"], EVALUATED: commit}
    spec = {key: value for key, value in row.spec.items() if key not in _NOT_COPIED}
    suffix = f"-{step}"
    labels = {Label.PROJECT: row.project, Label.EVALUATION: row.id, Label.EVALUATED_STEP: str(step)}
    return {
        "metadata": {
            "name": row.name[: _NAME_LENGTH_MAX - len(suffix)].rstrip("-") + suffix,
            "namespace": row.namespace,
            "labels": row.labels | labels,
        },
        "spec": {
            **spec,
            "priority": spec.get("priority") or PRIORITY,
            "program": {**program, "after": None, "inputs": inputs},
        },
    }


def _run_row(evaluation_id: str, step: int, job_id: str | None, fault: str | None = None) -> EvaluationRunRow:
    return EvaluationRunRow(
        evaluation_id=evaluation_id,
        step=step,
        job_id=job_id,
        phase=REFUSED if job_id is None else Phase.QUEUED,
        results={},
        fault=fault[:1024] if fault is not None else None,
    )


async def _is_there(services: Services, seen: _EvaluationFacts, step: int) -> bool:
    """Return whether the checkpoint is still kept: one that retention removed meanwhile is none to evaluate."""
    checkpoints, _ = await _checkpoints(services, seen)
    return checkpoints is not None and any(each.step == step for each in checkpoints)


async def _refuse(services: Services, seen: _EvaluationFacts, step: int, why: str) -> None:
    """Note that the checkpoint has no job: what was valid when the evaluation was submitted is not any more."""
    async with services.database.write() as session:
        if await session.get(EvaluationRunRow, (seen.row.id, step)) is None:
            session.add(_run_row(seen.row.id, step, None, why))


async def _cancel_if_late(services: Services, seen: _EvaluationFacts) -> None:
    """Cancel what was started while somebody cancelled the evaluation."""
    async with services.database.read() as session:
        row = await job_rows.get(session, seen.row.id)
        if row is not None and row.live and not row.spec.get("cancel"):
            return
        runs = await evaluation_rows.runs(session, seen.row.id)
    await _cancel(services, _EvaluationFacts(seen.evaluation, seen.row, seen.target, runs))


async def _cancel(services: Services, seen: _EvaluationFacts) -> None:
    for _, job in seen.runs:
        if job is None or not job.live or job.spec.get("cancel"):
            continue
        try:
            await jobs.cancel(services, platform_for(seen.token, seen.row.owner, seen.row.project), job.id)
        except ApiError as error:
            if error.code not in ("job_finished", "job_not_found"):  # it has ended meanwhile
                raise


# --- what was seen ---


async def _keep(services: Services, seen: _EvaluationFacts, decision: EvaluationDecision) -> None:
    """Write what was seen and decided, where that is news."""
    now, changed = time.time(), False
    async with services.database.write() as session:
        row = await job_rows.get(session, seen.row.id, lock=True)
        if row is None or not row.live or row.spec_version != seen.row.spec_version:
            return  # cancelled meanwhile: the next round looks anew
        for run, job in await evaluation_rows.runs(session, row.id):
            _note(run, job)
        before = JobStatus.model_validate(row.status)
        after = before.model_copy(
            update={
                "phase": decision.phase,
                "because": decision.because,
                "code": "Finished" if decision.phase.terminal else "Evaluating",
                "since": before.since if before.phase is decision.phase else now,
                "finished_at": now if decision.phase.terminal else None,
            }
        )
        if after != before:
            changed = True
            row.status, row.phase = dump(after), after.phase
            row.live, row.finished_at = not after.phase.terminal, after.finished_at
            await session.flush()
            await events.append(session, row.id, list(events_between(before, after, now)))
    if changed:
        services.hub.tell(seen.row.id)


def _note(run: EvaluationRunRow, job: JobRow | None) -> None:
    """Take over what the job has come to."""
    run.phase = _phase_of(run, job)
    if job is None or not EvaluationRun(run.step, run.phase).over:
        return
    status = job.status
    run.results = status.get("results") or {}
    fault = "" if run.results else status.get("resultsFault") or ""
    if run.phase != Phase.SUCCEEDED:
        fault = str(status.get("because") or run.phase)
    elif not run.results and not fault:
        fault = "the program left no numbers at $MUSTER_RESULTS"
    run.fault = fault[:1024] or None
