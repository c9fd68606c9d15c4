"""The part of the app that speaks as OpenAI's API does."""

from __future__ import annotations

from fastapi import APIRouter, Request

from muster.api.core.background import BackgroundWork
from muster.api.core.errors import ApiError
from muster.api.core.services import Services
from muster.api.openai.chat import routes as chat
from muster.api.openai.chat.pool import REAP_SECONDS, WorkerPool
from muster.api.openai.files import routes as files
from muster.api.openai.files import upload_routes as uploads
from muster.api.openai.fine_tuning import routes as fine_tuning
from muster.api.openai.models import routes as models
from muster.api.openai.models.base_models import ModelMap
from muster.api.openai.requests import invalid_request

ROUTERS: tuple[APIRouter, ...] = tuple(module.router for module in (files, uploads, fine_tuning, models, chat))


def register(services: Services) -> None:
    """Raises ValueError for base models that can't be used."""
    settings = services.settings
    own = settings.layout.base_models if settings.cluster == "local" else None
    services.add(ModelMap(settings.base_models_file, own))
    pool = services.add(WorkerPool(services.settings.chat_workers))
    services.background.works.append(BackgroundWork("chat", pool.reap, REAP_SECONDS))
    services.closing.push_async_callback(pool.close)


def as_openai(request: Request, error: ApiError) -> ApiError:
    """Wrong parameters of OpenAI's API are a 400, as its clients know it."""
    if error.code == "invalid_parameter" and request.url.path.startswith("/v1/"):
        return invalid_request(error.errors)
    return error
