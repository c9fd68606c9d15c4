"""Cursors: opaque to the caller, stable while rows are added."""

from __future__ import annotations

import base64
import binascii

from muster.api.core.errors import ApiError

_PREFIX = "v1:"


def cursor_of(seq: int) -> str:
    return base64.urlsafe_b64encode(f"{_PREFIX}{seq}".encode()).decode().rstrip("=")


def seq_of(cursor: str) -> int:
    """Raises ApiError invalid_cursor."""
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
        number = text.removeprefix(_PREFIX)
        if text.startswith(_PREFIX) and number.isascii() and number.isdigit() and len(number) < 19:
            return int(number)
    except (binascii.Error, ValueError):
        pass
    raise ApiError(
        "invalid_cursor", "The cursor is not one that this API gave out; use nextCursor as it came, or none."
    )
