"""Sessions of `muster login`: one file per server that only its user may read, renewed before it expires."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muster.client.errors import NotAllowed, Unavailable

EARLY_SECONDS = 60.0  # a sign-in is renewed so long before it expires: a request that begins now must not end too late
ANSWER_SECONDS_MAX = 20.0


@dataclass(frozen=True)
class SignedIn:
    """A sign-in to one server. `expires_at` is of the ID token, in seconds since the epoch."""

    server: str
    client_id: str
    token_endpoint: str
    id_token: str
    refresh_token: str | None
    expires_at: float

    def __repr__(self) -> str:  # the tokens stay out of tracebacks
        return f"SignedIn({self.server!r})"


def token_for(server: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """A token for the server, renewed where that is due; None where nobody is signed in. Raises NotAllowed."""
    path = _path(server, environ)
    kept = _read(path)
    if kept is None or time.time() < kept.expires_at - EARLY_SECONDS:
        return kept.id_token if kept else None
    with open(path.with_suffix(".lock"), "w") as lock:  # a provider may take a refresh token once only
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = _read(path)
        if kept is None or time.time() < kept.expires_at - EARLY_SECONDS:
            return kept.id_token if kept else None
        renewed = _renewed(kept)
        keep(renewed, environ)
    return renewed.id_token


def keep(signed_in: SignedIn, environ: Mapping[str, str] = os.environ) -> None:
    path = _path(signed_in.server, environ)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(signed_in), file)
    new.replace(path)


def forget(server: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether somebody was signed in."""
    path = _path(server, environ)
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


def kept_from(server: str, client_id: str, token_endpoint: str, answer: Mapping[str, Any]) -> SignedIn:
    """Return the sign-in of a token endpoint's reply. Raises NotAllowed if neither the reply nor the use of its refresh
    token gives an ID token."""
    if "id_token" not in answer and answer.get("refresh_token"):
        # Providers made of oauthlib answer a device code without one, and give it with the first renewal
        # (https://github.com/oauthlib/oauthlib/issues/968).
        answer = {**answer, **_refresh(client_id, token_endpoint, answer["refresh_token"])}
    token = answer.get("id_token")
    if not isinstance(token, str):
        raise NotAllowed("the provider gave no ID token: its client must have the scope openid", code="sign-in")
    refresh = answer.get("refresh_token")
    return SignedIn(server, client_id, token_endpoint, token, refresh if refresh else None, _expires_at(token))


def ask(method: str, url: str, form: Mapping[str, str] | None = None, may_fail: bool = False) -> dict[str, Any]:
    """The provider's JSON answer. Raises Unavailable where there is none, and NotAllowed,
    unless it `may_fail`, for a refusal."""
    import httpx2

    where = url.partition("?")[0]
    try:
        reply = httpx2.request(method, url, data=dict(form) if form else None, timeout=ANSWER_SECONDS_MAX)
    except httpx2.HTTPError as error:
        raise Unavailable(f"the sign-in's provider does not answer at {where}: {error}", "sign-in") from None
    try:
        answer = reply.json()
    except ValueError:
        what = f"the sign-in's provider answers {reply.status_code} at {where}, and no JSON"
        raise Unavailable(what, "sign-in") from None
    if not isinstance(answer, dict) or (not reply.is_success and not (may_fail and "error" in answer)):
        raise NotAllowed(
            f"the sign-in's provider refuses ({reply.status_code}{_why(answer)}) at {where}",
            code="sign-in",
            next_step="whoever runs Muster compares its MUSTER_API_OIDC_* with the client that the provider knows",
        )
    return answer


def _why(answer: object) -> str:
    """The cause that an answer names (RFC 6749 §5.2), to be put behind its status."""
    if not isinstance(answer, dict):
        return ""
    return "".join(f", {str(answer[key])[:200]}" for key in ("error", "error_description") if answer.get(key))


def _refresh(client_id: str, token_endpoint: str, refresh_token: str) -> dict[str, Any]:
    form = {"grant_type": "refresh_token", "refresh_token": refresh_token, "client_id": client_id}
    return ask("POST", token_endpoint, form, may_fail=True)


def _renewed(kept: SignedIn) -> SignedIn:
    if kept.refresh_token is not None:
        answer = _refresh(kept.client_id, kept.token_endpoint, kept.refresh_token)
        if "id_token" in answer:
            same = {"refresh_token": kept.refresh_token}  # a provider that gives no new one means the old to stay
            return kept_from(kept.server, kept.client_id, kept.token_endpoint, same | answer)
    raise NotAllowed(
        f"the sign-in to {kept.server} has expired", code="sign-in", next_step="`muster login` begins anew"
    )


def _expires_at(token: str) -> float:
    """Return the expiry of an ID token, which the server verifies and this program only stores."""
    import base64

    try:
        body = token.split(".")[1]
        return float(json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))["exp"])
    except (IndexError, KeyError, TypeError, ValueError):
        raise NotAllowed("the provider's ID token can't be read", code="sign-in") from None


def _read(path: Path) -> SignedIn | None:
    try:
        return SignedIn(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError):
        raise NotAllowed(f"{path} can't be read", code="sign-in", next_step="`muster login` makes it anew") from None


def _path(server: str, environ: Mapping[str, str]) -> Path:
    folder = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return folder / "muster" / f"sign-in-{hashlib.sha256(server.encode()).hexdigest()[:16]}.json"
