"""`/v1/models`: what may be fine-tuned, and what was."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path
from pydantic import BaseModel

from muster.api.core.callers import Caller, Scope, needs
from muster.api.core.http.openapi import AT, UID, example_reply, problems
from muster.api.core.services import Services, ServicesDependency
from muster.api.openai import fine_tunes
from muster.api.openai.fine_tunes import FineTune
from muster.api.openai.models import service
from muster.api.openai.models.base_models import ModelMap
from muster.api.openai.models.names import fine_tuned_model, fine_tuned_of

router = APIRouter(prefix="/models", tags=["openai"])
FINE_TUNED_MAX = 1_000  # of the newest; OpenAI's list has no pages


class Model(BaseModel):
    """`created` is when the map was written, or when the job ended. `owned_by` of a fine-tuned model is its project."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


_EXAMPLE: dict[str, Any] = {"id": "llama-3.1-8b", "object": "model", "created": int(AT), "owned_by": "muster"}
_TUNED = {**_EXAMPLE, "id": f"ft:llama-3.1-8b:default:support:{UID}", "owned_by": "default"}
reads = Depends(needs(Scope.READ))


@router.get(
    "",
    dependencies=[reads],
    summary="List models",
    responses={200: example_reply({"object": "list", "data": [_EXAMPLE, _TUNED]}, "Models"), **problems()},
)
async def list_models(services: ServicesDependency, caller: Caller) -> ModelList:
    """Returns the mapped base models, and the newest fine-tuned models that the caller may see."""
    async with services.database.read() as session:
        tuned = await fine_tunes.succeeded(session, caller.visible_projects, FINE_TUNED_MAX)
    data = [*(_mapped(services, name) for name in services[ModelMap].current().models), *map(_tuned, tuned)]
    return ModelList(data=data)


@router.get(
    "/{model:path}",
    dependencies=[reads],
    summary="Retrieve a model",
    operation_id="get_model",
    responses={200: example_reply(_EXAMPLE, "The model"), **problems("model_not_found")},
)
async def get_model(
    services: ServicesDependency,
    caller: Caller,
    model: Annotated[str, Path(min_length=1, max_length=500, pattern=r"^[^\x00]*$")],
) -> Model:
    """Returns a mapped model, or a fine-tuned one by its name."""
    if model in services[ModelMap].current().models:
        return _mapped(services, model)
    named = fine_tuned_of(model)
    if named is None:
        raise service.model_not_found(services, model)
    tune = await service.fine_tuned(services, caller, model, named)
    return _tuned(tune).model_copy(update={"id": model})


def _mapped(services: Services, name: str) -> Model:
    base_models = services[ModelMap].current()
    return Model(id=name, created=base_models.created, owned_by=base_models.models[name].owned_by)


def _tuned(tune: FineTune) -> Model:
    job = tune.job
    name = fine_tuned_model(tune.body.base, job.project, tune.body.suffix, job.id)
    return Model(id=name, created=int(job.finished_at or job.created_at), owned_by=job.project)
