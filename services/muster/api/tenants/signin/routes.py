"""`/sign-in`: where `muster login` sends people. It is open: nobody has a token yet who asks."""

from __future__ import annotations

from fastapi import APIRouter

from muster.api.core.errors import ApiError
from muster.api.core.http.openapi import example_reply, problems
from muster.api.core.http.reply import Reply
from muster.api.core.services import ServicesDependency

router = APIRouter(prefix="/sign-in", tags=["people"])


class SignInReply(Reply):
    """The OpenID Connect provider, and as which of its clients to ask it."""

    issuer: str
    client_id: str
    scopes: list[str]


_EXAMPLE = {
    "issuer": "https://id.example.com",
    "clientId": "muster",
    "scopes": ["openid", "profile", "email", "offline_access"],
}


@router.get(
    "",
    summary="Show where to sign in",
    responses={200: example_reply(_EXAMPLE, "The provider"), **problems("not_found")},
)
async def get_sign_in(services: ServicesDependency) -> SignInReply:
    """Returns the sign-in provider. The response is 404 where only tokens are accepted."""
    settings = services.settings
    if settings.oidc_issuer is None or settings.oidc_client_id is None:
        raise ApiError("not_found", "Here one signs in by tokens alone; an admin makes one: `muster tokens create`.")
    client = settings.oidc_login_client_id or settings.oidc_client_id
    return SignInReply(issuer=settings.oidc_issuer, client_id=client, scopes=[*settings.oidc_scopes])
