"""What the operator tells the API of its nodes: when it is written, and that the API reads what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.kubernetes.test_kubernetes_machinery import Store

from muster.api.core.cluster.kubernetes_config_maps import read_nodes
from muster.local.cluster import LocalCluster
from muster.operator.core.observed import NodeReservation
from muster.operator.kubernetes.node_reports import node_reports, write_report
from muster.operator.kubernetes.nodes import read_node
from muster.operator.local.nodes import VirtualNodes
from muster.operator.local.world import LocalWorld
from muster.operator.node_reports import NodeReporter
from muster.operator.pacing import NODE_REPORT_AGAIN_SECONDS
from muster.recipe.document import JobSpec
from muster.words.fleet import FleetReport, NodeReport
from muster.words.notices import NodeNotices, Notice, Remedy
from muster.words.signals import SignalKind

A, B = (NodeReport(name=name, pool="p", capacity="spot", gpus=8) for name in "ab")


async def test_a_report_is_written_when_it_changes_and_to_say_that_it_holds() -> None:
    now, nodes, written = [1000.0], (A,), list[tuple[float, int]]()

    async def write(report: FleetReport) -> None:
        if len(nodes) > 2:
            raise OSError("no")
        written.append((report.at, len(report.nodes)))

    reporter = NodeReporter(lambda: nodes, write, lambda error: None, lambda: now[0])
    for _ in range(3):
        await reporter.step()
    nodes = (A, B)
    await reporter.step()
    now[0] += NODE_REPORT_AGAIN_SECONDS
    await reporter.step()
    assert written == [(1000.0, 1), (1000.0, 2), (1000.0 + NODE_REPORT_AGAIN_SECONDS, 2)]
    now[0] = 5.0  # a clock that went back must not silence it for as long
    await reporter.step()
    assert written[-1] == (5.0, 2)


def kube_node(name: str, **spec: Any) -> dict[str, Any]:
    status = {"allocatable": {"nvidia.com/gpu": "8", "cpu": "90"}, "conditions": [{"type": "Ready", "status": "True"}]}
    labels = {"node.kubernetes.io/instance-type": "p5.48xlarge", "karpenter.sh/capacity-type": "spot"}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": status}


async def test_what_a_cluster_s_operator_tells_the_api_reads() -> None:
    taint = {
        "key": "aws-node-termination-handler/spot-itn",
        "effect": "NoSchedule",
        "timeAdded": "2026-11-23T00:00:00Z",
    }
    facts = [read_node(item, (), 0.0) for item in (kube_node("b", taints=[taint]), kube_node("a", unschedulable=True))]
    others = (NodeReservation("others/a", 0, "", ("a",), "", "", 3, 1.5, 0),)
    first, second = node_reports(facts, {}, others)
    assert (first.name, first.others_gpus, first.others_cpus, first.unfit) == ("a", 3, 1.5, "it is cordoned")
    assert (second.pool, second.capacity, second.gpus) == ("p5.48xlarge", "spot", 8)
    assert [notice.kind for notice in second.notices] == ["spot_notice"]
    assert second.unfit == second.notices[0].message

    class Unconditional(Store):
        """A ConfigMap that is put without a version is replaced, whatever version is there."""

        async def put(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
            return self._keep(body, 1) if await self.get(path) else {}

    store: Any = Unconditional()
    assert await read_nodes(store, "system") is None
    for report in (FleetReport(at=1.0, nodes=(first,)), FleetReport(at=2.0, nodes=(first, second))):
        await write_report(store, "system", report)
        assert await read_nodes(store, "system") == report


def test_virtual_nodes_tell_their_notices(tmp_path: Path) -> None:
    world = LocalWorld(tmp_path, VirtualNodes(2, 4), ("true",), JobSpec)
    notice = Notice(kind=SignalKind.SPOT_NOTICE, remedy=Remedy.DRAIN, at=7.0, message="taken back", source="imds")
    world.state.notices.mkdir(parents=True)
    told = NodeNotices(node="local-1", at=7.0, notices=(notice,)).model_dump_json(by_alias=True)
    (world.state.notices / "local-1.json").write_text(told)
    first, second = world.node_reports()
    assert (first.name, first.gpus, first.unfit) == ("local-0", 4, "")
    assert (second.unfit, second.notices[0].at) == ("taken back", 7.0)
    world.cluster.write_nodes(FleetReport(at=3.0, nodes=(first, second)))
    stored = LocalCluster(tmp_path / "cluster.db").nodes()
    assert stored is not None
    assert FleetReport.model_validate_json(stored).nodes == (first, second)
