"""The tenants' part of the app: people and projects, and what their callers may do."""

from __future__ import annotations

import time

from fastapi import APIRouter

from muster.api.core.background import BackgroundWork
from muster.api.core.database.db import Database
from muster.api.core.mirror import ClusterMirror
from muster.api.core.services import Services
from muster.api.core.settings import ApiSettings
from muster.api.tenants.audit import routes as audit
from muster.api.tenants.authentication import CallerAuthentication
from muster.api.tenants.people import routes as people
from muster.api.tenants.projects import routes as projects
from muster.api.tenants.projects.accounting import ACCOUNTING_SECONDS, UsageAccounting, spent_of
from muster.api.tenants.projects.quotas import QUOTA_SECONDS, QuotaWriter
from muster.api.tenants.secrets import routes as secrets
from muster.api.tenants.sessions import service as sessions
from muster.api.tenants.signin import routes as signin
from muster.api.tenants.signin.provider import IdentityProvider
from muster.api.tenants.signin.service import SignIn
from muster.api.tenants.tokens import routes as tokens
from muster.api.tenants.tokens import service as token_service
from muster.api.tenants.usage import routes as usage

ROUTERS: tuple[APIRouter, ...] = tuple(
    module.router for module in (projects, secrets, usage, signin, people, tokens, audit)
)


def open_authentication(settings: ApiSettings, database: Database) -> CallerAuthentication:
    sign_in = SignIn(settings, database, IdentityProvider(settings)) if settings.oidc_issuer else None
    return CallerAuthentication(settings, database, sign_in)


def register(services: Services, authentication: CallerAuthentication) -> None:
    settings, database, mirror = services.settings, services.database, services[ClusterMirror]
    services.add(authentication)
    accounting = services.add(
        UsageAccounting(
            database, services.prices, services.metrics, lambda: services.mirror.healthy and mirror.caught_up
        )
    )
    counting = BackgroundWork("accounting", accounting.step, ACCOUNTING_SECONDS)
    mirror.waiting.append(counting.wake)
    quotas = QuotaWriter(database, services.cluster, lambda: spent_of(accounting.counted), settings.files_place)
    services.background.works += [counting, BackgroundWork("quotas", quotas.step, QUOTA_SECONDS)]
    services.housekeeping.append(lambda: _note_and_drop(database, authentication.token_uses))


async def _note_and_drop(database: Database, uses: dict[str, float]) -> None:
    """Record when tokens were last used, and delete sessions that have expired."""
    noted = dict(uses)
    async with database.write() as session:
        await token_service.note_uses(session, noted)
        await sessions.forget_expired(session, time.time())
    for token_id, at in noted.items():
        if uses.get(token_id) == at:
            del uses[token_id]
