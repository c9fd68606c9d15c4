"""The queue and the nodes as REST shows them."""

from __future__ import annotations

from muster.api.core.http.reply import Reply
from muster.words.base import Time
from muster.words.fleet import NodeNotice
from muster.words.quotas import ProjectQuota


class WaitingJob(Reply):
    """Queued job. `position` is that in the whole queue, of all projects, and 1 is next; jobs that need less may still
    go first. `gpus` are those of the smallest gang that would do. It is expected to start in `starts_in_seconds`, null
    where that is not known."""

    position: int
    id: str
    name: str
    owner: str
    priority: int
    nodes: int
    gpus: int
    since: Time
    code: str
    because: str
    starts_in_seconds: float | None


class HoldingJob(Reply):
    """Job that holds nodes. It is expected to end in `eta_seconds`, null where that is not known."""

    id: str
    name: str
    owner: str
    phase: str
    nodes: int
    gpus: int
    since: Time
    eta_seconds: float | None


class ProjectQueue(Reply):
    """Queue of a project: `waiting` in the order of the queue, `holding` with the largest first. `quota` is what the
    project may hold."""

    project: str
    waiting: list[WaitingJob]
    holding: list[HoldingJob]
    gpus: int
    gangs: int
    processes: int
    quota: ProjectQuota


class Queues(Reply):
    """Queues of the projects that the caller may see. `queued` counts the jobs of all projects."""

    as_of: Time
    queued: int
    items: list[ProjectQueue]


class Holder(Reply):
    """Holder of a node. `job` and `id` are null for a job that the caller may not see."""

    project: str
    id: str | None
    job: str | None
    workers: int
    gpus: int


class Avoidance(Reply):
    """A job that keeps away from the node for a while, after failures there."""

    project: str
    id: str | None
    job: str | None
    until: Time
    why: str | None


class NodeState(Reply):
    """State of a node. `gpus`, `cpus` and `memory_bytes` are what Muster may use in all. `free_gpus` are those that
    neither a gang nor anybody else holds. `unfit` says why no new worker goes there. `others_gpus` is used by what
    Muster did not place.
    """

    name: str
    pool: str
    capacity: str
    instance_type: str
    gpus: int
    free_gpus: int
    others_gpus: int
    cpus: float
    memory_bytes: int
    unfit: str
    notices: list[NodeNotice]
    held_by: list[Holder]
    avoided_by: list[Avoidance]


class NodeList(Reply):
    """List of nodes. `as_of` is the time of the operator's last report; null, with no items, if it has never made one.
    `note` says what of that is old or missing."""

    as_of: Time | None
    note: str
    items: list[NodeState]
