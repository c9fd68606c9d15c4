"""Lookup of the model that a request names, and its reply, in pieces or whole."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from muster.api.core.access import find_job
from muster.api.core.callers import Principal
from muster.api.core.database.tables import JobRow
from muster.api.core.errors import ApiError
from muster.api.core.jobs.repository import folder_of
from muster.api.core.services import Services
from muster.api.openai.chat.pool import WorkerPool
from muster.api.openai.chat.worker import ModelPlace
from muster.api.openai.models.base_models import ModelMap
from muster.api.openai.models.names import FineTuned, fine_tuned_of, job_of
from muster.api.openai.models.service import model_not_found, named_job
from muster.api.openai.requests import refused
from muster.storage.errors import StorageError
from muster.words.base import UserError


@dataclass
class ModelGeneration:
    """An answer as far as it has come; `done` is its last line."""

    text: str = ""
    done: dict[str, Any] = field(default_factory=dict)


async def place_of(services: Services, caller: Principal, model: str) -> ModelPlace:
    """Return the model that a worker must load. Raises ApiError model_not_found, model_unavailable,
    storage_unavailable."""
    mapped = services[ModelMap].current().models.get(model)
    if mapped is not None:
        must_answer(services)
        source = (mapped.spec["training"].get("model") or {}).get("source")
        if source is None:
            raise refused("model", f"{model!r} is not a model's folder, so that it has said nothing yet; fine-tune it")
        return ModelPlace(str(source), "best")
    if (asked := job_of(model)) is not None:
        row, step = await named_job(services, caller, model, asked), asked.step
    elif (tuned := fine_tuned_of(model)) is not None:
        row, step = await _tuned_job(services, caller, model, tuned), tuned.step
    else:
        raise model_not_found(services, model)
    must_answer(services)
    return await _commit_of(services, row, step, model)


async def _tuned_job(services: Services, caller: Principal, model: str, tuned: FineTuned) -> JobRow:
    try:
        return await find_job(services, caller, tuned.job_id)
    except ApiError:
        raise model_not_found(services, model) from None


async def _commit_of(services: Services, row: JobRow, asked: int | None, model: str) -> ModelPlace:
    """The commit by its number, so that a worker of `best` is not kept when another commit is better."""
    folder = folder_of(row)
    try:
        commits = await services.folders.run(folder, services.commits.read, folder) if folder else ()
    except (StorageError, UserError) as error:
        raise ApiError("storage_unavailable", str(error), headers={"Retry-After": "5"}) from error
    steps = [commit.step for commit in commits]
    best = next((commit.step for commit in reversed(commits) if commit.best), steps[-1] if steps else None)
    step = best if asked is None else asked
    if folder is None or step is None or step not in steps:
        have = f"its checkpoints are of the steps {', '.join(map(str, steps))}" if steps else "it has no checkpoint yet"
        detail = f"There is no model {model[:200]!r}: job {row.name!r} is there, and {have}."
        raise ApiError("model_not_found", detail, errors=model_not_found(services, model).errors)
    return ModelPlace(str(folder), str(step), of_job=True)


def must_answer(services: Services) -> None:
    """Raises ApiError model_unavailable where this server answers no prompts."""
    if not services[WorkerPool].workers_max:
        why = "MUSTER_API_CHAT_WORKERS is 0"
    elif importlib.util.find_spec("torch") is None:
        why = "it has no trainer beside it (docs/install.md says how an API's image gets one)"
    else:
        return
    detail = f"This server answers no prompts: {why}. `muster serve JOB` prints how to serve the job's model."
    raise ApiError("model_unavailable", detail)


async def whole(services: Services, place: ModelPlace, question: dict[str, Any]) -> ModelGeneration:
    generation = ModelGeneration()
    async with contextlib.aclosing(_lines(services, place, question)) as lines:
        async for line in lines:
            generation.text += line.get("text", "")
            generation.done = line.get("done", generation.done)
    return generation


async def begun(
    services: Services, place: ModelPlace, question: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """The lines of an answer of which the first is there already: what is refused is refused before a reply begins.

    The worker is held until the generator is closed.
    """
    lines = _lines(services, place, question)
    first = await anext(lines)

    async def all_lines() -> AsyncGenerator[dict[str, Any], None]:
        async with contextlib.aclosing(lines):
            yield first
            async for line in lines:
                yield line

    return all_lines()


async def _lines(
    services: Services, place: ModelPlace, question: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    async with services[WorkerPool].turn(place) as worker, contextlib.aclosing(worker.ask(question)) as lines:
        async for line in lines:
            yield line
