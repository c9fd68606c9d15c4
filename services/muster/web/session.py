"""Sessions of the pages, kept by a cookie, and protection of the forms. `sign_in.py` begins and ends them."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from fastapi import Depends, Request

from muster.web import api
from muster.web.api import COOKIE, ApiError, Principal, Scope, ServicesDependency

FORM_TOKEN = "form_token"  # noqa: S105 - the name of a field
HOME = "/jobs"
_FIELDS_MAX = 2_000


async def visitor(request: Request, services: ServicesDependency) -> Principal:
    """Return the signed-in principal. Raises ApiError unauthorized, which becomes the sign-in page, and forbidden."""
    address = request.client.host[:64] if request.client else ""
    given = await api.bearer(request)
    if given is not None or not services.settings.auth:
        caller = await services.authenticator.authenticate(request, given)
    else:
        caller_of_session = await api.of_session(services, request)
        if caller_of_session is None:
            raise ApiError("unauthorized", "You are not signed in, or your session has ended.")
        caller = services[api.CallerAuthentication].counted(caller_of_session, address)
    if not caller.may(Scope.READ):
        raise ApiError("forbidden", "Pages are read with a token of the scope read; this one has none.")
    return caller


Visitor = Annotated[Principal, Depends(visitor)]


@dataclass(frozen=True)
class SubmittedForm:
    """Submitted form and its sender. A missing field is an empty text."""

    caller: Principal
    fields: dict[str, list[str]]

    def one(self, name: str) -> str:
        return self.fields.get(name, [""])[0]

    def all(self, name: str) -> list[str]:
        return self.fields.get(name, [])


async def own_form(request: Request, caller: Visitor) -> SubmittedForm:
    """The fields of a form that one of our own pages sent. Raises ApiError forbidden for all others."""
    refuse_other_sites(request)
    fields = await read_form(request)
    if not hmac.compare_digest(fields.get(FORM_TOKEN, [""])[0].encode(), form_token(request).encode()):
        detail = "The form is of another session, so nothing was done. Go back, load the page again and repeat it."
        raise ApiError("forbidden", detail)
    return SubmittedForm(caller, fields)


async def posted(request: Request, caller: Visitor) -> SubmittedForm:
    """The same, of a form that changes something."""
    refuse_other_sites(request)
    must_write(caller)
    return await own_form(request, caller)


def must_write(caller: Principal) -> None:
    """Raises ApiError forbidden for who may only read."""
    if not caller.may(Scope.WRITE):
        own = ", ".join(sorted(caller.scopes)) or "none"
        raise ApiError("forbidden", f"This needs a token with the scope write; the one of your session has {own}.")


SentForm = Annotated[SubmittedForm, Depends(own_form)]
Posted = Annotated[SubmittedForm, Depends(posted)]


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
    return path if fine else HOME
