"""What is asked of a new token."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from muster.api.auth import Scope
from muster.contract.base import Many, Spec


class TokenRequest(Spec):
    """A token to be made. Of the scopes read, write and admin, each includes those before it."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    scopes: Annotated[Many[Annotated[Scope, Field(strict=False)]], Field(min_length=1, max_length=3)] = (Scope.READ,)
    expires_in_days: Annotated[int, Field(gt=0, le=3650)] | None = None
