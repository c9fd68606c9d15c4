"""Report of the operator on the nodes, for the API: it alone watches them and knows what Muster may use of each."""

from __future__ import annotations

from muster.words.base import Many, Record, Time

NODES = "muster-nodes"
"""The ConfigMap in the operator's namespace with FleetReport as JSON, compressed by zlib, under NODES_KEY."""
NODES_KEY = "nodes"
SILENT_SECONDS = 180.0
"""An operator that has not written for so long is away: it writes at least every minute."""


class NodeNotice(Record):
    """Something that was announced of a node, or that it found out about itself."""

    kind: str
    at: Time
    message: str
    source: str


class NodeReport(Record):
    """One node: what of it Muster may use in all, and what others use of that."""

    name: str
    pool: str
    capacity: str
    """`spot` or `on-demand`."""
    instance_type: str = ""
    gpus: int = 0
    cpus: float = 0.0
    memory_bytes: int = 0
    others_gpus: int = 0
    """Used by what Muster did not place; the same holds for others_cpus."""
    others_cpus: float = 0.0
    unfit: str = ""
    """Reason why no new worker goes there; empty if one may."""
    notices: Many[NodeNotice] = ()


class FleetReport(Record):
    """All nodes, as of `at`."""

    at: Time
    nodes: Many[NodeReport] = ()
