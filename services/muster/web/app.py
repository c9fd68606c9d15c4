"""The API with the pages: one process, one address, the same tokens and roles."""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.routing import BaseRoute

from muster.web import (
    assets,
    commits,
    compare,
    curves,
    errors,
    fleet,
    job,
    job_data,
    jobs,
    live,
    logs,
    provider_sign_in,
    settings,
    sign_in,
    submit,
    sweeps,
    webhooks,
)
from muster.web.api import ApiSettings, JobCluster, create_api
from muster.web.news import NewsBoard
from muster.web.turns import StreamTurns

HOME = "/jobs"
# Pages of a job that read the database at a time; each takes up to four of its sixteen connections. What more are
# opened at once wait here: in the line for a connection, submissions would wait behind them, and be refused after 5 s.
READING_AT_ONCE = 2
# A page's router is listed here, and its link in rendering.NAVIGATION.
ROUTERS = (
    assets.router,
    sign_in.router,
    provider_sign_in.router,
    live.router,
    jobs.router,
    submit.router,
    sweeps.router,
    settings.router,
    webhooks.router,
    compare.router,
    curves.router,
    fleet.router,
    commits.router,
    commits.chat_router,
    job_data.router,
    job.router,
    logs.router,
)


def create_app(settings: ApiSettings, cluster: JobCluster | None = None) -> FastAPI:
    """Make the API and its pages, which work while the app's lifespan runs. `cluster` as for the API."""
    app = create_api(settings, cluster)
    app.state.home = HOME
    app.state.form_secret = secrets.token_urlsafe(32)  # for forms where nobody signs in (session.form_token)
    app.state.turns = StreamTurns()
    app.state.news = NewsBoard()
    app.state.reading = asyncio.Semaphore(READING_AT_ONCE)
    app.state.lists = {}  # of jobs._read
    app.router.routes.extend(_pages())
    errors.answer_with_pages(app)
    return app


@functools.cache
def _pages() -> Sequence[BaseRoute]:
    """The routes of all pages, made once for all apps of a process, as those of the API are."""
    bare = FastAPI(openapi_url=None)
    for router in ROUTERS:
        bare.include_router(router)
    return bare.router.routes
