"""Preview of admission for a job that is not submitted: the API's question to the operator, and its answer."""

from __future__ import annotations

from muster.contract.base import Many, Record
from muster.contract.spec import JobSpec

PATH = "/preview"
"""Where the operator's own server is asked, by POST, with the token that it was given for its webhook."""


class PreviewQuestion(Record):
    """A job as it would be stored."""

    namespace: str
    name: str
    project: str
    owner: str
    spec: JobSpec


class PreviewedEviction(Record):
    """A gang that would be asked to commit and to make room."""

    namespace: str
    name: str
    gpus: int
    """That it would give up; the same holds for nodes."""
    nodes: Many[str] = ()
    nodes_kept: int = 0
    """With which it would go on; 0 where it would be stopped, and queue again."""
    uncommitted_gpu_seconds: float = 0.0
    """Its work since its last commit: what it loses should the commit fail that it is asked for."""
    restart_gpu_seconds: float = 0.0
    """What its restart costs, as its newest attempt that came to a step took."""
    because: str = ""
    """Reason why it may be preempted; it names no gang and no project but the requesting job's."""


class Preview(Record):
    """`nodes` that the job would be given at once; else the `code` and the reason of its wait, and the gangs that would
    be preempted for it."""

    nodes: Many[str] = ()
    code: str = ""
    because: str = ""
    evictions: Many[PreviewedEviction] = ()
