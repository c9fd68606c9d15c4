"""Sessions of the pages: sign-in by a token that a cookie replaces, sign-out, and protection of forms."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Depends, Request
from fastapi.responses import RedirectResponse, Response
from fastapi.security import HTTPAuthorizationCredentials

from muster.web import api
from muster.web.api import COOKIE, ApiError, Principal, Scope, ServicesDependency
from muster.web.notes import Note, go_on

router = APIRouter(include_in_schema=False)

FORM_TOKEN = "form_token"  # noqa: S105 - the name of a field
_HOME = "/jobs"
_FIELDS_MAX = 2_000


async def visitor(request: Request, services: ServicesDependency) -> Principal:
    """Return the signed-in principal. Raises ApiError unauthorized, which becomes the sign-in page, and forbidden."""
    address = request.client.host[:64] if request.client else ""
    given = await api.bearer(request)
    if given is not None or not services.settings.auth:
        caller = await api.principal(request, services, given)
    else:
        known = await api.of_session(services, request)
        if known is None:
            raise ApiError("unauthorized", "You are not signed in, or your session has ended.")
        caller = api.counted(services, known, address)
    if not caller.may(Scope.READ):
        raise ApiError("forbidden", "Pages are read with a token of the scope read; this one has none.")
    return caller


Visitor = Annotated[Principal, Depends(visitor)]


@dataclass(frozen=True)
class Form:
    """Submitted form and its sender. A missing field is an empty text."""

    caller: Principal
    fields: dict[str, list[str]]

    def one(self, name: str) -> str:
        return self.fields.get(name, [""])[0]

    def all(self, name: str) -> list[str]:
        return self.fields.get(name, [])


async def posted(request: Request, caller: Visitor) -> Form:
    """The fields of a form that one of our own pages sent. Raises ApiError forbidden for all others."""
    refuse_other_sites(request)
    if not caller.may(Scope.WRITE):
        own = ", ".join(sorted(caller.scopes)) or "none"
        raise ApiError("forbidden", f"This needs a token with the scope write; the one of your session has {own}.")
    fields = await read_form(request)
    if not hmac.compare_digest(fields.get(FORM_TOKEN, [""])[0].encode(), form_token(request).encode()):
        detail = "The form is of another session, so nothing was done. Go back, load the page again and repeat it."
        raise ApiError("forbidden", detail)
    return Form(caller, fields)


Posted = Annotated[Form, Depends(posted)]


def form_token(request: Request) -> str:
    """Return the token that our forms carry."""
    secret = request.cookies.get(COOKIE) or request.app.state.form_secret
    return api.form_token(secret)


def refuse_other_sites(request: Request) -> None:
    """Raises ApiError forbidden for a form of another site, by what the browser itself says of it."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        foreign = site not in ("same-origin", "none")
    else:
        foreign = origin is not None and urlsplit(origin).netloc != request.headers.get("host")
    if foreign:
        raise ApiError("forbidden", "The form was sent by a page of another site, so nothing was done.")


async def read_form(request: Request) -> dict[str, list[str]]:
    """Raises ApiError invalid_document for what is no form."""
    try:
        body = (await request.body()).decode()
        return parse_qs(body, keep_blank_values=True, max_num_fields=_FIELDS_MAX)
    except ValueError:
        raise ApiError("invalid_document", "The form can't be read.") from None


def origin(request: Request, services: api.Services) -> str:
    """Return our origin as the browser sees it. A setting overrides the request, which hides a proxy's address."""
    return services.settings.public_url or str(request.base_url).rstrip("/")


def is_encrypted(request: Request, services: api.Services) -> bool:
    """Return whether cookies may be restricted to encrypted connections."""
    return origin(request, services).startswith("https:")


def local_path(path: str) -> str:
    """Return the path to continue at after sign-in, which is always on this site."""
    fine = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if fine else _HOME


@router.get("/sign-in")
async def show_sign_in(request: Request, services: ServicesDependency, next: str = _HOME) -> Response:
    """The page for signing in; whoever is signed in goes on."""
    if not services.settings.auth or await api.of_session(services, request) is not None:
        return RedirectResponse(local_path(next), status_code=303)
    return sign_in_page(request, local_path(next))


def sign_in_page(request: Request, onward: str, status: int = 200, fault: str = "") -> Response:
    from muster.web.rendering import page  # it shows this module's form token on every page

    issuer = request.app.state.services.settings.oidc_issuer
    provider = urlsplit(issuer).hostname if issuer else None
    return page(request, "sign_in.html", None, status, onward=onward, fault=fault, provider=provider)


@router.post("/sign-in")
async def sign_in(request: Request, services: ServicesDependency) -> Response:
    """By a token, which is kept nowhere: the cookie is a secret of its own."""
    refuse_other_sites(request)
    fields = await read_form(request)
    token, onward = fields.get("token", [""])[0].strip(), local_path(fields.get("next", [_HOME])[0])
    try:
        caller = await api.principal(
            request, services, HTTPAuthorizationCredentials(scheme="Bearer", credentials=token)
        )
    except ApiError as refused:
        if refused.code != "unauthorized":
            raise
        return sign_in_page(request, onward, 401, "This token is unknown, revoked or expired.")
    return await begin_session(request, services, caller, onward)


async def begin_session(request: Request, services: api.Services, caller: Principal, onward: str) -> Response:
    if (before := request.cookies.get(COOKIE)) is not None:
        await api.sessions.end(services, before)
    response = RedirectResponse(onward, status_code=303)
    response.set_cookie(
        COOKIE,
        await api.sessions.begin(services, caller),
        max_age=int(api.sessions.SESSION_SECONDS),
        httponly=True,
        secure=is_encrypted(request, services),
        # Not strict: a link to a job in a colleague's message must find one signed in. Forms have their own protection.
        samesite="lax",
    )
    return response


@router.post("/sign-out")
async def sign_out(request: Request, services: ServicesDependency) -> Response:
    """End this browser's session; repeating it is harmless."""
    refuse_other_sites(request)
    if (secret := request.cookies.get(COOKIE)) is not None:
        await api.sessions.end(services, secret)
    response = go_on("/sign-in", [Note(True, "You are signed out.")])
    response.delete_cookie(COOKIE)
    return response
