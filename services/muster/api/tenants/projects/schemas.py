"""Request bodies of projects and of their members."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from muster.contract.base import Spec
from muster.contract.names import JOB_NAME
from muster.contract.projects import ProjectLimits

ProjectName = Annotated[str, Field(pattern=f"^{JOB_NAME.pattern}$")]


class ProjectRequest(Spec):
    """A project as it is to be. Its namespace is its jobs' alone, and can't be changed."""

    namespace: ProjectName | None = None
    """Left out, it is named as the project."""
    limits: ProjectLimits = ProjectLimits()


class MemberRequest(Spec):
    """The role that somebody is to have in a project."""

    role: Literal["viewer", "member", "maintainer"]
