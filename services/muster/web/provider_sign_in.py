"""Sign-in by the settings' OpenID Connect provider: the way there, and the way back into a session of ours.

Between the two the browser keeps the sign-in in a cookie of its own, one for each, so that two tabs don't disturb each
other. What comes back without its cookie was begun elsewhere, or by somebody else, and opens nothing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response

from muster.web import api
from muster.web.api import ApiError, CodeFlow, Principal, Services, ServicesDependency
from muster.web.session import is_encrypted, local_path, origin
from muster.web.sign_in import begin_session, sign_in_page

router = APIRouter(prefix="/sign-in", include_in_schema=False)

_COOKIE = "muster_flow_"
_COOKIES_MAX = 8  # a browser that begins again and again must not outgrow what servers read of a request's head
_LANDING = "/sign-in/callback"
# What is wrong with the request and not with the person who was sent (RFC 6749 §4.1.2.1).
_REQUEST_ERRORS = ("invalid_request", "invalid_scope", "unauthorized_client", "unsupported_response_type")
_Text = Annotated[str, Query(max_length=4_096)]


@router.get("/provider")
async def go_to_provider(request: Request, services: ServicesDependency, next: str = "/jobs") -> Response:
    """Start a sign-in. Whoever was sent here by another site signs in as themselves, and loses nothing by it."""
    onward = local_path(next)
    sign_in = services[api.CallerAuthentication].sign_in
    if sign_in is None:
        return sign_in_page(request, onward, 404, "Here one signs in by tokens alone.")
    flow = api.begin_flow(onward)
    try:
        address = await sign_in.provider_address(flow, origin(request, services) + _LANDING)
    except ApiError as refused:
        return sign_in_page(request, onward, refused.status, refused.detail)
    response = RedirectResponse(address, status_code=303, headers={"Cache-Control": "no-store"})
    for name in [name for name in request.cookies if name.startswith(_COOKIE)][: 1 - _COOKIES_MAX]:
        response.delete_cookie(name, path="/sign-in")
    response.set_cookie(
        _cookie_of(flow.state),
        base64.urlsafe_b64encode(json.dumps(asdict(flow)).encode()).decode(),
        max_age=int(api.FLOW_SECONDS),
        path="/sign-in",
        httponly=True,
        secure=is_encrypted(request, services),
        samesite="lax",  # the provider sends the browser back from another site
    )
    return response


@router.get("/callback")
async def come_back(
    request: Request,
    services: ServicesDependency,
    state: _Text = "",
    code: _Text = "",
    error: _Text = "",
    error_description: _Text = "",
    iss: _Text = "",
) -> Response:
    """The browser comes back from the provider. A refusal is the page for signing in, with cause and next step."""
    flow = _flow(request, state)
    sign_in = services[api.CallerAuthentication].sign_in
    if sign_in is None or flow is None or flow.expired:
        words = (
            f"This sign-in was not begun in this browser, or more than {api.FLOW_SECONDS / 60:.0f} minutes ago, "
            "so nobody was signed in. Sign in again."
        )
        return _ended(sign_in_page(request, "/jobs", 400, words), state)
    if error or iss not in ("", services.settings.oidc_issuer):  # RFC 9207: an answer of another provider
        return _ended(sign_in_page(request, flow.onward, 401, _refusal(services, error, error_description, iss)), state)
    try:
        caller = await sign_in.caller_by_code(flow, code, origin(request, services) + _LANDING)
    except ApiError as refused:
        return _ended(sign_in_page(request, flow.onward, refused.status, refused.detail), state)
    if not caller.admin and not caller.roles:
        return _ended(sign_in_page(request, flow.onward, 403, _nothing_for(services, caller)), state)
    return _ended(await begin_session(request, services, caller, flow.onward), state)


def _cookie_of(state: str) -> str:
    return _COOKIE + hashlib.sha256(state.encode()).hexdigest()[:16]  # whatever was sent, it is a name


def _flow(request: Request, state: str) -> CodeFlow | None:
    """The sign-in of that state, if this browser began it."""
    try:
        raw = json.loads(base64.urlsafe_b64decode(request.cookies.get(_cookie_of(state), "")))
        texts = {name: str(raw[name]) for name in ("state", "nonce", "verifier", "onward")}
        flow = CodeFlow(**texts, begun_at=float(raw["begun_at"]))
    except (ValueError, TypeError, KeyError):
        return None
    if local_path(flow.onward) != flow.onward:
        return None
    return flow if hmac.compare_digest(flow.state.encode(), state.encode()) else None


def _ended(response: Response, state: str) -> Response:
    """A sign-in is good once."""
    response.delete_cookie(_cookie_of(state), path="/sign-in")
    response.headers["Cache-Control"] = "no-store"
    return response


def _refusal(services: Services, error: str, description: str, iss: str) -> str:
    issuer = services.settings.oidc_issuer
    if not error:
        return f"The answer is of {iss[:100]!r} and not of {issuer}, so nobody was signed in. Sign in again."
    why = f"{error[:60]}: {description[:200]}" if description else error[:60]
    next_step = (
        "Whoever runs Muster compares MUSTER_API_OIDC_CLIENT_ID and MUSTER_API_OIDC_SCOPES with its client there."
        if error in _REQUEST_ERRORS
        else "Sign in again, or ask whoever runs the provider."
    )
    return f"{issuer} did not sign you in ({why}). {next_step}"


def _nothing_for(services: Services, caller: Principal) -> str:
    groups = sorted(caller.signed_in.groups) if caller.signed_in else []
    own = (
        f"your groups ({', '.join(groups)[:120]}) open no project"
        if groups
        else "you are in no group, so no project opens"
    )
    return (
        f"{services.settings.oidc_issuer} knows you as {caller.person!r}, but {own} here. Ask an admin to "
        f"add you (muster projects add PROJECT {caller.person} --role member) or one of your groups, and sign in again."
    )
