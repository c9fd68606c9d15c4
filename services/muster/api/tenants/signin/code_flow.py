"""The authorization code flow by which browsers sign in at the provider (OpenID Connect Core 1.0 §3.1).

The client is public, so a code is worth nothing without the proof of its key (PKCE, RFC 7636): what `muster login` and
this server ask for is the same client.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
from dataclasses import dataclass
from urllib.parse import urlencode

from aiohttp import ClientError, ClientSession, ClientTimeout

from muster.api.core.callers import SignedIn
from muster.api.tenants.signin.provider import (
    ANSWER_SECONDS_MAX,
    IdentityProvider,
    ProviderUnreachable,
    SignInRefused,
    read_json,
)

FLOW_SECONDS = 600.0  # to sign in at the provider, a second factor included; half of it is short for who must reset one


@dataclass(frozen=True)
class CodeFlow:
    """A sign-in under way. The browser keeps it in a cookie, so that any API process can end it.

    state: what comes back with the browser, and nobody else knows (RFC 6749 §10.12).
    nonce: what the ID token must hold, so that it is the answer to this sign-in.
    verifier: the key whose proof the code needs.
    onward: the page that is shown afterwards.
    begun_at: in seconds since the epoch.
    """

    state: str
    nonce: str
    verifier: str
    onward: str
    begun_at: float

    @property
    def expired(self) -> bool:
        return time.time() - self.begun_at > FLOW_SECONDS


def begin(onward: str) -> CodeFlow:
    return CodeFlow(
        secrets.token_urlsafe(32), secrets.token_urlsafe(32), secrets.token_urlsafe(48), onward, time.time()
    )


async def authorization_address(provider: IdentityProvider, flow: CodeFlow, landing: str) -> str:
    """Return the address where the browser signs in, after which it returns to `landing`. Raises
    ProviderUnreachable."""
    endpoint = await provider.endpoint("authorization_endpoint")
    digest = hashlib.sha256(flow.verifier.encode()).digest()
    asked = {
        "response_type": "code",
        "client_id": provider.client,
        "redirect_uri": landing,
        # Sessions are renewed by signing in again, so nothing is asked for that outlives this one.
        "scope": " ".join(scope for scope in provider.scopes if scope != "offline_access"),
        "state": flow.state,
        "nonce": flow.nonce,
        "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
        "code_challenge_method": "S256",
    }
    return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(asked)}"


async def redeem(provider: IdentityProvider, flow: CodeFlow, code: str, landing: str) -> SignedIn:
    """Exchange the code for an ID token, and return who signed in. Raises SignInRefused, ProviderUnreachable."""
    endpoint = await provider.endpoint("token_endpoint")
    asked = {
        "grant_type": "authorization_code",
        "code": code,
        "redirect_uri": landing,
        "client_id": provider.client,
        "code_verifier": flow.verifier,
    }
    try:
        timeout = ClientTimeout(total=ANSWER_SECONDS_MAX)
        async with (
            ClientSession(timeout=timeout, trust_env=True) as session,
            # A redirect would carry the code and its key elsewhere.
            session.post(endpoint, data=asked, headers={"Accept": "application/json"}, allow_redirects=False) as reply,
        ):
            status, answer = reply.status, await read_json(reply)
    except (ClientError, TimeoutError, OSError, ValueError) as error:
        raise ProviderUnreachable(f"its token endpoint: {type(error).__name__}: {error}"[:300]) from None
    if 400 <= status < 500:
        why = str(answer.get("error_description") or answer.get("error") or status)
        raise SignInRefused(f"the provider takes its code no more ({why[:200]})")
    token = answer.get("id_token")
    if status != 200 or not isinstance(token, str):
        raise ProviderUnreachable(f"its token endpoint answers {status} without an ID token")
    return await provider.verify(token, flow.nonce)
