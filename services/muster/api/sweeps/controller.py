"""Controller of sweeps: it starts their trials as ordinary jobs, reads their results, and cancels those that lose.

Each round reads the rows and the jobs anew, decides (decisions.py), writes what it has seen and decided in one
transaction, and then acts. A crash at any moment therefore leaves only actions to repeat, and each of them is harmless
to repeat. A trial's row is written in the transaction that stores its job, so there is never a second job of one
number, whoever races.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog
from starlette.concurrency import run_in_threadpool

from muster.api.core.acting import acting_for, platform_for
from muster.api.core.background import BackgroundWork
from muster.api.core.callers import Principal
from muster.api.core.database.tables import JobRow, SweepRow, TrialRow
from muster.api.core.errors import ApiError
from muster.api.core.idempotency import AttemptedRequest, hash_of
from muster.api.core.jobs import service as jobs
from muster.api.core.metrics.steps import StepLogs
from muster.api.core.services import Services
from muster.api.core.submission.service import SubmissionService
from muster.api.core.submission.storing import ExtraRows
from muster.api.sweeps import repository
from muster.api.sweeps.decisions import SweepDecision, SweepRules, SweepTrial, TrialResults, best_of, decide
from muster.api.sweeps.measuring import measured_after
from muster.api.sweeps.schemas import Summary
from muster.api.sweeps.search import Parameters, trials_of
from muster.api.sweeps.trials import SweepDraft
from muster.recipe.sweep import SweepMetric
from muster.words.base import dump
from muster.words.job import REASON_LENGTH_MAX
from muster.words.status import Phase

log = structlog.get_logger("muster.api.sweeps")

# How often sweeps are looked at. A trial that has ended leaves its place empty for so long; twice as long would waste
# a second a trial, half of it would save half a second of what takes minutes.
SWEEP_SECONDS = 1.0
REFUSED = "Refused"
_TERMINAL = frozenset(phase for phase in Phase if phase.terminal)
_ROUTE = "POST /sweeps trial"


@dataclass(frozen=True)
class _SweepState:
    """A sweep and its trials as they were read."""

    row: SweepRow
    draft: SweepDraft
    trials: list[tuple[TrialRow, JobRow | None]]

    @property
    def rules(self) -> SweepRules:
        sweep, metric = self.draft.sweep, SweepMetric.model_validate(self.row.metric, by_alias=True)
        assert metric.better is not None, "it was stored with its direction"
        return SweepRules(sweep.size, sweep.concurrency, metric.better, sweep.stopping)


class SweepWork(BackgroundWork):
    """The controller's rounds."""


async def step(services: Services) -> bool:
    """Carry every live sweep on; one that can't go on keeps no other waiting. Raises the database's refusals."""
    async with services.database.read() as session:
        ids = await repository.live_ids(session)
    for sweep_id in ids:
        await _carry_on(services, sweep_id)
    return False


async def _carry_on(services: Services, sweep_id: str) -> None:
    async with services.database.read() as session:
        row = await repository.get(session, sweep_id)
        trials = await repository.trials(session, sweep_id) if row is not None else []
    if row is None or not row.live:
        return
    seen = _SweepState(row, repository.draft_of(row), trials)
    decision = decide(seen.rules, await run_in_threadpool(_observed, services, seen), row.cancelled)
    if not await _keep(services, seen, decision):
        return  # another replica, or a cancellation, was quicker: the next round looks anew
    await _stop(services, seen, decision)
    await _note(services, seen, await _start(services, seen, decision.starts))


def _observed(services: Services, seen: _SweepState) -> list[SweepTrial]:
    return [_trial(services, str(seen.row.metric["name"]), row, job) for row, job in seen.trials]


def _trial(services: Services, metric: str, row: TrialRow, job: JobRow | None) -> SweepTrial:
    results = TrialResults.model_validate(row.results)
    trial = SweepTrial(row.number, _phase_of(row, job) not in (*_TERMINAL, REFUSED), results, row.stopped)
    if job is None or row.phase in _TERMINAL:  # what it wrote was read when it was first seen to have ended
        return trial
    fresh = measured_after(services[StepLogs], job.id, job.status, metric, results.read_step)
    return replace(trial, fresh=fresh)


def _phase_of(row: TrialRow, job: JobRow | None) -> str:
    """A job that is gone was deleted, which only an ended one can be."""
    if job is not None:
        return job.phase
    return row.phase if row.phase in (*_TERMINAL, REFUSED) else Phase.CANCELLED


async def _keep(services: Services, seen: _SweepState, decision: SweepDecision) -> bool:
    """Write what was seen and decided. False where somebody has written the sweep since it was read."""
    async with services.database.write() as session:
        row = await repository.get(session, seen.row.id, lock=True)
        if row is None or row.version != seen.row.version or row.cancelled != seen.row.cancelled:
            return False
        rows = {trial.number: (trial, job) for trial, job in await repository.trials(session, row.id)}
        for after, (before, job) in zip(decision.trials, seen.trials, strict=True):
            trial, _ = rows[after.number]
            trial.results, trial.stopped = dump(after.results), after.stopped
            trial.phase = _phase_of(before, job)
        row.phase, row.live = decision.phase, not decision.phase.terminal
        row.finished_at = time.time() if decision.phase.terminal else None
        row.summary = _summary(seen, decision).model_dump(mode="json")
        changed = any(session.is_modified(each) for each in (row, *(trial for trial, _ in rows.values())))
        row.version += 1 if changed else 0
    seen.row.version = row.version
    if decision.phase.terminal:
        log.info("a sweep has ended", sweep=row.id, phase=row.phase)
    return True


