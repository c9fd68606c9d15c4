"""Request bodies of people."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from muster.contract.base import Spec


class PersonRequest(Spec):
    """A person, or a service account, as they are to be."""

    kind: Literal["person", "service"] = "person"
    admin: bool = False
    """Whether they may do everything in every project."""
    disabled: bool = False
    """Whether none of their tokens opens anything. Their name and their jobs stay."""
    subject: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    """Subject of the person at the sign-in's provider; left out, it stays as it was."""
