"""`/projects/{project}/webhooks`: for its maintainers, for an address is a password to some services."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from muster.api.core.access import project_role
from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Caller, Principal, Scope, needs
from muster.api.core.http.body import parsed, read_body
from muster.api.core.http.openapi import body, example_reply, problems
from muster.api.core.http.paging import cursor_of, seq_of
from muster.api.core.http.path_parts import NO_NUL, ProjectName, without_action
from muster.api.core.http.reply import reply_of
from muster.api.core.roles import Role
from muster.api.core.services import Services, ServicesDependency
from muster.api.webhooks import delivering, outbox, service
from muster.api.webhooks.schemas import (
    Delivery,
    DeliveryPage,
    DeliveryStatus,
    NewWebhook,
    Webhook,
    WebhookList,
    delivery_of,
    webhook_of,
)
from muster.api.webhooks.service import WebhookServices
from muster.words.names import JOB_NAME
from muster.words.times import rfc3339
from muster.words.webhooks import RotateWebhookRequest, WebhookChange, WebhookRequest

manages = Depends(needs(Scope.ADMIN))
router = APIRouter(prefix="/projects/{project}/webhooks", tags=["webhooks"])

WebhookName = Annotated[
    str, Path(max_length=48, pattern=f"^{JOB_NAME.pattern}$", description="The webhook's name in its project.")
]
MessageId = Annotated[str, Path(max_length=64, pattern=NO_NUL, description="The message's `webhook-id`.")]

_WEBHOOK = f"/{without_action('name')}"
_AT = rfc3339(1_795_000_000.0)
_EXAMPLE: dict[str, Any] = {
    "name": "on-call",
    "project": "nlp",
    "url": "https://example.com/hooks/muster",
    "kinds": ["job.failed", "job.waits_long"],
    "preset": None,
    "waitSeconds": 3600.0,
    "enabled": True,
    "createdAt": _AT,
    "changedAt": _AT,
    "changedBy": "ann",
}
_DELIVERY: dict[str, Any] = {
    "id": "msg_8c0a4c3c9f3b4d0f9d2d7f6b1c5e4a3b",
    "kind": "job.failed",
    "status": "waiting",
    "createdAt": _AT,
    "nextAt": rfc3339(1_795_000_020.0),
    "deliveredAt": None,
    "attempts": [{"at": _AT, "status": 500, "error": "answered 500", "seconds": 0.041}],
    "body": '{"type":"job.failed","timestamp":"2026-11-18T12:26:40.000000Z","data":{}}',
}
_REQUEST = {"name": "on-call", "url": "https://example.com/hooks/muster", "kinds": ["job.failed", "job.waits_long"]}
_SHOWN_ONCE = example_reply({**_EXAMPLE, "secret": "whsec_…"}, "The only time that the secret is shown")
_BODY = ("invalid_document", "unsupported_media_type", "body_too_large", "invalid_webhook")
WRONG = "The webhook is not valid"


def _shown_once(response: Response, webhook: Webhook, secret: str) -> NewWebhook:
    response.headers["Cache-Control"] = "no-store"
    return reply_of(NewWebhook, webhook, secret=secret)


@router.post(
    "",
    status_code=201,
    dependencies=[manages],
    summary="Make a webhook",
    responses={
        201: _SHOWN_ONCE, **problems("project_not_found", "webhook_exists", "secrets_unavailable", *_BODY)
    },
    openapi_extra=body(WebhookRequest, _REQUEST),
)  # fmt: skip
async def make_webhook(
    request: Request, response: Response, services: ServicesDependency, caller: Caller, project: ProjectName
) -> NewWebhook:
    """Creates a webhook. From now on, the events of the project are sent to its address, in the format and with the
    signature of Standard Webhooks. Requires the maintainer role."""
    project_role(caller, project, Role.MAINTAINER)
    new_webhook = await read_body(request, parsed(WebhookRequest, "invalid_webhook", WRONG))
    return _shown_once(response, *await made(services, caller, project, new_webhook))


async def made(services: Services, caller: Principal, project: str, body: WebhookRequest) -> tuple[Webhook, str]:
    """The new webhook, and its secret. Raises ApiError as `project_role`, `service.reachable` and `service.make` do."""
    project_role(caller, project, Role.MAINTAINER)
    webhooks = services[WebhookServices]
    await service.reachable(webhooks.reach, body.url)
    async with services.database.write() as session:
        row, secret = await service.make(session, webhooks.sealing, caller.person, project, body)
        record(session, caller, AuditedAct("webhook.made", row.name, project, after=service.recorded(row)))
    return webhook_of(row), secret


@router.get(
    "",
    dependencies=[manages],
    summary="List a project's webhooks",
    responses={200: example_reply({"items": [_EXAMPLE]}, "Webhooks, by name"), **problems("project_not_found")},
)
async def list_webhooks(services: ServicesDependency, caller: Caller, project: ProjectName) -> WebhookList:
    """Returns the webhooks of a project, without their secrets. Requires the maintainer role."""
    project_role(caller, project, Role.MAINTAINER)
    async with services.database.read() as session:
        rows = await service.in_project(session, project)
    return WebhookList(items=[webhook_of(row) for row in rows])


@router.get(
    _WEBHOOK,
    dependencies=[manages],
    summary="Get a webhook",
    responses={200: example_reply(_EXAMPLE, "The webhook"), **problems("project_not_found", "webhook_not_found")},
)
async def get_webhook(services: ServicesDependency, caller: Caller, project: ProjectName, name: WebhookName) -> Webhook:
    """Returns a webhook, without its secret. Requires the maintainer role."""
    project_role(caller, project, Role.MAINTAINER)
    async with services.database.read() as session:
        return webhook_of(await service.find(session, project, name))


@router.patch(
    _WEBHOOK,
    dependencies=[manages],
    summary="Change a webhook",
    responses={200: example_reply(_EXAMPLE, "Changed"), **problems("project_not_found", "webhook_not_found", *_BODY)},
    openapi_extra=body(WebhookChange, {"enabled": False}),
)
async def change_webhook(
    request: Request, services: ServicesDependency, caller: Caller, project: ProjectName, name: WebhookName
) -> Webhook:
    """Updates a webhook. Fields that are left out keep their values. Messages that still wait are sent to the new
    address, in the format that they have. Requires the maintainer role."""
    project_role(caller, project, Role.MAINTAINER)
    change = await read_body(request, parsed(WebhookChange, "invalid_webhook", WRONG))
    await service.reachable(services[WebhookServices].reach, change.url)
    async with services.database.write() as session:
        row = await service.find(session, project, name, lock=True)
        before = service.recorded(row)
        service.change(row, caller.person, change)
        record(session, caller, AuditedAct("webhook.changed", name, project, before, service.recorded(row)))
    return webhook_of(row)


@router.delete(
    _WEBHOOK,
    status_code=204,
    response_class=Response,
    dependencies=[manages],
    summary="Delete a webhook",
    responses={
        204: {"description": "It is gone, with its history; what waited is not sent any more"},
        **problems("project_not_found", "webhook_not_found"),
    },
)
async def delete_webhook(
    services: ServicesDependency, caller: Caller, project: ProjectName, name: WebhookName
) -> Response:
    """Deletes a webhook. Requires the maintainer role."""
    project_role(caller, project, Role.MAINTAINER)
    async with services.database.write() as session:
        row = await service.find(session, project, name, lock=True)
        record(session, caller, AuditedAct("webhook.deleted", name, project, service.recorded(row)))
        await session.delete(row)
    return Response(status_code=204)


@router.post(
    "/{name}:rotate",
    dependencies=[manages],
    summary="Rotate a webhook's secret",
    responses={
        200: _SHOWN_ONCE, **problems("project_not_found", "webhook_not_found", "secrets_unavailable", *_BODY)
    },
    openapi_extra=body(RotateWebhookRequest, {"overlapHours": 24}, required=False),
)  # fmt: skip
async def rotate_webhook(
    request: Request,
    response: Response,
    services: ServicesDependency,
    caller: Caller,
    project: ProjectName,
    name: WebhookName,
) -> NewWebhook:
    """Replaces the secret of a webhook. During the overlap messages are signed with both secrets, so that receivers
    have time to change theirs. Requires the maintainer role."""
    project_role(caller, project, Role.MAINTAINER)
    rotation = await read_body(request, parsed(RotateWebhookRequest, "invalid_webhook", WRONG), optional=True)
    async with services.database.write() as session:
        row = await service.find(session, project, name, lock=True)
        secret = service.rotate(row, services[WebhookServices].sealing, caller.person, rotation.overlap_hours * 3600.0)
        record(
            session,
            caller,
            AuditedAct("webhook.rotated", name, project, after={"overlapHours": rotation.overlap_hours}),
        )
    return _shown_once(response, webhook_of(row), secret)


@router.post(
    "/{name}:test",
    dependencies=[manages],
    summary="Send a test to a webhook",
    responses={
        200: example_reply({**_DELIVERY, "kind": "webhook.test", "status": "delivered"}, "What came of it"),
        **problems("project_not_found", "webhook_not_found"),
    },
)
async def test_webhook(
    services: ServicesDependency, caller: Caller, project: ProjectName, name: WebhookName
) -> Delivery:
    """Sends one test message at once, even if the webhook is disabled, and returns the receiver's response after at
    most 15 s. The message is not retried. Requires the maintainer role."""
    project_role(caller, project, Role.MAINTAINER)
    async with services.database.write() as session:
        row = await service.find(session, project, name)
        message = await service.add_test(session, row, caller.person)
    await services[WebhookServices].deliveries.send_now(message)
    async with services.database.read() as session:
        webhook = await service.find(session, project, name)
        return delivery_of(await service.find_delivery(session, webhook, message))


@router.get(
    "/{name}/deliveries",
    dependencies=[manages],
    summary="List what a webhook was told",
    responses={
        200: example_reply({"items": [_DELIVERY], "nextCursor": None}, "Messages, newest first"),
        **problems("project_not_found", "webhook_not_found", "invalid_cursor"),
    },
)
async def list_deliveries(
    services: ServicesDependency,
    caller: Caller,
    project: ProjectName,
    name: WebhookName,
    status: Annotated[DeliveryStatus | None, Query(description="Only messages that stand so.")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=100, pattern=NO_NUL)] = None,
) -> DeliveryPage:
    """Returns the messages of the last 30 days, each with the responses to all its attempts. Requires the maintainer
    role."""
    project_role(caller, project, Role.MAINTAINER)
    before = seq_of(cursor) if cursor is not None else None
    async with services.database.read() as session:
        webhook = await service.find(session, project, name)
        rows = await service.history(session, webhook, status, before, limit + 1)
    following = cursor_of(rows[limit - 1].seq) if len(rows) > limit else None
    return DeliveryPage(items=[delivery_of(row) for row in rows[:limit]], next_cursor=following)


@router.post(
    "/{name}/deliveries/{message_id}:replay",
    dependencies=[manages],
    summary="Send a message again",
    responses={
        200: example_reply(_DELIVERY, "It is sent again, at once"),
        **problems("project_not_found", "webhook_not_found", "delivery_not_found"),
    },
)
async def replay_delivery(
    services: ServicesDependency, caller: Caller, project: ProjectName, name: WebhookName, message_id: MessageId
) -> Delivery:
    """Sends a message again under the same `webhook-id`, whatever became of it before. If necessary, it is retried for
    another day. Requires the maintainer role."""
    project_role(caller, project, Role.MAINTAINER)
    async with services.database.write() as session:
        webhook = await service.find(session, project, name)
        row = await service.find_delivery(session, webhook, message_id)
        await delivering.replay(session, row, outbox.GIVE_UP_SECONDS)
        record(session, caller, AuditedAct("webhook.replayed", name, project, after={"message": message_id}))
    services[WebhookServices].deliveries.freed.set()
    return delivery_of(row)
