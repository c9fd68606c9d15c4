"""Confirmation of a form's action, shown on the next page: a cookie that lives until that page is read."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import RedirectResponse

NOTE_COOKIE = "muster_notes"
_SECONDS = 30
_NOTES_MAX = 6  # a cookie holds 4 kB
_CHARACTERS_MAX = 200


@dataclass(frozen=True)
class PageNote:
    """Said once. `good` is False for what was refused."""

    good: bool
    words: str


def go_on(address: str, notes: list[PageNote]) -> RedirectResponse:
    """Redirect to the page that follows a form (303, so that reading it again sends nothing)."""
    response = RedirectResponse(address, status_code=303)
    first_notes = notes[:_NOTES_MAX] + (
        [PageNote(True, f"and {len(notes) - _NOTES_MAX} more")] if len(notes) > _NOTES_MAX else []
    )
    raw = json.dumps([[note.good, note.words[:_CHARACTERS_MAX]] for note in first_notes], ensure_ascii=False)
    value = base64.urlsafe_b64encode(raw.encode()).decode()
    response.set_cookie(NOTE_COOKIE, value, max_age=_SECONDS, httponly=True, samesite="lax")
    return response


def read_notes(request: Request) -> list[PageNote]:
    """Return the notes of the cookie; none if it is not ours."""
    try:
        raw = json.loads(base64.urlsafe_b64decode(request.cookies.get(NOTE_COOKIE, "")))
        return [PageNote(bool(good), str(words)) for good, words in raw]
    except (ValueError, TypeError):
        return []
