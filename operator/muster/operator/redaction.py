"""Redaction of a worker's environment in log tails, statuses and events."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE", re.IGNORECASE)
_SECRET_LENGTH_MIN = 6


def redact(text: str, environment: Mapping[str, str]) -> str:
    """`text` without the values of those variables whose names say that they are secret."""
    secrets = {value for name, value in environment.items() if _SECRET_NAME.search(name)}
    for value in sorted((value for value in secrets if len(value) >= _SECRET_LENGTH_MIN), key=len, reverse=True):
        text = text.replace(value, "***")
    return text
