"""`/settings/projects/{project}/webhooks`: made, tried and deleted by maintainers; the last message to each."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from muster.web import api
from muster.web.api import ApiError, Principal, Services, ServicesDependency
from muster.web.notes import PageNote, go_on
from muster.web.rendering import page
from muster.web.session import Posted, Visitor
from muster.web.settings import Id, done, must_manage
from muster.words.webhook_kinds import WebhookPreset
from muster.words.webhooks import KINDS_DEFAULT

router = APIRouter(prefix="/settings/projects/{project}/webhooks", include_in_schema=False)

DELIVERIES = 10  # of each webhook
_TYPED = {"name": "", "url": "", "preset": "", "kinds": KINDS_DEFAULT}  # in a form that nobody has filled in


def _here(project: str) -> str:
    return f"/settings/projects/{project}/webhooks"


@router.get("")
async def show_webhooks(request: Request, services: ServicesDependency, visitor: Visitor, project: Id) -> Response:
    must_manage(visitor)
    return await _show(request, services, visitor, project)


async def _show(
    request: Request,
    services: Services,
    visitor: Principal,
    project: str,
    secret: tuple[str, str] | None = None,
    refused: ApiError | None = None,
    typed: dict[str, Any] = _TYPED,
) -> Response:
    """`secret` is a new webhook's name and secret, which no other page can show; `typed` is what stays in the form."""
    hooks = await api.webhooks(services, visitor, project)
    by_hook = [(await api.deliveries(services, visitor, project, hook["name"], DELIVERIES))["items"] for hook in hooks]
    return page(
        request,
        "webhooks.html",
        visitor,
        refused.status if refused is not None else 200,
        current="settings",
        project=project,
        place=_here(project),
        hooks=list(zip(hooks, by_hook, strict=True)),
        secret=secret,
        fault=refused.detail if refused is not None else "",
        typed=typed,
        kinds=KINDS_DEFAULT,
        presets=tuple(WebhookPreset),
    )


@router.post("")
async def make_webhook(request: Request, services: ServicesDependency, form: Posted, project: Id) -> Response:
    """The answer is the only page that shows the secret."""
    must_manage(form.caller)
    typed = {
        "name": form.one("name").strip(),
        "url": form.one("url").strip(),
        "preset": form.one("preset"),
        "kinds": form.all("kinds"),
    }
    body = {name: typed[name] for name in ("name", "url", "kinds")} | {"preset": typed["preset"] or None}
    try:
        made, secret = await api.webhook_routes.made(services, form.caller, project, api.webhook_request(body))
    except ApiError as refused:
        if refused.code not in ("invalid_webhook", "webhook_exists"):
            raise
        return await _show(request, services, form.caller, project, refused=refused, typed=typed)
    return await _show(request, services, form.caller, project, (made.name, secret))


@router.post("/{name}/test")
async def test_webhook(services: ServicesDependency, form: Posted, project: Id, name: Id) -> Response:
    must_manage(form.caller)
    message = api.document_of(await api.webhook_routes.test_webhook(services, form.caller, project, name))
    last = message["attempts"][-1] if message["attempts"] else {"error": "it was not sent", "seconds": 0.0}
    if message["status"] == "delivered":
        return go_on(
            _here(project), [PageNote(True, f"{name} answered {last['status']} after {last['seconds']:.2f} s.")]
        )
    return go_on(_here(project), [PageNote(False, f"{name} was not told: {last['error']}.")])


@router.post("/{name}/delete")
async def delete_webhook(services: ServicesDependency, form: Posted, project: Id, name: Id) -> Response:
    must_manage(form.caller)
    deleted = api.webhook_routes.delete_webhook(services, form.caller, project, name)
    return await done(deleted, f"{name} is gone, and told nothing any more.", _here(project))


@router.post("/{name}/deliveries/{message_id}/replay")
async def replay_delivery(
    services: ServicesDependency, form: Posted, project: Id, name: Id, message_id: Id
) -> Response:
    must_manage(form.caller)
    sent = api.webhook_routes.replay_delivery(services, form.caller, project, name, message_id)
    return await done(sent, f"{name} is told again; this page shows what it answers.", _here(project))
