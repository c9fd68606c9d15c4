"""Lookup of the model that a name means: a mapped one, or one that was fine-tuned from it here."""

from __future__ import annotations

from dataclasses import dataclass

from muster.api.core.callers import Principal
from muster.api.core.errors import ApiError
from muster.api.core.services import Services
from muster.api.openai import fine_tunes
from muster.api.openai.fine_tunes import FineTune
from muster.api.openai.models.base_models import BaseModels, MappedModel
from muster.api.openai.models.names import FineTuned, fine_tuned_of
from muster.contract.base import DocumentProblem
from muster.contract.status import Phase
from muster.contract.text import nearest


@dataclass(frozen=True)
class BaseModel:
    """Model that a fine-tuning job starts from: a mapped model, or a checkpoint (job and step) of one fine-tuned from
    it."""

    name: str
    mapped: MappedModel
    commit: tuple[str, int | str] | None = None


async def base_model(services: Services, caller: Principal, model: str) -> BaseModel:
    """Raises ApiError model_not_found, which names the mapped models."""
    mapped = services[BaseModels].models
    if model in mapped:
        return BaseModel(model, mapped[model])
    if (named := fine_tuned_of(model)) is not None:
        tune = await fine_tuned(services, caller, model, named)
        if tune.body.base in mapped:
            step = "best" if named.step is None else named.step
            return BaseModel(tune.body.base, mapped[tune.body.base], (tune.job.id, step))
    raise model_not_found(services, model)


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


def model_not_found(services: Services, model: str) -> ApiError:
    mapped = services[BaseModels].models
    there = (
        f"an administrator has mapped {', '.join(mapped)}"
        if mapped
        else "no administrator has mapped a base model yet (MUSTER_API_BASE_MODELS_FILE, docs/openai.md)"
    )
    near = nearest(model, mapped)
    hint = f" Did you mean {near!r}?" if near else ""
    detail = f"There is no model {model[:200]!r}: {there}.{hint}"
    return ApiError("model_not_found", detail, errors=(DocumentProblem("model", "names no model", near),))
