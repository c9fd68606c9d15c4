"""`/tokens`: made, listed and revoked by admins."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request, Response
from fastapi.responses import JSONResponse

from muster.api.auth import Scope, needs, new_token
from muster.api.body import read_body
from muster.api.errors import ApiError, invalid_token
from muster.api.jobs.routes import NO_NUL
from muster.api.openapi import body, problems, shown
from muster.api.reply import Reply
from muster.api.services import ServicesDependency
from muster.api.tables import TokenRow
from muster.api.tokens import service
from muster.api.tokens.schemas import TokenRequest
from muster.contract.base import InvalidDocument, Time, parse
from muster.contract.times import rfc3339, rfc3339_or_none
from muster.documents.document import Document

admins = Depends(needs(Scope.ADMIN))
router = APIRouter(prefix="/tokens", tags=["tokens"], dependencies=[admins])


class Token(Reply):
    """`expires_at` is null for a token that never does, and `last_used_at` before the first use."""

    id: str
    name: str
    scopes: list[Scope]
    created_at: Time
    expires_at: Time | None
    last_used_at: Time | None


class NewToken(Token):
    """`token` is shown this once, and stored nowhere."""

    token: str


class TokenList(Reply):
    items: list[Token]


_EXAMPLE: dict[str, Any] = {
    "id": "0c2c31c1-96f9-4f3c-8a39-5b2f9a0f4d11",
    "name": "ci",
    "scopes": ["write"],
    "createdAt": rfc3339(1_795_000_000.0),
    "expiresAt": None,
    "lastUsedAt": None,
}


@router.post(
    "",
    status_code=201,
    response_model=NewToken,
    summary="Make a token",
    responses={
        201: shown({**_EXAMPLE, "token": "muster_…"}, "The only time that the token is shown"),
        **problems("invalid_document", "unsupported_media_type", "body_too_large", "invalid_token"),
    },
    openapi_extra=body("TokenRequest", {"name": "ci", "scopes": ["write"], "expiresInDays": 90}),
)
async def make_token(request: Request, services: ServicesDependency) -> JSONResponse:
    """Make a token with the scopes read, write or admin."""
    wanted = await read_body(request, _wanted)
    token = new_token()
    days = wanted.expires_in_days
    async with services.database.write() as session:
        row = service.make(session, wanted.name, wanted.scopes, time.time() + days * 86_400 if days else None, token)
    return JSONResponse({**_document(row), "token": token}, status_code=201, headers={"Cache-Control": "no-store"})


@router.get(
    "",
    response_model=TokenList,
    summary="List tokens",
    responses={200: shown({"items": [_EXAMPLE]}, "Tokens"), **problems()},
)
async def list_tokens(services: ServicesDependency) -> JSONResponse:
    """Every token that is not revoked; never the tokens themselves."""
    async with services.database.read() as session:
        rows = await service.list_all(session)
    return JSONResponse({"items": [_document(row) for row in rows]})


@router.delete(
    "/{token_id}",
    status_code=204,
    response_class=Response,
    summary="Revoke a token",
    responses={204: {"description": "It opens nothing any more"}, **problems("token_not_found")},
)
async def revoke_token(
    services: ServicesDependency, token_id: Annotated[str, Path(max_length=64, pattern=NO_NUL)]
) -> Response:
    """From this moment on the token is refused."""
    async with services.database.write() as session:
        if not await service.revoke(session, token_id):
            raise ApiError("token_not_found", f"There is no token with the id {token_id!r}.")
    return Response(status_code=204)


def _wanted(body: Document) -> TokenRequest:
    try:
        return parse(TokenRequest, body.data)
    except InvalidDocument as invalid:
        raise invalid_token(tuple(body.located(fault) for fault in invalid.problems)) from None


def _document(row: TokenRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "name": row.name,
        "scopes": row.scopes["scopes"],
        "createdAt": rfc3339(row.created_at),
        "expiresAt": rfc3339_or_none(row.expires_at),
        "lastUsedAt": rfc3339_or_none(row.last_used_at),
    }
