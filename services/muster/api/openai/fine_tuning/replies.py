"""Fine-tuning jobs, their events and checkpoints as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel

from muster.api.core.database.tables import EventRow
from muster.api.openai.fine_tunes import FineTune
from muster.api.openai.models.names import fine_tuned_model
from muster.storage.listing import CommitSummary
from muster.words.status import Phase
from muster.words.times import epoch_seconds

JOB_PREFIX: Final = "ftjob-"
EVENT_PREFIX: Final = "ftevent-"
CHECKPOINT_PREFIX: Final = "ftckpt-"
Status = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
# `paused` is in none of OpenAI's enumerations and in its example of POST …/pause; its clients take it.
_STATUSES: Final[dict[str, Status]] = {
    Phase.QUEUED: "queued",
    Phase.SUSPENDED: "paused",
    Phase.SUCCEEDED: "succeeded",
    Phase.FAILED: "failed",
    Phase.CANCELLED: "cancelled",
}


class JobError(BaseModel):
    """Error of a failed job: the name of the cause and its description. It never refers to a field."""

    code: str
    message: str
    param: str | None


class ChosenHyperparameters(BaseModel):
    """Numbers, also where `"auto"` was asked for."""

    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    beta: float | None = None
    compute_multiplier: float | None = None
    eval_interval: int | None = None
    eval_samples: int | None = None


class MethodSettings(BaseModel):
    hyperparameters: ChosenHyperparameters


class ReinforcementSettings(MethodSettings):
    grader: dict[str, Any]


class ChosenMethod(BaseModel):
    type: str
    supervised: MethodSettings | None = None
    dpo: MethodSettings | None = None
    reinforcement: ReinforcementSettings | None = None


class FineTuningJob(BaseModel):
    """A job in OpenAI's words. What begins with `x_` is beyond them: the job's id at /api/v1, how `"auto"` was chosen,
    and how often its gang was restarted."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    estimated_finish: int | None
    model: str
    fine_tuned_model: str | None
    organization_id: str
    status: Status
    hyperparameters: ChosenHyperparameters
    method: ChosenMethod
    training_file: str
    validation_file: str | None
    result_files: list[str]
    trained_tokens: int | None
    seed: int
    error: JobError | None
    integrations: list[dict[str, Any]]
    metadata: dict[str, str] | None
    x_job_id: str
    x_chosen: list[str]
    x_restarts: int


class FineTuningJobList(BaseModel):
    """Send the last id as `after` for more."""

    object: Literal["list"] = "list"
    data: list[FineTuningJob]
    has_more: bool


class FineTuningEvent(BaseModel):
    """Something that happened to a job; `data` is of the event's type at /api/v1, which `x_type` names."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]
    x_type: str


class FineTuningEventList(BaseModel):
    """Newest first. Send the last id as `after` for older ones."""

    object: Literal["list"] = "list"
    data: list[FineTuningEvent]
    has_more: bool


class FineTuningCheckpointMetrics(BaseModel):
    """Metrics of a checkpoint. Those that were not measured are left out."""

    step: float
    train_loss: float | None = None
    valid_loss: float | None = None
    full_valid_loss: float | None = None


class FineTuningCheckpoint(BaseModel):
    """A checkpoint of the job, and the name by which its model can be asked."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    step_number: int
    metrics: FineTuningCheckpointMetrics


class FineTuningCheckpointList(BaseModel):
    """Newest first. Send the last id as `after` for older ones."""

    object: Literal["list"] = "list"
    data: list[FineTuningCheckpoint]
    first_id: str | None
    last_id: str | None
    has_more: bool


def job_reply(tune: FineTune) -> FineTuningJob:
    job, body, status = tune.job, tune.body, tune.job.status
    numbers = ChosenHyperparameters.model_validate(body.hyperparameters)
    settings = MethodSettings(hyperparameters=numbers)
    if body.grader is not None:
        settings = ReinforcementSettings(hyperparameters=numbers, grader=body.grader)
    method = {"type": body.method, body.method: settings}
    progress = status.get("progress") or {}
    running, ended = job.phase == Phase.RUNNING, job.phase == Phase.SUCCEEDED
    left = progress.get("etaSeconds") if running else None
    return FineTuningJob(
        id=JOB_PREFIX + job.id,
        created_at=int(job.created_at),
        finished_at=int(job.finished_at) if job.finished_at is not None else None,
        estimated_finish=int(epoch_seconds(progress.get("at") or 0.0) + left) if left is not None else None,
        model=body.model,
        fine_tuned_model=fine_tuned_model(body.base, job.project, body.suffix, job.id) if ended else None,
        organization_id=job.project,
        status=_STATUSES.get(job.phase, "running"),
        hyperparameters=numbers,
        method=ChosenMethod.model_validate(method),
        training_file=body.training_file,
        validation_file=body.validation_file,
        result_files=[],
        trained_tokens=_tokens(tune) if ended else None,
        seed=body.seed,
        error=_error(tune),
        integrations=[],
        metadata=body.metadata,
        x_job_id=job.id,
        x_chosen=list(body.choices),
        x_restarts=int((status.get("restarts") or {}).get("total", 0)),
    )


def event_reply(row: EventRow) -> FineTuningEvent:
    data, metrics = row.body["data"], row.type == "evaluation.completed"
    return FineTuningEvent(
        id=f"{EVENT_PREFIX}{row.job_id}-{row.number}",
        created_at=int(row.at),
        level=_level(row.type),
        message=row.body["message"],
        type="metrics" if metrics else "message",
        data={"step": data["step"], "valid_loss": data["loss"]} if metrics else data,
        x_type=row.type,
    )


def checkpoint_reply(tune: FineTune, commit: CommitSummary) -> FineTuningCheckpoint:
    job, valid = tune.job, commit.metrics.get("evaluation_loss")
    return FineTuningCheckpoint(
        id=f"{CHECKPOINT_PREFIX}{job.id}-{commit.step}",
        created_at=int(commit.committed_at),
        fine_tuned_model_checkpoint=fine_tuned_model(
            tune.body.base, job.project, tune.body.suffix, job.id, commit.step
        ),
        fine_tuning_job_id=JOB_PREFIX + job.id,
        step_number=commit.step,
        metrics=FineTuningCheckpointMetrics(
            step=commit.step, train_loss=commit.metrics.get("loss"), valid_loss=valid, full_valid_loss=valid
        ),
    )


def _error(tune: FineTune) -> JobError | None:
    status = tune.job.status
    if tune.job.phase != Phase.FAILED:
        return None
    failure = status.get("lastFailure") or {}
    message = failure.get("message") or status.get("because") or "the job failed"
    return JobError(code=str(failure.get("cause") or "unknown"), message=str(message), param=None)


def _tokens(tune: FineTune) -> int | None:
    """Return the tokens of the steps that were done, including padding."""
    step = (tune.job.status.get("progress") or {}).get("step")
    return int(step) * int(tune.job.spec["training"]["batch"]["tokensPerStep"]) if step is not None else None


def _level(kind: str) -> Literal["info", "warn", "error"]:
    if kind == "job.failed":
        return "error"
    worrying = ("attempt.failed", "attempt.preempted", "attempt.rejected", "job.restarting", "job.suspected")
    return "warn" if kind in (*worrying, "node.excluded") else "info"
