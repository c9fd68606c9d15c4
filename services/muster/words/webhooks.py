"""Webhooks of a project: their messages, the format, and the signature by which a receiver verifies them. Pure.

The format is that of Standard Webhooks (https://www.standardwebhooks.com, specification 1.0), for which there are
libraries in most languages.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, Field

from muster.words.address import is_metadata_host
from muster.words.base import Many, Spec
from muster.words.names import JOB_NAME
from muster.words.webhook_kinds import WebhookKind, WebhookPreset

SECRET_PREFIX = "whsec_"  # noqa: S105 - what every secret begins with


_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?:[/?][!-\"$-\[\]-~]*)?"
)
_NUMERIC_LABEL = re.compile(r"(0x[0-9a-f]*|[0-9]+)", re.IGNORECASE)


def webhook_url(text: str) -> str:
    """The text, if it is an http(s) address that every program reads in the same way. Raises ValueError.

    Readers differ about user names, backslashes and numbers such as `0x7f.1`, and a check of the one that another one
    connects to checks nothing. So none of these is taken.
    """
    match = _URL.fullmatch(text)
    if match is None or int(match["port"] or 1) not in range(1, 65_536):
        raise ValueError("must be https://host/path, in ASCII and without a user name, a password or a fragment")
    host = match["host"].strip("[]")
    if is_metadata_host(host):
        raise ValueError("is the address of a machine's own metadata service, which is told nothing")
    if match["host"].startswith("[") or _NUMERIC_LABEL.fullmatch(host.rstrip(".").rpartition(".")[2]):
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(
                "must have a host's name or a whole IP address, as in 192.0.2.10 or [2001:db8::1]"
            ) from None
    return text


Name = Annotated[str, Field(max_length=48, pattern=f"^{JOB_NAME.pattern}$")]
Url = Annotated[str, Field(max_length=2_000), AfterValidator(webhook_url)]
Kind = Annotated[WebhookKind, Field(strict=False)]  # JSON has texts alone
Preset = Annotated[WebhookPreset, Field(strict=False)]
Kinds = Annotated[Many[Kind], Field(min_length=1, max_length=len(WebhookKind))]
WaitSeconds = Annotated[float, Field(ge=60, le=30 * 86_400)]

KINDS_DEFAULT = tuple(kind for kind in WebhookKind if kind != WebhookKind.TEST)
WAIT_SECONDS_DEFAULT = 3_600.0


class WebhookRequest(Spec):
    """A webhook to be made."""

    name: Name
    """Name of the webhook in the project."""
    url: Url
    """Address to which messages are sent by POST."""
    kinds: Kinds = KINDS_DEFAULT
    """Kinds of messages that are sent."""
    preset: Preset | None = None
    """Format that another service requires; left out, that of Standard Webhooks."""
    wait_seconds: WaitSeconds = WAIT_SECONDS_DEFAULT
    """Seconds of waiting for nodes after which a message is sent."""
    enabled: bool = True
    """Whether messages are sent. Events that happen while it is disabled are not sent later."""


class WebhookChange(Spec):
    """Changes to a webhook; omitted fields stay as they are."""

    url: Url | None = None
    kinds: Kinds | None = None
    preset: Preset | None = None
    """Format that another service requires; null for that of Standard Webhooks."""
    wait_seconds: WaitSeconds | None = None
    enabled: bool | None = None


class RotateWebhookRequest(Spec):
    """A new secret for a webhook."""

    overlap_hours: Annotated[int, Field(ge=0, le=720)] = 24
    """Hours for which messages are also signed with the old secret."""


def secret_of(key: bytes) -> str:
    """The secret as its receiver is given it: `whsec_` and the key in base64."""
    return SECRET_PREFIX + base64.b64encode(key).decode()


def signature(secret: str, message_id: str, timestamp: int, body: str) -> str:
    """Return `v1,` and the HMAC-SHA256 over id, time in seconds since the epoch, and body, in base64."""
    key = base64.b64decode(secret.removeprefix(SECRET_PREFIX))
    signed = f"{message_id}.{timestamp}.{body}".encode()
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
