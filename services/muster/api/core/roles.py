"""Roles of people in a project."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Role of a person in a project; each includes those before it."""

    VIEWER = "viewer"  # see its jobs
    MEMBER = "member"  # and submit jobs, and act on those that are their own
    MAINTAINER = "maintainer"  # and act on every job, and choose its members and the tokens of service accounts
    ADMIN = "admin"  # everything, in every project; held by a person and not in a project

    def covers(self, other: Role) -> bool:
        order = list(Role)
        return order.index(self) >= order.index(other)