def _summary(seen: _SweepState, decision: SweepDecision) -> Summary:
    total, trials = seen.rules.trials, decision.trials
    live, best = sum(trial.live for trial in trials), best_of(seen.rules.better, trials)
    stopped = sum(trial.stopped is not None for trial in trials)
    words = f"{len(trials)} of {total} trials have started, {live} of them {'has' if live == 1 else 'have'} not ended"
    words += f", {stopped} {'was' if stopped == 1 else 'were'} stopped early" if stopped else ""
    if decision.phase.terminal:
        words = f"{len(trials)} of {total} trials have ended" + (f", {stopped} of them early" if stopped else "")
    if not decision.starts and not decision.phase.terminal and len(trials) < total and not seen.row.cancelled:
        words += f"; at most {seen.rules.concurrency} run at once"
    return Summary(
        because=words,
        waits_for=Summary.model_validate(seen.row.summary).waits_for if decision.starts else "",
        started=len(trials),
        live=live,
        best_trial=best.number if best is not None else None,
        best_value=best.results.best.value if best is not None and best.results.best is not None else None,
    )


async def _stop(services: Services, seen: _SweepState, decision: SweepDecision) -> None:
    """Cancel the jobs of trials that lost, and of all where the sweep was cancelled. A job is cancelled and not
    suspended: a suspended one would be live for ever, and nothing ever brings a stopped trial back."""
    for trial, (_, job) in zip(decision.trials, seen.trials, strict=True):
        must_end = trial.live and (trial.stopped is not None or seen.row.cancelled)
        if not must_end or job is None or job.spec.get("cancel"):
            continue
        sweep = f"sweep {seen.row.name}"
        reason = f"stopped by {sweep}: {trial.stopped}" if trial.stopped else f"{sweep} was cancelled"
        try:
            await jobs.cancel(services, _platform(seen.row), job.id, reason[:REASON_LENGTH_MAX])
        except ApiError as error:
            if error.code not in ("job_finished", "job_not_found"):  # it has ended meanwhile
                raise


async def _start(services: Services, seen: _SweepState, numbers: Sequence[int]) -> str:
    """Submit these trials as their sweep's owner. Returns what hinders the next one; empty where nothing does."""
    if not numbers:
        return ""
    row = seen.row
    caller = await acting_for(services, f"sweep-{row.id}", row.owner, row.project, row.granted)
    if caller is None:
        return f"{row.owner} may not submit to project {row.project!r} any more"
    parameters = trials_of(seen.draft.sweep)
    for number in numbers:
        try:
            await _submit(services, caller, seen, number, parameters[number - 1])
        except ApiError as error:
            if error.code == "database_unavailable":
                raise
            if error.code != "invalid_job":
                return f"trial {number} can't start yet: {error.detail}"
            await _refuse(services, seen, number, parameters[number - 1], error.detail)
    await _cancel_if_late(services, seen)
    services[SweepWork].wake.set()
    return ""


async def _submit(
    services: Services, caller: Principal, seen: _SweepState, number: int, parameters: Parameters
) -> None:
    sweep_id = seen.row.id
    submission = seen.draft.submission(number, parameters)
    body = hash_of(seen.draft.document(number, parameters))
    attempted = AttemptedRequest(caller.token, _ROUTE, f"{sweep_id}/trial-{number}", body)
    extra = ExtraRows(
        rows=lambda job_id: [_row(sweep_id, number, parameters, job_id)],
        data={"sweep": sweep_id, "trial": number},
        note=f", trial {number} of sweep {seen.row.name}",
    )
    await services[SubmissionService].submit(caller, submission, attempted, extra)


def _row(
    sweep_id: str, number: int, parameters: Parameters, job_id: str | None, refusal: str | None = None
) -> TrialRow:
    return TrialRow(
        sweep_id=sweep_id,
        number=number,
        job_id=job_id,
        phase=REFUSED if job_id is None else Phase.QUEUED,
        parameters=parameters,
        results=dump(TrialResults()),
        stopped=refusal[:1024] if refusal is not None else None,
    )


async def _refuse(services: Services, seen: _SweepState, number: int, parameters: Parameters, why: str) -> None:
    """Note that the trial has no job: what was valid when the sweep was created is not any more."""
    async with services.database.write() as session:
        if await session.get(TrialRow, (seen.row.id, number)) is None:
            session.add(_row(seen.row.id, number, parameters, None, why))


async def _cancel_if_late(services: Services, seen: _SweepState) -> None:
    """Cancel what was started while another replica ended the sweep, which nobody would look at any more."""
    async with services.database.read() as session:
        row = await repository.get(session, seen.row.id)
        if row is None or row.live:
            return
        trials = await repository.trials(session, row.id)
    for _, job in trials:
        if job is not None and job.live:
            await jobs.cancel(services, _platform(seen.row), job.id, f"sweep {row.name} has ended")


async def _note(services: Services, seen: _SweepState, hindrance: str) -> None:
    """Say what the next trial waits for."""
    if Summary.model_validate(seen.row.summary).waits_for == hindrance:
        return
    async with services.database.write() as session:
        row = await repository.get(session, seen.row.id, lock=True)
        if row is not None and row.live:
            row.summary = {**row.summary, "waits_for": hindrance}


def _platform(row: SweepRow) -> Principal:
    """Return the principal that stops trials: the platform, for the sweep's owner."""
    return platform_for(f"sweep-{row.id}", row.owner, row.project)
