"""Replies as their models make them."""

from __future__ import annotations

from typing import Any, TypeVar

from muster.replies.jobs import Reply

__all__ = ["Reply", "reply_of"]

R = TypeVar("R", bound=Reply)


def reply_of(model: type[R], row: object, **instead: Any) -> R:
    """Return the reply with the row's values by their names, and those of `instead` where the row has others or none.
    A route that returns it has this one statement of what it answers: FastAPI checks it and writes its JSON."""
    own = {name: getattr(row, name) for name in model.model_fields if name not in instead}
    return model.model_validate(own | instead)
