"""An OpenID Connect provider's ID tokens, judged by the keys that it publishes.

OpenID Connect Core 1.0 §3.1.3.7 says what is checked, RFC 8725 why no algorithm is taken at the token's word.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jwt
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout

from muster.api.core.callers import SignedIn
from muster.api.core.settings import ApiSettings

# Signatures by a key pair alone: with HS* whoever knows the public key could sign, and `none` is no signature.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
LEEWAY_SECONDS = 30.0  # clocks that NTP keeps differ by less than a second; a minute more would prolong every sign-in
REFETCH_SECONDS = 10.0  # so often at most an unknown key makes us ask: anybody can name one in a token
KEPT_SECONDS = 3_600.0  # a key that the provider takes back counts no longer
ANSWER_SECONDS_MAX = 10.0
ANSWER_BYTES_MAX = 1 << 20


class SignInRefused(Exception):
    """The token is none that opens anything; the message says why, without the token."""


class ProviderUnreachable(Exception):
    """The provider's keys can't be read now."""


class IssuerMismatch(ProviderUnreachable):
    """The provider calls itself otherwise than the settings do, by a slash at the end for example."""


class IdentityProvider:
    """The provider of the settings, which name one. `clock` is in seconds since the epoch, `ticks` a monotonic one."""

    def __init__(
        self, settings: ApiSettings, clock: Callable[[], float] = time.time, ticks: Callable[[], float] = time.monotonic
    ) -> None:
        assert settings.oidc_issuer is not None
        assert settings.oidc_client_id is not None
        self.issuer, self.client = settings.oidc_issuer, settings.oidc_client_id
        self._clients = {self.client, settings.oidc_login_client_id or self.client}
        self.scopes = settings.oidc_scopes
        self._audiences = {settings.oidc_audience} if settings.oidc_audience else self._clients
        self._person_claim, self._groups_claim = settings.oidc_person_claim, settings.oidc_groups_claim
        self._clock, self._ticks = clock, ticks
        self._about: dict[str, Any] = {}  # its discovery document
        self._keys: dict[str, dict[str, Any]] = {}  # as they were published, by their id
        self._fetched_at: float | None = None  # or tried to
        self._kept_since: float | None = None
        self._claimed_issuer: str | None = None  # by which it called itself when it was asked last
        self._turn = asyncio.Lock()

    async def endpoint(self, name: str) -> str:
        """An address that the provider publishes, such as `token_endpoint`. Raises ProviderUnreachable."""
        async with self._turn:
            if not self._about or self._is_old():
                await self._fetch(must=not self._about)
        address = self._about.get(name)
        if not isinstance(address, str) or not address:
            raise ProviderUnreachable(f"it publishes no {name}")
        return address

    async def verify(self, token: str, nonce: str | None = None) -> SignedIn:
        """Return the claims of the token, if it is this provider's, for us and currently valid.

        A `nonce` is given for a token that the provider itself has just handed to us: the token must hold that nonce,
        and an unknown key is fetched at once, because nobody but the provider can have named it. Raises SignInRefused,
        and ProviderUnreachable if its key is unknown and can't be fetched.
        """
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError:
            raise SignInRefused("it is no JSON Web Token") from None
        algorithm = header.get("alg")
        if algorithm not in ALGORITHMS:
            words = f"its algorithm is {str(algorithm)[:20]!r}"
            raise SignInRefused(f"{words}, and only signatures by a key pair are taken")
        key = await self._key(header.get("kid"), from_provider=nonce is not None)
        claims = self._checked(token, key, algorithm)
        if nonce is not None and not hmac.compare_digest(str(claims.get("nonce")).encode(), nonce.encode()):
            raise SignInRefused("it answers another sign-in (nonce)")
        return SignedIn(str(claims["sub"]), self._name(claims), self._groups(claims), claims["exp"] + LEEWAY_SECONDS)

    def _checked(self, token: str, key: dict[str, Any], algorithm: str) -> dict[str, Any]:
        required = ["exp", "iat", "iss", "aud", "sub"]
        # Times are judged below, by our clock: PyJWT has one of its own.
        options: Any = {"require": required, "verify_exp": False, "verify_nbf": False, "verify_iat": False}
        try:
            if key.get("alg", algorithm) != algorithm:
                raise jwt.InvalidAlgorithmError
            claims: dict[str, Any] = jwt.decode(
                token,
                jwt.PyJWK(key, algorithm),
                [algorithm],
                options=options,
                audience=self._audiences,
                issuer=self.issuer,
            )
        except jwt.InvalidAudienceError:
            raise SignInRefused("it is for somebody else (aud)") from None
        except jwt.InvalidIssuerError:
            raise SignInRefused("it is of another issuer (iss)") from None
        except jwt.MissingRequiredClaimError as error:
            raise SignInRefused(f"it does not say its {error.claim}") from None
        except jwt.PyJWTError:
            raise SignInRefused("its signature is not the provider's") from None
        if isinstance(claims["aud"], list) and len(claims["aud"]) > 1 and claims.get("azp") not in self._clients:
            raise SignInRefused("it is for several, and was not given to us (azp)")
        self._refuse_other_times(claims)
        return claims

    def _refuse_other_times(self, claims: Mapping[str, Any]) -> None:
        now = self._clock()
        times = {name: claims.get(name, now) for name in ("exp", "nbf", "iat")}
        if not all(isinstance(at, int | float) and not isinstance(at, bool) for at in times.values()):
            raise SignInRefused("its times are no numbers")
        if now >= times["exp"] + LEEWAY_SECONDS:
            raise SignInRefused("the sign-in has expired")
        if now + LEEWAY_SECONDS < max(times["nbf"], times["iat"]):
            raise SignInRefused("it is not valid yet: the clocks of the provider and this server differ")

    def _name(self, claims: Mapping[str, Any]) -> str:
        return str(_claim(claims, self._person_claim) or "").partition("@")[0].lower()

    def _groups(self, claims: Mapping[str, Any]) -> frozenset[str]:
        value = _claim(claims, self._groups_claim)
        groups = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        return frozenset(group for group in groups if isinstance(group, str))

    async def _key(self, kid: Any, from_provider: bool) -> dict[str, Any]:
        """The key of that id, or the only one for a token that names none."""
        if (key := self._cached_key(kid)) is not None and not self._is_old():
            return key
        async with self._turn:  # of many at once one asks
            if (key := self._cached_key(kid)) is None or self._is_old():
                await self._fetch(must=key is None, at_once=from_provider)
                key = self._cached_key(kid)
        if key is None:
            raise SignInRefused("its key is not one of the provider's")
        return key

    def _cached_key(self, kid: Any) -> dict[str, Any] | None:
        if kid is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(kid) if isinstance(kid, str) else None

    def _is_old(self) -> bool:
        return self._kept_since is None or self._ticks() - self._kept_since >= KEPT_SECONDS

    async def _fetch(self, must: bool, at_once: bool = False) -> None:
        """Ask for the keys, unless that was done a moment ago. While there is no answer, known keys count."""
        recent = self._fetched_at is not None and self._ticks() - self._fetched_at < REFETCH_SECONDS
        if recent and not at_once:
            if must and self._claimed_issuer is not None:
                raise IssuerMismatch(f"it calls itself {self._claimed_issuer!r}")
            if must and not self._keys:
                raise ProviderUnreachable("its keys could not be read a moment ago")
            return
        self._fetched_at, self._claimed_issuer = self._ticks(), None
        try:
            async with ClientSession(timeout=ClientTimeout(total=ANSWER_SECONDS_MAX), trust_env=True) as session:
                url = f"{self.issuer.rstrip('/')}/.well-known/openid-configuration"
                async with session.get(url, raise_for_status=True) as reply:
                    about = await read_json(reply)
                if about.get("issuer") != self.issuer:
                    self._claimed_issuer = str(about.get("issuer"))[:200]
                    raise IssuerMismatch(f"it calls itself {self._claimed_issuer!r}")
                async with session.get(str(about.get("jwks_uri")), raise_for_status=True) as reply:
                    key_set = await read_json(reply)
        except (ClientError, TimeoutError, OSError, ValueError) as error:
            if must:
                raise ProviderUnreachable(f"{type(error).__name__}: {error}"[:300]) from None
            return
        except ProviderUnreachable:
            if must:
                raise
            return
        self._about, self._keys, self._kept_since = about, _keys(key_set), self._ticks()


async def read_json(reply: ClientResponse) -> dict[str, Any]:
    """The object that a provider answers with, a megabyte at most. Raises ValueError for anything else."""
    body = b""
    while not reply.content.at_eof() and len(body) < ANSWER_BYTES_MAX:
        body += await reply.content.read(ANSWER_BYTES_MAX - len(body))
    document = json.loads(body)
    if not isinstance(document, dict):
        raise ValueError(f"{reply.url} is no JSON object")
    return document


def _keys(key_set: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The keys for signatures by their ids; one that this library does not know is another's affair."""
    keys = {}
    for number, document in enumerate(key_set.get("keys") or ()):
        if not isinstance(document, dict) or document.get("use", "sig") != "sig" or document.get("kty") == "oct":
            continue
        try:
            jwt.PyJWK(document)
        except jwt.PyJWTError:
            continue
        keys[str(document.get("kid", number))] = document
    return keys


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """The claim of that name, or of that path: `realm_access.roles`."""
    if name in claims:
        return claims[name]
    here: Any = claims
    for part in name.split("."):
        here = here.get(part) if isinstance(here, dict) else None
    return here
