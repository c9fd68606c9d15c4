"""Report on a cluster's nodes for the API, in one ConfigMap, compressed to hold five thousand nodes."""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import Iterable

from muster.kube import paths
from muster.kube.client import ApiClient, Object
from muster.kube.errors import ApiError
from muster.operator.core.fleet import FleetNode
from muster.operator.core.observed import NodeReservation
from muster.operator.kubernetes.nodes import NodeFacts
from muster.words.base import dump_json
from muster.words.fleet import NODES, NODES_KEY, FleetReport, NodeNotice, NodeReport


def node_reports(
    facts: Iterable[NodeFacts], usable: dict[str, FleetNode], others: Iterable[NodeReservation]
) -> tuple[NodeReport, ...]:
    """`usable` has the nodes without what daemons take of each, `others` what pods of others use."""
    used = {entry.nodes[0]: entry for entry in others}
    return tuple(
        _report(each, usable.get(each.node.name, each.node), used.get(each.node.name))
        for each in sorted(facts, key=lambda each: each.node.name)
    )


def _report(facts: NodeFacts, node: FleetNode, used: NodeReservation | None) -> NodeReport:
    notices = [facts.notice, *facts.faults]
    return NodeReport(
        name=node.name,
        pool=node.pool,
        capacity=node.capacity,
        instance_type=node.instance_type,
        gpus=node.gpus,
        cpus=round(node.cpus, 3),
        memory_bytes=node.memory_bytes,
        others_gpus=used.gpus if used else 0,
        others_cpus=round(used.cpus, 3) if used else 0.0,
        unfit=facts.unfit_for(()),
        notices=tuple(
            NodeNotice(kind=str(each.kind), at=each.at, message=each.message, source=each.source)
            for each in notices
            if each is not None
        ),
    )


async def write_report(client: ApiClient, namespace: str, report: FleetReport) -> None:
    """Write the whole report over the previous one: only the leader writes. Raises ApiError."""
    packed = await asyncio.to_thread(_packed, report)
    meta = {"name": NODES, "namespace": namespace, "labels": {"app.kubernetes.io/managed-by": "muster"}}
    body: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "binaryData": {NODES_KEY: packed}}
    try:
        await client.put(paths.core(namespace, "configmaps", NODES), body)
    except ApiError as error:
        if error.status != 404:
            raise
        await client.create(paths.core(namespace, "configmaps"), body)


def _packed(report: FleetReport) -> str:
    """A fifth of a second for 5,000 nodes."""
    return base64.b64encode(zlib.compress(dump_json(report).encode(), 6)).decode()
