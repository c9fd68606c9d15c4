"""Where a job's own words let its workers go: selectors, affinity, taints; and whether they may share nodes."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.core.seen import spec

from muster.operator.core.fleet import FleetNode
from muster.operator.core.observed import NodeReservation
from muster.operator.core.placement import FleetSpace, GangRequest, WorkerPlace, WorkerShape, largest_possible, shape_of

DEDICATED = ("dedicated", "training", "NoSchedule")
NODES = (
    FleetNode("plain", "p", gpus=8, cpus=64),
    FleetNode("ssd", "p", gpus=8, cpus=64, labels={"disk": "ssd"}),
    FleetNode("kept", "p", gpus=8, cpus=64, taints=(DEDICATED,)),
)


def terms(*each: dict[str, Any]) -> dict[str, Any]:
    required = {"nodeSelectorTerms": [{"matchExpressions": [entry]} for entry in each]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


def asking(size: int = 1, **runtime: Any) -> GangRequest:
    return GangRequest(shape_of(spec(runtime=runtime, gang={"gpusPerNode": 8})), (size,))


@pytest.mark.parametrize(
    ("runtime", "nodes"),
    [
        ({}, {"plain", "ssd"}),
        ({"nodeSelector": {"disk": "ssd"}}, {"ssd"}),
        ({"nodeSelector": {"disk": "tape"}}, set()),
        ({"tolerations": [{"key": "dedicated", "operator": "Exists"}]}, {"plain", "ssd", "kept"}),
        ({"tolerations": [{"key": "dedicated", "value": "serving"}]}, {"plain", "ssd"}),
        (terms({"key": "disk", "operator": "Exists"}), {"ssd"}),
        (terms({"key": "disk", "operator": "Exists"}, {"key": "disk", "operator": "DoesNotExist"}), {"plain", "ssd"}),
    ],
)
def test_a_gang_goes_where_its_job_lets_it(runtime: dict[str, Any], nodes: set[str]) -> None:
    shape = asking(**runtime).shape
    assert {node.name for node in NODES if shape.allows(node)} == nodes
    assert largest_possible(NODES, asking(**runtime)) == len(nodes)
    space, found = FleetSpace(NODES, ()), set()
    while (place := space.place(asking(**runtime))) is not None:
        found |= set(place.nodes)
        space.take(place, shape)
    assert found == nodes


def test_workers_share_a_node_only_where_the_job_lets_them() -> None:
    alone, sharing = (shape_of(spec(gang={"nodes": 4, "gpusPerNode": 2, "shareNodes": each})) for each in (False, True))
    assert FleetSpace(NODES, ()).place(GangRequest(alone, (4,))) is None
    assert largest_possible(NODES, GangRequest(alone, (4,))) == 2
    assert largest_possible(NODES, GangRequest(sharing, (4,))) == 8
    place = FleetSpace(NODES, ()).place(GangRequest(sharing, (4,)))
    assert place is not None
    assert place.nodes == ("plain",) * 4


@given(
    free=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    need=st.integers(1, 4),
    size=st.integers(1, 12),
    others=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=6),
)
def test_no_node_carries_more_than_it_has(free: list[int], need: int, size: int, others: list[tuple[int, int]]) -> None:
    nodes = [FleetNode(f"n{index}", "p", gpus=gpus, cpus=64) for index, gpus in enumerate(free)]
    held = [
        NodeReservation(f"o{index}", 0, "ns", (f"n{node}",) * 2, "p", "on-demand", gpus=gpus)
        for index, (node, gpus) in enumerate(others)
    ]
    left = Counter({node.name: node.gpus for node in nodes})
    for entry in held:
        left.subtract(dict.fromkeys(set(entry.nodes), entry.gpus * 2))
    shape = WorkerShape(need, 0, 0, shares=True)
    space = FleetSpace(nodes, held)
    while (place := space.place(GangRequest(shape, (size,)))) is not None:
        assert len(place.nodes) == size
        space.take(place, shape)
        left.subtract({name: count * need for name, count in Counter(place.nodes).items()})
        assert all(left[name] >= 0 for name in place.nodes)
    assert sum(max(0, left[node.name]) // need for node in nodes) < size, "all that fits was found"


def test_a_gang_that_is_to_grow_holds_a_shared_node_as_often_as_it_is_there() -> None:
    held = [
        NodeReservation("u", 0, "ns", ("a", "a"), "p", "on-demand", gpus=2),
        NodeReservation("u", 1, "ns", ("a", "a", "a"), "p", "on-demand", gpus=2),
    ]
    space = FleetSpace([FleetNode("a", "p", gpus=8, cpus=8)], held)
    shape = WorkerShape(2, 0, 0, shares=True)
    assert space.place(GangRequest(shape, (2,))) is None
    grown = space.extend(GangRequest(shape, (4,)), WorkerPlace(("a", "a", "a"), "p", "on-demand"), 4)
    assert grown is not None
    assert grown.nodes == ("a",) * 4
