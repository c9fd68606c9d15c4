"""Request bodies of tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from muster.api.core.callers import Scope
from muster.words.base import Many, Spec
from muster.words.names import JOB_NAME, PERSON_NAME

Days = Annotated[int, Field(gt=0, le=3650)]


class TokenRequest(Spec):
    """A token to be made. Of the scopes read, write and admin, each includes those before it; what the person may do in
    a project limits the token too."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    scopes: Annotated[Many[Annotated[Scope, Field(strict=False)]], Field(min_length=1, max_length=3)] = (Scope.READ,)
    expires_in_days: Days | None = None
    person: Annotated[str, Field(pattern=f"^{PERSON_NAME}$")] | None = None
    """Person of the token; left out, the caller."""
    project: Annotated[str, Field(pattern=f"^{JOB_NAME.pattern}$")] | None = None
    """The only project that it opens: left out, the caller's own."""
    all_projects: bool = False
    """Whether it opens every project of its person."""


class RotateRequest(Spec):
    """Request to replace a token with its successor."""

    overlap_hours: Annotated[int, Field(ge=0, le=720)] = 0
    """Hours for which the old token is accepted too."""
