"""Secrets stay out of logs, errors and replies: values of secret-looking names, and credentials inside addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"(^|_|-)(secrets?|tokens?|passwords?|passwd|pwd|credentials?|auth|api_?key|access_?key|private_?key|key|dsn)($|_|-)",
    re.I,
)
# user:password@ in any address, and the signature parameters of presigned addresses.
_USERINFO = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
_SIGNED = re.compile(
    r"(?i)([?&](?:[\w-]*(?:signature|credential|token|secret|policy|password|api_?key|access_?key|key-pair)[\w-]*"
    r"|sig|key|auth|code|pwd)=)[^&\s'\"]+"
)
_BEARER = re.compile(r"(?i)(bearer\s+)[\w.~+/=-]+")
_OWN_TOKEN = re.compile(r"muster_[\w-]{16,}")


def without_query(address: str) -> str:
    """An address of the web up to its query, which may be all that gives access."""
    return address.partition("?")[0]


def looks_secret(name: str) -> bool:
    """Return whether a variable of this name may hold a secret: HF_TOKEN, AWS_SECRET_ACCESS_KEY, DB_PASSWORD …"""
    return bool(_SECRET_NAME.search(name))


def redact(text: str) -> str:
    """The text without credentials in addresses, bearer tokens and Muster's own tokens."""
    if "://" in text:
        text = _SIGNED.sub(rf"\1{HIDDEN}", _USERINFO.sub(HIDDEN, text))
    return _OWN_TOKEN.sub(HIDDEN, _BEARER.sub(rf"\1{HIDDEN}", text))


def redact_spec(spec: Any) -> Any:
    """A job's spec for a reader: the values of secret-looking variables hidden, and credentials in addresses too."""
    return _without(spec)


def without_env_values(spec: dict[str, Any]) -> dict[str, Any]:
    """A job's spec for everybody but its owner: without the values of `runtime.env`, whatever their names."""
    runtime = spec.get("runtime")
    env = runtime.get("env") if isinstance(runtime, dict) else None
    if not isinstance(runtime, dict) or not isinstance(env, list):
        return spec
    hidden = [{**each, "value": HIDDEN} if isinstance(each, dict) and each.get("value") else each for each in env]
    return {**spec, "runtime": {**runtime, "env": hidden}}


def _without(value: Any) -> Any:
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_without(item) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(name := value.get("name"), str) and looks_secret(name) and value.get("value"):
        return {**{key: _without(item) for key, item in value.items()}, "value": HIDDEN}
    return {
        key: HIDDEN if isinstance(item, str) and item and looks_secret(key) and key.isupper() else _without(item)
        for key, item in value.items()
    }


# What `redact` leaves behind, wherever it was: such a value stands for one that is not in the document.
_MASKED = re.compile(r"(?i)\*\*\*|.*(://\*\*\*@|[?&][\w-]+=\*\*\*(&|$)|bearer \*\*\*).*", re.S)


def masked_paths(document: Any, path: str = "") -> Iterator[str]:
    """The paths of values that were hidden when the document was shown, such as `spec.runtime.env[0].value`."""
    if isinstance(document, str):
        if _MASKED.fullmatch(document):
            yield path
    elif isinstance(document, dict):
        for key, value in document.items():
            yield from masked_paths(value, f"{path}.{key}" if path else str(key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from masked_paths(value, f"{path}[{index}]")


def secrets_in(document: Any) -> frozenset[str]:
    """Return every value in `spec.runtime.env` of a document as it was sent, valid or not: none belongs in an error."""
    spec = document.get("spec") if isinstance(document, dict) else None
    runtime = spec.get("runtime") if isinstance(spec, dict) else None
    env = runtime.get("env") if isinstance(runtime, dict) else None
    texts: set[str] = set()
    waiting = [env]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [item for key, item in value.items() if key != "name"]
        elif isinstance(value, list):
            waiting += value
        elif value is not None and not isinstance(value, bool):
            texts.add(str(value))
    return frozenset(text for text in texts if text)


def redact_values(text: str, secrets: frozenset[str]) -> str:
    """The text without those values and without credentials in addresses."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return redact(text)
