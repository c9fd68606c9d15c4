"""Replies of the API about sweeps, shared by server and client."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from muster.recipe.evaluation_config import Better
from muster.recipe.sweep import Sweep, SweepPhase
from muster.replies.jobs import Reply
from muster.words.base import Time


class ComparedBy(Reply):
    """The metric of a sweep, and which of its values are better."""

    name: str
    better: Better


class RungResult(Reply):
    """Rank of a trial at a step where trials are stopped: 1 is the best of those that had reached it."""

    step: int
    value: float
    place: int
    of: int
    goes_on: bool


class SweepTrial(Reply):
    """A trial that was started. `job_id` and `job`, its name, are null for one that was refused, and once the job is
    deleted. `value` is the best that it has reached, after the step `value_step`; `reason` says why it was stopped
    early, or refused."""

    number: int
    parameters: dict[str, Any]
    job_id: str | None
    job: str | None
    phase: str = Field(description="Its job's; Refused: there is none.")
    step: int | None
    steps: int | None
    value: float | None
    value_step: int | None
    last_value: float | None
    last_step: int | None
    rungs: list[RungResult]
    reason: str | None


class BestCommit(Reply):
    """The best checkpoint of a sweep's trials, by the sweep's metric. It can be used as a job's `model.from`."""

    job: str
    step: int | Literal["best"]


class SweepBest(Reply):
    """The best trial. `commit` is null while it has none, and once its job is deleted."""

    trial: int
    parameters: dict[str, Any]
    value: float
    value_step: int
    job: str | None
    commit: BestCommit | None


class SweepSummary(Reply):
    """A line of the list. Of `trials` so many were `started`, and of these `live` ones have not ended."""

    id: str
    name: str
    project: str
    owner: str
    phase: SweepPhase
    because: str
    metric: ComparedBy
    trials: int
    started: int
    live: int
    best_trial: int | None
    best_value: float | None
    created_at: Time
    finished_at: Time | None


class SweepList(Reply):
    """`next_cursor` asks for the next page; it is null on the last."""

    items: list[SweepSummary]
    next_cursor: str | None


class SweepDetail(SweepSummary):
    """A sweep with its trials, in the order in which they were started. `metadata` and `spec` are those of the job's
    document that they were made of, as it came; values of `runtime.env` are shown to its owner alone."""

    sweep: Sweep
    metadata: dict[str, Any]
    spec: dict[str, Any]
    best: SweepBest | None
    table: list[SweepTrial]
