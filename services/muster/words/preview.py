"""Preview of admission for a job that is not submitted: the API's question to the operator, and its answer."""

from __future__ import annotations

from typing import Any

from muster.words.base import Many, Record

PATH = "/preview"
"""Path of the request to the operator's own server, by POST, with the token for its webhook."""


class PreviewQuestion(Record):
    """A job as it would be stored; its spec as the document that `kubectl` would show."""

    namespace: str
    name: str
    project: str
    owner: str
    spec: dict[str, Any]


class PreviewedEviction(Record):
    """A gang that would be asked to commit and to make room."""

    namespace: str
    name: str
    gpus: int
    """GPUs that it would give up; the same holds for nodes."""
    nodes: Many[str] = ()
    nodes_kept: int = 0
    """Nodes with which it would continue; 0 if it would be stopped and queue again."""
    uncommitted_gpu_seconds: float = 0.0
    """Work since its last checkpoint, which is lost if the requested commit fails."""
    restart_gpu_seconds: float = 0.0
    """Cost of its restart, as measured in its newest attempt that reached a step."""
    because: str = ""
    """Reason why it may be preempted; it names no gang and no project but the requesting job's."""


class Preview(Record):
    """`nodes` that the job would be given at once; else the `code` and the reason of its wait, and the gangs that would
    be preempted for it."""

    nodes: Many[str] = ()
    code: str = ""
    because: str = ""
    evictions: Many[PreviewedEviction] = ()
