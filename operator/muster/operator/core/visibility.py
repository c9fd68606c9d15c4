"""Visibility of other jobs in the messages of one job.

Whoever may read a job reads its status, its events and its reasons, in the API as by kubectl; and people of one project
need not be allowed to see another's jobs. So every text about a job names those of its own project alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from muster.operator.core.fleet import JobSummary
from muster.words.text import plural

NAMED_MAX = 3
ANOTHER_PROJECT = "another project"


def describe_job(reader: JobSummary, other: JobSummary) -> str:
    """Return the name of the other job for texts about `reader`."""
    return other.full_name if other.project == reader.project else f"a gang of {ANOTHER_PROJECT}"


def describe_jobs(reader: JobSummary, others: Iterable[JobSummary]) -> str:
    """`team/a, team/b and 2 gangs of other projects`: the first few by name."""
    others = list(others)
    seen = sorted(other.full_name for other in others if other.project == reader.project)
    parts = seen[:NAMED_MAX]
    if len(seen) > NAMED_MAX:
        parts.append(f"{len(seen) - NAMED_MAX} more")
    if hidden := len(others) - len(seen):
        parts.append(describe_hidden_gangs(hidden))
    return " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else "".join(parts)


def describe_hidden_gangs(gangs: int) -> str:
    """`a gang of another project`, `2 gangs of other projects`."""
    return f"a gang of {ANOTHER_PROJECT}" if gangs == 1 else f"{plural(gangs, 'gang')} of other projects"


def describe_project(reader: JobSummary, project: str) -> str:
    return f"project {project}" if project == reader.project else ANOTHER_PROJECT
