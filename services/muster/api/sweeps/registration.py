"""The sweeps' part of the app."""

from __future__ import annotations

from fastapi import APIRouter

from muster.api.core.services import Services
from muster.api.sweeps import controller, routes
from muster.api.sweeps.controller import SWEEP_SECONDS, SweepWork

ROUTERS: tuple[APIRouter, ...] = (routes.router,)


def register(services: Services) -> None:
    work = services.add(SweepWork("sweeps", lambda: controller.step(services), SWEEP_SECONDS))
    services.background.works.append(work)
