"""Reports on this machine's virtual nodes, for the API."""

from __future__ import annotations

from muster.operator.local.nodes import VirtualNodes
from muster.operator.local.notices import NoticeFiles
from muster.words.fleet import NodeNotice, NodeReport


def node_reports(nodes: VirtualNodes, notices: NoticeFiles) -> tuple[NodeReport, ...]:
    by_node = {node: notices.of(node) for node in nodes.names()}
    return tuple(
        NodeReport(
            name=node.name,
            pool=node.pool,
            capacity=node.capacity,
            gpus=node.gpus,
            cpus=node.cpus,
            memory_bytes=node.memory_bytes,
            unfit=next((each.message for each in by_node[node.name] if each.keeps_out), ""),
            notices=tuple(
                NodeNotice(kind=str(each.kind), at=each.at, message=each.message, source=each.source)
                for each in by_node[node.name]
            ),
        )
        for node in nodes.all()
    )
