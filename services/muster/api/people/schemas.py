"""What is asked of a person."""

from __future__ import annotations

from typing import Literal

from muster.contract.base import Spec


class PersonRequest(Spec):
    """A person, or a service account, as they are to be."""

    kind: Literal["person", "service"] = "person"
    admin: bool = False
    """Whether they may do everything in every project."""
    disabled: bool = False
    """Whether none of their tokens opens anything. Their name and their jobs stay."""
