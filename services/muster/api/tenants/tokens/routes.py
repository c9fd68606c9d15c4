"""`/tokens`: made, listed, rotated and revoked: one's own, those of a project by its maintainers, all by admins."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request, Response

from muster.api.core.audit import AuditedAct, record
from muster.api.core.callers import Caller, Principal, Scope, needs
from muster.api.core.database.tables import TokenRow
from muster.api.core.errors import ApiError
from muster.api.core.http.body import parsed, read_body
from muster.api.core.http.openapi import body, example_reply, problems
from muster.api.core.http.path_parts import NO_NUL
from muster.api.core.http.reply import Reply, reply_of
from muster.api.core.services import Services, ServicesDependency
from muster.api.tenants.authentication import new_token
from muster.api.tenants.tokens import service
from muster.api.tenants.tokens.schemas import RotateRequest, TokenRequest
from muster.words.base import Time
from muster.words.times import rfc3339

manages = Depends(needs(Scope.ADMIN))
router = APIRouter(prefix="/tokens", tags=["tokens"])
TokenId = Annotated[str, Path(max_length=64, pattern=NO_NUL)]


class Token(Reply):
    """Token without its value. `project` is null for a token of every project of its person, `expires_at` for one that
    never does, and `last_used_at` before the first use."""

    id: str
    name: str
    person: str
    project: str | None
    scopes: list[Scope]
    created_at: Time
    expires_at: Time | None
    last_used_at: Time | None


class NewToken(Token):
    """New token. `token` is shown only this once, and not stored."""

    token: str


class TokenList(Reply):
    items: list[Token]


_EXAMPLE: dict[str, Any] = {
    "id": "0c2c31c1-96f9-4f3c-8a39-5b2f9a0f4d11",
    "name": "ci",
    "person": "ci",
    "project": "nlp",
    "scopes": ["write"],
    "createdAt": rfc3339(1_795_000_000.0),
    "expiresAt": None,
    "lastUsedAt": None,
}


_SHOWN_ONCE = example_reply({**_EXAMPLE, "token": "muster_…"}, "The only time that the token is shown")
_BODY = ("invalid_document", "unsupported_media_type", "body_too_large", "invalid_token")


@router.post(
    "",
    status_code=201,
    dependencies=[manages],
    summary="Make a token",
    responses={201: _SHOWN_ONCE, **problems("project_not_found", "person_not_found", *_BODY)},
    openapi_extra=body(TokenRequest, {"name": "ci", "scopes": ["write"], "expiresInDays": 90}),
)
async def make_token(request: Request, response: Response, services: ServicesDependency, caller: Caller) -> NewToken:
    """Creates a token: for the caller, for a service account of a project that the caller maintains or, as an admin,
    for anybody. Whoever holds the token acts as its person, within its project and its scopes."""
    new_token = await read_body(request, parsed(TokenRequest, "invalid_token", "The token can't be made"))
    response.headers["Cache-Control"] = "no-store"
    return await made(services, caller, new_token)


async def made(services: Services, caller: Principal, body: TokenRequest) -> NewToken:
    """The new token, with its value. Raises ApiError as `service.wanted_of` does."""
    token = new_token()
    async with services.database.write() as session:
        row = service.make(session, await service.wanted_of(session, caller, body), token)
        record(session, caller, AuditedAct("token.made", row.id, row.project, after=_recorded(row)))
    return reply_of(NewToken, row, scopes=row.scopes["scopes"], token=token)


@router.get(
    "",
    dependencies=[manages],
    summary="List tokens",
    responses={200: example_reply({"items": [_EXAMPLE]}, "Tokens"), **problems()},
)
async def list_tokens(services: ServicesDependency, caller: Caller) -> TokenList:
    """Returns the tokens that are not revoked: the caller's own, those of the projects that the caller maintains or,
    for an admin, all. The secret values of the tokens are never returned."""
    async with services.database.read() as session:
        rows = await service.list_visible(session, caller)
    return TokenList(items=[reply_of(Token, row, scopes=row.scopes["scopes"]) for row in rows])


@router.post(
    "/{token_id}:rotate",
    status_code=201,
    dependencies=[manages],
    summary="Rotate a token",
    operation_id="rotate_token",
    responses={201: _SHOWN_ONCE, **problems("token_not_found", "person_not_found", *_BODY)},
    openapi_extra=body(RotateRequest, {"overlapHours": 24}, required=False),
)
async def rotate_token(
    request: Request, response: Response, services: ServicesDependency, caller: Caller, token_id: TokenId
) -> NewToken:
    """Creates a successor with the same rights and the same expiry, and ends this token at once or after the overlap.
    Whoever could create the token can rotate it, and so can the token itself. For a later expiry, create a new
    token."""
    rotation = await read_body(request, parsed(RotateRequest, "invalid_token", "It can't be rotated"), optional=True)
    response.headers["Cache-Control"] = "no-store"
    return await rotated(services, caller, token_id, rotation)


async def rotated(services: Services, caller: Principal, token_id: str, body: RotateRequest) -> NewToken:
    """The successor, with its value. Raises ApiError token_not_found, forbidden and invalid_token."""
    token = new_token()
    async with services.database.write() as session:
        row = await service.find(session, caller, token_id)
        if row.id != caller.token:
            await service.refuse_other_person(session, caller, row.person, row.project)
        if row.expires_at is not None and row.expires_at <= time.time():  # its successor would open nothing either
            detail = f"Token {row.name!r} has expired. Make a new one: `muster tokens create NAME`."
            raise ApiError("invalid_token", detail)
        successor = service.rotate(session, row, body.overlap_hours * 3600.0, token)
        record(session, caller, AuditedAct("token.rotated", row.id, row.project, _recorded(row), {"id": successor.id}))
    return reply_of(NewToken, successor, scopes=successor.scopes["scopes"], token=token)


@router.delete(
    "/{token_id}",
    status_code=204,
    response_class=Response,
    dependencies=[manages],
    summary="Revoke a token",
    responses={204: {"description": "It opens nothing any more"}, **problems("token_not_found")},
)
async def revoke_token(services: ServicesDependency, caller: Caller, token_id: TokenId) -> Response:
    """Revokes a token. It is refused from this moment on, and its open streams end within a second."""
    async with services.database.write() as session:
        row = await service.find(session, caller, token_id)
        row.revoked_at = time.time()
        record(session, caller, AuditedAct("token.revoked", row.id, row.project, _recorded(row)))
    return Response(status_code=204)


def _recorded(row: TokenRow) -> dict[str, Any]:
    return {"name": row.name, "person": row.person, "scopes": row.scopes["scopes"]}
