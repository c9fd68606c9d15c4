"""An OpenID Connect provider on a port of this machine, made of authlib's server: sign-in by code and by browser with
PKCE, refresh tokens, keys that rotate. (oidc-provider-mock, which was looked at, has no device codes and one key.)"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import flask
from authlib.integrations.flask_oauth2 import AuthorizationServer
from authlib.oauth2.rfc6749 import AuthorizationCodeMixin, ClientMixin, grants
from authlib.oauth2.rfc7636 import CodeChallenge
from authlib.oauth2.rfc8628 import DeviceAuthorizationEndpoint, DeviceCodeGrant, DeviceCredentialDict
from joserfc import jwk, jwt
from werkzeug.serving import make_server

CLIENT = "muster"


class Client(ClientMixin):
    """A public client: its users' machines keep no secret."""

    def get_client_id(self) -> str:
        return CLIENT

    def get_default_redirect_uri(self) -> str:
        return ""

    def get_allowed_scope(self, scope: str) -> str:
        return scope or ""

    def check_redirect_uri(self, redirect_uri: str) -> bool:
        return urlsplit(redirect_uri).hostname == "127.0.0.1"

    def check_endpoint_auth_method(self, method: str, endpoint: str) -> bool:
        return method == "none"

    def check_response_type(self, response_type: str) -> bool:
        return response_type == "code"

    def check_grant_type(self, grant_type: str) -> bool:
        return True


@dataclass
class Code(AuthorizationCodeMixin):
    code: str
    redirect_uri: str
    scope: str
    code_challenge: str
    code_challenge_method: str
    nonce: str | None

    def get_redirect_uri(self) -> str:
        return self.redirect_uri

    def get_scope(self) -> str:
        return self.scope


class Provider:
    """`claims` are those of whoever signs in, `lifetime` the seconds of an ID token. `asked` counts requests."""

    def __init__(self, issuer: str) -> None:
        self.issuer = issuer
        self.claims: dict[str, Any] = {"sub": "s-1", "preferred_username": "ann", "groups": ["ml"]}
        self.lifetime = 3600
        self.asked: dict[str, int] = {}
        self.approves = True  # what the person says to a code that is entered
        self.pending = 0  # so often the device asks before the person has entered its code
        self.keys: list[Any] = []
        self.codes: dict[str, Code] = {}
        self.devices: dict[str, dict[str, Any]] = {}
        self.refreshes: set[str] = set()
        self.rotate()

    def rotate(self) -> None:
        """Sign by a new key, and publish it alone."""
        self.keys = [jwk.RSAKey.generate_key(2048, {"kid": secrets.token_hex(4), "use": "sig", "alg": "RS256"})]

    def token(self, key: Any = None, algorithm: str = "RS256", header: Any = None, **claims: Any) -> str:
        """An ID token with these claims in place of those that it would have; None leaves one out."""
        now = int(time.time())
        times = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + self.lifetime}
        said = {name: value for name, value in (times | self.claims | claims).items() if value is not None}
        key = key or self.keys[0]
        kid = key.as_dict().get("kid", "shared")
        return str(jwt.encode({"alg": algorithm, "kid": kid} | (header or {}), said, key, algorithms=[algorithm]))

    def app(self) -> flask.Flask:
        app = flask.Flask("provider")
        server = AuthorizationServer(app, query_client=lambda _: Client(), save_token=self._save)
        server.register_grant(_grant(grants.AuthorizationCodeGrant, self), [CodeChallenge(required=True)])
        server.register_grant(_grant(_Device, self))
        server.register_grant(_grant(_Refresh, self))
        server.register_endpoint(_device_endpoint(self))
        app.config["OAUTH2_REFRESH_TOKEN_GENERATOR"] = True
        server.init_app(app)

        @app.before_request
        def count() -> None:
            self.asked[flask.request.path] = self.asked.get(flask.request.path, 0) + 1

        app.get("/.well-known/openid-configuration")(self._about)
        app.get("/keys", endpoint="keys")(lambda: {"keys": [key.as_dict(private=False) for key in self.keys]})

        @app.get("/authorize")
        def authorize() -> Any:
            person = self.claims if self.approves else None
            grant = server.get_consent_grant(end_user=self.claims)
            return server.create_authorization_response(grant=grant, grant_user=person)

        @app.post("/token", endpoint="token")
        def token() -> flask.Response:
            code = self.codes.get(flask.request.form.get("code", ""))
            nonce = code.nonce if code else None  # the code is good once, and its nonce with it
            return self._with_id_token(server.create_token_response(), nonce)

        app.post("/device", endpoint="device")(lambda: server.create_endpoint_response("device_authorization"))
        return app

    def _about(self) -> dict[str, str]:
        return {
            "issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys", "token_endpoint": f"{self.issuer}/token",
            "authorization_endpoint": f"{self.issuer}/authorize",
            "device_authorization_endpoint": f"{self.issuer}/device",
        }  # fmt: skip

    def _with_id_token(self, response: flask.Response, nonce: str | None) -> flask.Response:
        """OpenID Connect's part of an answer, which of authlib's grants only the one of codes would make."""
        answer = response.get_json()
        if response.status_code == 200 and "id_token" not in answer:
            response.set_data(flask.json.dumps(answer | {"id_token": self.token(**{"nonce": nonce} | self.claims)}))
        return response

    def _save(self, token: dict[str, Any], _request: Any) -> None:
        if token.get("refresh_token"):
            self.refreshes.add(token["refresh_token"])


