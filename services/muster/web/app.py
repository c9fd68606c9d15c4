"""The API with the pages: one process, one address, the same tokens and roles."""

from __future__ import annotations

import secrets

from fastapi import FastAPI

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
    session,
    settings,
    submit,
)
from muster.web.api import Cluster, Settings, create_api
from muster.web.turns import Turns

HOME = "/jobs"
# A page's router is listed here, and its link in rendering.NAVIGATION.
ROUTERS = (
    assets.router,
    session.router,
    provider_sign_in.router,
    live.router,
    jobs.router,
    submit.router,
    settings.router,
    compare.router,
    curves.router,
    fleet.router,
    commits.router,
    job_data.router,
    job.router,
    logs.router,
)


def create_app(settings: Settings, cluster: Cluster | None = None) -> FastAPI:
    """Make the API and its pages, which work while the app's lifespan runs. `cluster` as for the API."""
    app = create_api(settings, cluster)
    app.state.home = HOME
    app.state.form_secret = secrets.token_urlsafe(32)  # for forms where nobody signs in (session.form_token)
    app.state.turns = Turns()
    app.state.lists = {}  # of jobs._read
    for router in ROUTERS:
        app.include_router(router)
    errors.answer_with_pages(app)
    return app
