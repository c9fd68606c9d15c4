"""A gang that is told to leave has its next nodes held from the notice on, while it still commits."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.seen import NOW, fleet, node, spec, summary
from tests.unit.core.test_core_admit import entry, holding

from muster.operator.core.admit import admit
from muster.operator.core.codes import Code
from muster.operator.core.fleet import FleetNode, JobSummary
from muster.words.status import Attempt, Phase

HELD = (entry("job", "a", "b"),)


def leaving(code: Code = Code.PREEMPTED, **changes: Any) -> JobSummary:
    attempt = Attempt(number=1, created_at=NOW - 9000)
    update = {"code": code.value, "attempts": (attempt,)} | changes.pop("update", {})
    return holding("job", "a", "b", phase=Phase.RESTARTING, update=update, **changes)


def nodes(*names: str, gone: str = "b", **changes: Any) -> list[FleetNode]:
    return [node(name, ready=name != gone, **changes) for name in names]


def next_nodes(nodes_: list[FleetNode], job: JobSummary, *others: JobSummary, **changes: Any) -> tuple[str, ...] | None:
    plan = admit(fleet(nodes_, [job, *others], **changes), HELD)
    assert plan.entries[0] == HELD[0], "what it has stays its own until it is gone"
    assert "job" not in plan.waits
    return next((entry.nodes for entry in plan.entries if (entry.uid, entry.number) == ("job", 1)), None)


@pytest.mark.parametrize("code", [Code.PREEMPTED, Code.EVICTED])
def test_the_node_that_goes_is_replaced_and_the_other_kept(code: Code) -> None:
    assert next_nodes(nodes("a", "b", "c", "d"), leaving(code)) == ("a", "c")


def test_it_is_held_once() -> None:
    seen = fleet(nodes("a", "b", "c", "d"), [leaving()])
    plan = admit(seen, HELD)
    assert admit(seen, plan.entries).entries == plan.entries


def test_where_all_nodes_go_the_gang_moves_as_one() -> None:
    both_gone = [node(name, ready=name not in "ab") for name in "abcd"]
    assert next_nodes(both_gone, leaving()) == ("c", "d")


def test_another_pool_takes_the_whole_gang_where_this_one_is_full() -> None:
    elsewhere = [node(name, pool="pool-b") for name in "cd"]
    assert next_nodes([*nodes("a", "b"), *elsewhere], leaving()) == ("c", "d")


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (leaving(Code.INFRASTRUCTURE_FAULT), "a node that failed may be used again, or be excluded: not known yet"),
        (leaving(spec_=spec(cancel=True)), "the user wants no more of it"),
        (leaving(spec_=spec(suspend=True)), "nor of this"),
        (leaving(deleting=True), "nor of this"),
        (leaving(update={"gang": holding("x").status.gang}), "it has given its nodes back"),
    ],
)
def test_for_whom_nothing_is_held(job: JobSummary, why: str) -> None:
    plan = admit(fleet(nodes("a", "b", "c", "d"), [job]), HELD)
    assert all(entry.number == 0 for entry in plan.entries), why


def test_nothing_is_held_where_nothing_goes_or_nothing_is_free() -> None:
    assert next_nodes(nodes("a", "b", "c", gone=""), leaving()) is None
    assert next_nodes(nodes("a", "b"), leaving()) is None


def test_a_more_urgent_job_in_the_queue_comes_first() -> None:
    urgent = summary("urgent", spec(priority=5, gang={"nodes": 1, "gpusPerNode": 8}))
    assert next_nodes(nodes("a", "b", "c"), leaving(), urgent) is None
    later = summary("later", spec(gang={"nodes": 1, "gpusPerNode": 8}), age=-60)
    assert next_nodes(nodes("a", "b", "c"), leaving(), later) == ("a", "c")


def test_the_namespace_keeps_within_its_limit() -> None:
    assert next_nodes(nodes("a", "b", "c"), leaving(), limits={"team": 16}) is None
    assert next_nodes(nodes("a", "b", "c"), leaving(), limits={"team": 24}) == ("a", "c")


@pytest.mark.parametrize(("before", "held"), [(0, ("a", "c")), (1, ("d", "e"))])
def test_the_preemption_that_makes_it_fall_back_counts_already(before: int, held: tuple[str, ...]) -> None:
    capacity = spec(gang={"nodes": 2, "gpusPerNode": 8, "capacity": {"prefer": "spot", "fallBackAfterPreemptions": 2}})
    spot = nodes("a", "b", "c", pool="spot", capacity="spot")
    firm = [node(name, pool="firm") for name in "de"]
    gang = leaving().status.gang.model_copy(update={"pool": "spot", "capacity": "spot"})
    job = leaving(spec_=capacity, update={"preemptions_in_a_row": before, "gang": gang})
    plan = admit(fleet([*spot, *firm], [job]), HELD)
    assert [e.nodes for e in plan.entries if e.number == 1] == [held]