class _Device(DeviceCodeGrant):
    provider: Provider

    def query_device_credential(self, device_code: str) -> Any:
        found = self.provider.devices.get(device_code)
        return DeviceCredentialDict(found) if found else None

    def query_user_grant(self, user_code: str) -> Any:
        if self.provider.pending > 0:
            self.provider.pending -= 1
            return None
        return self.provider.claims, self.provider.approves

    def should_slow_down(self, credential: Any) -> bool:
        return False


class _Refresh(grants.RefreshTokenGrant):
    provider: Provider
    TOKEN_ENDPOINT_AUTH_METHODS = ["none"]  # noqa: RUF012
    INCLUDE_NEW_REFRESH_TOKEN = True

    def authenticate_refresh_token(self, refresh_token: str) -> Any:
        if refresh_token not in self.provider.refreshes:
            return None
        self.provider.refreshes.discard(refresh_token)  # it is good once
        return _Credential()

    def authenticate_user(self, refresh_token: Any) -> Any:
        return self.provider.claims

    def revoke_old_credential(self, refresh_token: Any) -> None:
        pass


class _Credential:
    def get_scope(self) -> str:
        return "openid"

    def check_client(self, client: Any) -> bool:
        return True


def _grant(kind: Any, provider: Provider) -> Any:
    """The grant of this provider: authlib takes classes."""

    def save(self: Any, code: str, request: Any) -> None:
        asked = request.payload
        provider.codes[code] = Code(
            code, asked.redirect_uri, asked.scope, asked.data.get("code_challenge", ""),
            asked.data.get("code_challenge_method", ""), asked.data.get("nonce"),
        )  # fmt: skip

    own = {
        "provider": provider,
        "TOKEN_ENDPOINT_AUTH_METHODS": ["none"],
        "save_authorization_code": save,
        "query_authorization_code": lambda self, code, client: provider.codes.get(code),
        "delete_authorization_code": lambda self, code: provider.codes.pop(code.code),
        "authenticate_user": lambda self, code: provider.claims,
    }
    if kind is not grants.AuthorizationCodeGrant:
        own = {"provider": provider, "TOKEN_ENDPOINT_AUTH_METHODS": ["none"]}
    return type(kind.__name__, (kind,), own)


def _device_endpoint(provider: Provider) -> Any:
    def save(self: Any, client_id: str, scope: str, data: dict[str, Any]) -> None:
        provider.devices[data["device_code"]] = {
            "client_id": client_id, "scope": scope, "expires_at": time.time() + 60, "user_code": data["user_code"],
        }  # fmt: skip

    own = {
        "INTERVAL": 0.01,
        "get_verification_uri": lambda self: f"{provider.issuer}/enter",
        "save_device_credential": save,
    }
    return type("DeviceEndpoint", (DeviceAuthorizationEndpoint,), own)


@contextlib.contextmanager
def oidc_provider() -> Iterator[Provider]:
    """One that listens, in a thread."""
    os.environ["AUTHLIB_INSECURE_TRANSPORT"] = "1"  # http on loopback
    provider = Provider("")
    app = provider.app()
    server = make_server("127.0.0.1", 0, app, threaded=True)
    provider.issuer = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, name="oidc provider", daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
