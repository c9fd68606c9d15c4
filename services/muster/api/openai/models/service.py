"""Lookup of the model that a name means: a mapped one, one that was fine-tuned from it here, or a job's."""

from __future__ import annotations

from dataclasses import dataclass

from muster.api.core.callers import Principal
from muster.api.core.database.tables import JobRow
from muster.api.core.errors import ApiError
from muster.api.core.jobs import repository
from muster.api.core.jobs.repository import JobFilter
from muster.api.core.services import Services
from muster.api.openai import fine_tunes
from muster.api.openai.fine_tunes import FineTune
from muster.api.openai.models.base_models import ModelMap, model_of_job
from muster.api.openai.models.names import FineTuned, NamedJob, fine_tuned_of, job_of
from muster.words.base import DocumentProblem
from muster.words.model_map import MappedModel
from muster.words.status import Phase
from muster.words.text import nearest


@dataclass(frozen=True)
class BaseModel:
    """Model that a fine-tuning job starts from: a mapped model, or a checkpoint (job and step)."""

    name: str
    mapped: MappedModel
    commit: tuple[str, int | str] | None = None


async def base_model(services: Services, caller: Principal, model: str) -> BaseModel:
    """Raises ApiError model_not_found, which names the mapped models."""
    mapped = services[ModelMap].current().models
    if model in mapped:
        return BaseModel(model, mapped[model])
    if (named := fine_tuned_of(model)) is not None:
        tune = await fine_tuned(services, caller, model, named)
        step = "best" if named.step is None else named.step
        base = mapped.get(tune.body.base) or _of_job(tune.job)
        return BaseModel(tune.body.base, base, (tune.job.id, step))
    if (asked := job_of(model)) is not None:
        row = await named_job(services, caller, model, asked)
        if row.spec.get("training") is None:
            raise model_not_found(services, model, f"job {row.name!r} runs a program of its own")
        return BaseModel(row.name, _of_job(row), (row.id, "best" if asked.step is None else asked.step))
    raise model_not_found(services, model)


def _of_job(row: JobRow) -> MappedModel:
    return model_of_job(row.spec["training"], row.spec.get("gang") or {})


async def named_job(services: Services, caller: Principal, model: str, asked: NamedJob) -> JobRow:
    """Return the job of that id, or else the newest of that name that the caller may see. Raises ApiError
    model_not_found."""
    some = JobFilter(visible=caller.visible_projects, name=asked.job)
    async with services.database.read() as session:
        row = await repository.get(session, asked.job) or await repository.newest(session, some)
    if row is None or caller.role_in(row.project) is None:
        raise model_not_found(services, model, f"there is no job {asked.job!r} that you may see")
    return row


async def fine_tuned(services: Services, caller: Principal, model: str, named: FineTuned) -> FineTune:
    """The job that made a model, where it has succeeded or the name is that of one of its commits. Raises ApiError
    model_not_found."""
    async with services.database.read() as session:
        tune = await fine_tunes.get(session, named.job_id)
    if tune is None or caller.role_in(tune.job.project) is None:
        raise model_not_found(services, model)
    if named.step is None and tune.job.phase != Phase.SUCCEEDED:
        raise model_not_found(services, model)
    return tune


def model_not_found(services: Services, model: str, reason: str = "") -> ApiError:
    """The error for a name that means no model; `reason` is more than that it is not mapped."""
    models = services[ModelMap]
    mapped = models.current().models
    there = f"mapped are {', '.join(mapped)}" if mapped else "no base model is mapped"
    how = (
        "`muster models add NAME SOURCE` maps another"
        if models.can_be_added_to
        else "an administrator maps them by the chart's value baseModels, or MUSTER_API_BASE_MODELS_FILE"
    )
    why = reason or f"{there}, and {how}; a job's model is job:NAME"
    near = nearest(model, mapped)
    hint = f" Did you mean {near!r}?" if near else ""
    detail = f"There is no model {model[:200]!r}: {why}.{hint}"
    return ApiError("model_not_found", detail, errors=(DocumentProblem("model", "names no model", near),))
