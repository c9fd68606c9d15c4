"""Measured speeds of this server's jobs, from which the time of a similar job is estimated."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from sqlalchemy import select

from muster.api.core.callers import Principal
from muster.api.core.database.db import Database
from muster.api.core.database.tables import JobRow
from muster.plan.throughput import MeasuredSpeed, setup_of
from muster.recipe.document import JobSpec
from muster.recipe.training import TrainingConfig
from muster.words.status import Attempt, GoodputState, JobStatus

JOBS_MAX = 500  # the newest; speeds of long ago are of another Muster
# Of an attempt, to tell a speed by their mean. Fewer are mostly warm-up: compilation, page caches, the allocator.
STEPS_MIN = 10


async def measured(database: Database, caller: Principal) -> tuple[MeasuredSpeed, ...]:
    """Return the measured speeds of the newest jobs that have trained and that the caller may see."""
    query = select(JobRow.name, JobRow.spec, JobRow.status).order_by(JobRow.seq.desc()).limit(JOBS_MAX)
    if caller.visible_projects is not None:
        query = query.where(JobRow.project.in_(caller.visible_projects))
    async with database.read() as session:
        rows = (await session.execute(query)).all()
    return tuple(record for name, spec, status in rows if (record := _record(name, spec, status)) is not None)


def _record(name: str, spec: dict[str, Any], status: dict[str, Any]) -> MeasuredSpeed | None:
    """Return the job's measured speed, or None for a program, a job that has reported no speed, or one that a newer
    Muster wrote."""
    try:
        training, seen = JobSpec.model_validate(spec).training, JobStatus.model_validate(status)
    except ValidationError:
        return None
    if training is None:
        return None
    trained = [attempt for attempt in seen.attempts if attempt.first_step_at is not None and attempt.world_size]
    if not trained:
        return None
    means = ((attempt, _mean(training, attempt)) for attempt in reversed(trained))
    # Where no attempt was long enough, what the last step did is better than nothing.
    at_last = seen.progress.tokens_per_second if seen.progress else None
    attempt, speed = next(((a, mean) for a, mean in means if mean is not None), (trained[-1], at_last))
    if not speed:
        return None
    return MeasuredSpeed(
        name, setup_of(training), speed, attempt.world_size, attempt.instance_type, attempt.gpus_per_worker
    )


def _mean(training: TrainingConfig, attempt: Attempt) -> float | None:
    """Return the tokens per second over an attempt's steps, counted as `batch.tokensPerStep` counts them, padding
    included: the time of a step follows from it. None if it did too few steps, or its time is not booked yet."""
    if attempt.last_step is None:
        return None
    steps = attempt.last_step - attempt.resume_step
    # Steps that were lost took as long as others.
    states = (GoodputState.PRODUCTIVE, GoodputState.LOST, GoodputState.DATA_WAIT)
    seconds = sum(attempt.seconds.get(state, 0.0) for state in states)
    return steps * training.batch.tokens_per_step / seconds if steps >= STEPS_MIN and seconds > 0 else None
