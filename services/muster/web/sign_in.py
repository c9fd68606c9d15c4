"""Sign-in by a token, which a cookie replaces, and sign-out."""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from fastapi.security import HTTPAuthorizationCredentials

from muster.web import api
from muster.web.api import COOKIE, ApiError, Principal, ServicesDependency
from muster.web.notes import PageNote, go_on
from muster.web.rendering import page
from muster.web.session import HOME, is_encrypted, local_path, read_form, refuse_other_sites

router = APIRouter(include_in_schema=False)


@router.get("/sign-in")
async def show_sign_in(request: Request, services: ServicesDependency, next: str = HOME) -> Response:
    """The page for signing in; whoever is signed in goes on."""
    if not services.settings.auth or await api.of_session(services, request) is not None:
        return RedirectResponse(local_path(next), status_code=303)
    return sign_in_page(request, local_path(next))


def sign_in_page(request: Request, onward: str, status: int = 200, fault: str = "") -> Response:
    issuer = request.app.state.services.settings.oidc_issuer
    provider = urlsplit(issuer).hostname if issuer else None
    return page(request, "sign_in.html", None, status, onward=onward, fault=fault, provider=provider)


@router.post("/sign-in")
async def sign_in(request: Request, services: ServicesDependency) -> Response:
    """Sign in by a token, which is not stored: the cookie is a secret of its own."""
    refuse_other_sites(request)
    fields = await read_form(request)
    token, onward = fields.get("token", [""])[0].strip(), local_path(fields.get("next", [HOME])[0])
    try:
        caller = await services.authenticator.authenticate(
            request, HTTPAuthorizationCredentials(scheme="Bearer", credentials=token)
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
    response = go_on("/sign-in", [PageNote(True, "You are signed out.")])
    response.delete_cookie(COOKIE)
    return response
