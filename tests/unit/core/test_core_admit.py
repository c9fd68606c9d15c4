"""Who of the queue gets which nodes, and what the others are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.core.seen import NOW, fleet, node, spec, summary

from muster.operator.core.admit import BACKFILL_SECONDS, admit
from muster.operator.core.codes import Code
from muster.operator.core.fleet import GROW_AFTER_START_SECONDS, Fleet, JobSummary
from muster.operator.core.observed import NodeReservation
from muster.operator.core.placement import FleetSpace, GangRequest, WorkerShape, shape_of
from muster.words.quantities import quantity
from muster.words.status import (
    STATUS_VERSION,
    Attempt,
    CheckpointStatus,
    ExcludedNode,
    GangStatus,
    JobStatus,
    Phase,
)


def four() -> list[Any]:
    return [node(name) for name in "abcd"]


def placed(fleet_: Fleet, reservations: tuple[NodeReservation, ...] = ()) -> dict[str, tuple[str, ...]]:
    return {entry.uid: entry.nodes for entry in admit(fleet_, reservations).entries}


def waits(fleet_: Fleet, reservations: tuple[NodeReservation, ...] = ()) -> dict[str, str]:
    return {uid: wait.code for uid, wait in admit(fleet_, reservations).waits.items()}


def entry(uid: str, *nodes: str, number: int = 0, gpus: int = 8) -> NodeReservation:
    return NodeReservation(uid, number, "team", nodes, "pool-a", "on-demand", gpus)


def holding(uid: str, *nodes: str, number: int = 0, phase: Phase = Phase.RUNNING, **changes: Any) -> JobSummary:
    gang = GangStatus(wanted=len(nodes), ready=len(nodes), nodes=nodes, pool="pool-a", capacity="on-demand")
    status = JobStatus(phase=phase, gang=gang, reservation=number, attempt=1, since=NOW - 10_000)
    return summary(uid, status=status.model_copy(update=changes.pop("update", {})), **changes)


def test_a_whole_gang_or_nothing() -> None:
    jobs = [summary("big", spec(gang={"nodes": 3, "gpusPerNode": 8})), summary("late", age=-1)]
    assert placed(fleet(four(), jobs)) == {"big": ("a", "b", "c")}
    late = admit(fleet(four(), jobs), ()).waits["late"]
    assert (late.code, late.because) == (
        Code.AWAITING_CAPACITY,
        "gang needs 2 nodes with 8 GPUs each, 1 free in pool pool-a; held by team/big 3 nodes (24 GPUs)",
    )


def test_priority_then_age() -> None:
    old, new = summary("old", age=100), summary("new", age=1)
    urgent = summary("urgent", spec(priority=5))
    nodes = [node("a"), node("b")]
    assert list(placed(fleet(nodes, [new, old]))) == ["old"]
    assert list(placed(fleet(nodes, [new, old, urgent]))) == ["urgent"]


def test_a_priority_class_counts_where_a_job_says_no_number() -> None:
    urgent, urgent_by_class = summary("urgent", spec(priority=5)), summary("classy", spec(priorityClassName="research"))
    unknown = summary("unknown", spec(priorityClassName="gone"), age=100)
    nodes = [node("a"), node("b")]
    for value, first in ((100, "classy"), (3, "urgent"), (-1, "urgent")):
        seen = replace(fleet(nodes, [unknown, urgent_by_class, urgent]), priorities={"research": value})
        assert list(placed(seen)) == [first]


def test_what_is_held_is_not_given_twice() -> None:
    reservations = (entry("there", "a", "b", "c"),)
    jobs = [holding("there", "a", "b", "c"), summary("new")]
    plan = admit(fleet(four(), jobs), reservations)
    assert plan.entries == reservations
    assert plan.waits["new"].code == Code.AWAITING_CAPACITY


def test_half_nodes_are_packed() -> None:
    small = spec(gang={"nodes": 1, "gpusPerNode": 4})
    reservations = (entry("there", "c", gpus=4),)
    jobs = [holding("there", "c", spec_=small), summary("new", small)]
    assert placed(fleet(four(), jobs), reservations)["new"] == ("c",)


def test_a_number_below_the_jobs_own_is_dropped_and_a_lost_entry_is_restored() -> None:
    spent, lost = summary("spent", status=JobStatus(phase=Phase.SUSPENDED, reservation=1)), holding("lost", "c", "d")
    plan = admit(fleet(four(), [spent, lost]), (entry("spent", "a", "b"), entry("removed", "a")))
    assert [(e.uid, e.nodes) for e in plan.entries] == [("lost", ("c", "d"))]


def test_a_grant_that_waits_to_be_used_is_kept() -> None:
    reservations = (entry("job", "a", "b"),)
    plan = admit(fleet(four(), [summary("job")]), reservations)
    assert (plan.entries, plan.waits) == (reservations, {})


@pytest.mark.parametrize("unwanted", ["suspend", "cancel"])
def test_who_does_not_want_to_run_gets_nothing(unwanted: str) -> None:
    assert placed(fleet(four(), [summary("job", spec(**{unwanted: True}))])) == {}


def test_nor_does_a_job_that_backs_off_or_belongs_to_a_newer_operator() -> None:
    pausing = JobStatus(retry_at=NOW + 20)
    assert placed(fleet(four(), [summary("job", status=pausing)])) == {}
    assert placed(fleet(four(), [summary("job", status=JobStatus(schema_version=STATUS_VERSION + 1))])) == {}


def test_later_jobs_pass_a_gang_that_does_not_fit_but_not_for_ever() -> None:
    reservations = (entry("there", "a", "b"),)
    big = spec(gang={"nodes": 4, "gpusPerNode": 8})
    small = spec(gang={"nodes": 1, "gpusPerNode": 8})

    def jobs(age: float) -> list[JobSummary]:
        return [holding("there", "a", "b"), summary("big", big, age=age), summary("small", small)]

    assert "small" in placed(fleet(four(), jobs(BACKFILL_SECONDS - 1)), reservations)
    late = fleet(four(), jobs(BACKFILL_SECONDS + 1))
    assert "small" not in placed(late, reservations)
    assert waits(late, reservations) == {"big": Code.AWAITING_CAPACITY, "small": Code.BEHIND_EARLIER_GANG}


def test_fragments_of_kept_nodes_are_kept_too() -> None:
    """Half a node is of no use to the waiting gang today, but giving it away would never let the node become free."""
    half = spec(gang={"nodes": 1, "gpusPerNode": 4})
    jobs = [
        holding("there", "a", spec_=half),
        summary("whole", spec(gang={"nodes": 1, "gpusPerNode": 8}), age=400),
        summary("new", half),
    ]
    assert "new" not in placed(fleet([node("a")], jobs), (entry("there", "a", gpus=4),))


def test_a_gang_that_can_never_fit_says_so_and_keeps_nothing() -> None:
    huge = summary("huge", spec(gang={"nodes": 9, "gpusPerNode": 8}), age=1000)
    plan = admit(fleet(four(), [huge, summary("small")]), ())
    assert plan.waits["huge"].code == Code.GANG_TOO_LARGE
    assert plan.waits["huge"].because == "gang needs 9 nodes with 8 GPUs each; the largest pool has 4 such nodes"
    assert "small" in {e.uid for e in plan.entries}
    dense = summary("dense", spec(gang={"nodes": 1, "gpusPerNode": 16}))
    plan = admit(fleet(four(), [dense]), ())
    assert plan.waits["dense"].code == Code.NODE_TOO_SMALL
    assert plan.waits["dense"].because == (
        "gang needs 1 node with 16 GPUs each; gang.gpusPerNode is 16 and the largest node has 8"
    )


@pytest.mark.parametrize(
    ("resources", "words"),
    [
        ({"cpu": "64"}, "gang.resources.cpu is 64 and the largest node has 8"),
        ({"memory": "900Gi"}, "gang.resources.memory is 900 GiB and the largest node has 15.5 GiB"),
        (
            {"cpu": "64", "memory": "900Gi"},
            "gang.resources.cpu is 64 and the largest node has 8; "
            "gang.resources.memory is 900 GiB and the largest node has 15.5 GiB",
        ),
    ],
)
def test_the_limit_that_was_hit_is_named(resources: dict[str, str], words: str) -> None:
    small = replace(node("a"), gpus=0, cpus=8.0, memory_bytes=int(15.5 * 2**30))
    job = summary("job", spec(gang={"nodes": 1, "resources": resources}))
    wait = admit(fleet([small], [job]), ()).waits["job"]
    assert wait.code == Code.NODE_TOO_SMALL
    assert wait.because.endswith(words)


def test_who_holds_how_much_is_named_for_gpus_cpus_and_memory_alike() -> None:
    nodes = [replace(node(name), gpus=0, cpus=2.0, memory_bytes=4 * 2**30) for name in "abcd"]
    needs = spec(gang={"nodes": 1, "resources": {"cpu": 2}})
    held = (
        replace(entry("first", "a", "b", gpus=0), cpus=1.4, memory_bytes=2**30),
        replace(entry("second", "c", gpus=0), cpus=1.0, memory_bytes=2**29),
    )
    others = (NodeReservation("others/d", 0, "", ("d",), "", "", 0, 0.5, 0),)
    jobs = [holding("first", "a", "b"), holding("second", "c"), summary("waits", needs)]
    wait = admit(replace(fleet(nodes, jobs), others=others), held).waits["waits"]
    assert wait.because == (
        "gang needs 1 node with 2 CPUs each, none is free; held by team/first 2 nodes (2.8 CPUs and 2 GiB), "
        "team/second 1 node (1 CPU and 512 MiB), pods of others 1 node (0.5 CPUs)"
    )
    away = [replace(each, ready=False) for each in nodes]
    assert admit(fleet(away, [summary("waits", needs)]), ()).waits["waits"].because == (
        "gang needs 1 node with 2 CPUs each, none is free; 4 nodes not ready"
    )
    cordoned = [replace(each, ready=False, away="cordoned" if each.name < "d" else "not ready") for each in nodes]
    assert admit(fleet(cordoned, [summary("waits", needs)]), ()).waits["waits"].because == (
        "gang needs 1 node with 2 CPUs each, none is free; 3 nodes cordoned; 1 node not ready"
    )


def test_namespace_limits() -> None:
    jobs = [holding("there", "a"), summary("new"), summary("other", namespace="free")]
    plan = admit(fleet(four(), jobs, limits={"team": 16}), (entry("there", "a"),))
    assert plan.waits["new"].code == Code.NAMESPACE_LIMIT
    assert (
        plan.waits["new"].because
        == "gang needs 16 GPUs, 8 of the 16 that namespace team may hold are left; held by team/there (8 GPUs)"
    )
    assert {e.uid for e in plan.entries} == {"there", "other"}
    elastic = summary("new", spec(gang={"nodes": {"min": 1, "max": 3}, "gpusPerNode": 8}))
    assert placed(fleet(four(), [elastic], limits={"team": 16})) == {"new": ("a", "b")}


def test_topology_required_preferred_and_impossible() -> None:
    racks = [node(f"n{i}", labels={"rack": f"r{i // 2}"}) for i in range(6)]
    held = (entry("there", "n0"),)
    jobs = [
        holding("there", "n0"),
        summary("job", spec(gang={"nodes": 2, "gpusPerNode": 8, "topology": {"required": "rack"}})),
    ]
    assert placed(fleet(racks, jobs), held)["job"] == ("n2", "n3")
    wide = spec(gang={"nodes": 3, "gpusPerNode": 8, "topology": {"required": "rack"}})
    wait = admit(fleet(racks, [summary("job", wide)]), ()).waits["job"]
    assert (wait.code, wait.because) == (
        Code.TOPOLOGY_UNSATISFIABLE,
        "gang needs 3 nodes with 8 GPUs each that share one value of rack; the largest such group has 2",
    )
    loose = spec(gang={"nodes": 3, "gpusPerNode": 8, "topology": {"preferred": "rack"}})
    chosen = placed(fleet(racks, [*jobs[:1], summary("job", loose)]), held)["job"]
    assert len({name for name in chosen if name in ("n2", "n3")}) + len({n for n in chosen if n in ("n4", "n5")}) == 3
    unlabelled = fleet(four(), [summary("job", wide)])
    assert waits(unlabelled) == {"job": Code.TOPOLOGY_UNSATISFIABLE}


def test_one_pool_per_gang_the_tightest_first() -> None:
    pools = [*four(), node("x", pool="pool-b"), node("y", pool="pool-b"), node("z", pool="pool-b")]
    assert placed(fleet(pools, [summary("job")])) == {"job": ("x", "y")}
    assert waits(fleet(pools, [summary("job", spec(gang={"nodes": 5, "gpusPerNode": 8}))])) == {
        "job": Code.GANG_TOO_LARGE
    }


def test_instance_types_and_resources() -> None:
    nodes = [node("a", instance_type="p4d"), node("b", instance_type="p5"), node("c", instance_type="p5")]
    wanted = spec(gang={"nodes": 2, "gpusPerNode": 8, "instanceTypes": ["p5"]})
    assert placed(fleet(nodes, [summary("job", wanted)])) == {"job": ("b", "c")}
    greedy = spec(gang={"nodes": 1, "gpusPerNode": 8, "resources": {"cpu": 65}})
    assert waits(fleet(nodes, [summary("job", greedy)])) == {"job": Code.NODE_TOO_SMALL}
    assert shape_of(spec(gang={"resources": {"cpu": "500m", "memory": "2Gi"}})) == WorkerShape(0, 0.5, 2**31)
    assert [quantity(text) for text in (None, "90", "500m", "900Gi", "1.5k")] == [0.0, 90.0, 0.5, 900 * 2.0**30, 1500.0]


def spot_fleet(jobs: list[JobSummary]) -> Fleet:
    nodes = [node(n, pool="spot-a", capacity="spot") for n in "abc"] + [node(n, pool="fixed") for n in "xyz"]
    return fleet(nodes, jobs)


def test_spot_first_then_on_demand_after_preemptions_and_back() -> None:
    wish = spec(gang={"nodes": 2, "gpusPerNode": 8, "capacity": {"prefer": "spot", "fallBackAfterPreemptions": 2}})

    def job(preemptions: int, ago: float) -> JobSummary:
        attempt = Attempt(number=1, created_at=NOW - 9000, ended_at=NOW - ago, outcome="preempted")
        status = JobStatus(attempt=1, attempts=(attempt,), preemptions_in_a_row=preemptions)
        return summary("job", wish, status=status)

    assert placed(spot_fleet([job(1, 10)]))["job"] == ("a", "b")
    assert placed(spot_fleet([job(2, 10)]))["job"] == ("x", "y")
    assert placed(spot_fleet([job(2, 3700)]))["job"] == ("a", "b")
    other = spec(gang={"nodes": 2, "gpusPerNode": 8, "capacity": {"prefer": "on-demand"}})
    assert placed(spot_fleet([summary("job", other)]))["job"] == ("x", "y")


def test_an_excluded_node_is_avoided_until_it_expires_or_nothing_else_would_do() -> None:
    def job(hours: float, nodes: int = 3) -> JobSummary:
        excluded = (ExcludedNode(node="a", until=NOW + hours * 3600, why="two failures"),)
        wish = spec(gang={"nodes": nodes, "gpusPerNode": 8})
        return summary("job", wish, status=JobStatus(excluded_nodes=excluded))

    assert placed(fleet(four(), [job(24)]))["job"] == ("b", "c", "d")
    assert placed(fleet(four(), [job(-1)]))["job"] == ("a", "b", "c")
    assert placed(fleet(four(), [job(24, nodes=4)]))["job"] == ("a", "b", "c", "d")


def test_nodes_that_are_not_ready_get_nobody() -> None:
    nodes = [node("a", ready=False), *four()[1:]]
    assert placed(fleet(nodes, [summary("job")]))["job"] == ("b", "c")


ELASTIC = {"nodes": {"min": 1, "max": 4}, "gpusPerNode": 8}


def test_elastic_gangs_take_the_largest_size_that_divides_the_batch() -> None:
    held = (entry("there", "a"),)
    jobs = [holding("there", "a"), summary("job", spec(gang=ELASTIC))]
    assert placed(fleet(four(), jobs), held)["job"] == ("b", "c", "d")
    odd = spec(gang={"nodes": {"min": 1, "max": 7}, "gpusPerNode": 8})
    assert odd.gang_sizes() == (1, 2, 3, 4, 5, 6)
    assert len(placed(fleet([node(f"n{i}") for i in range(7)], [summary("job", odd)]))["job"]) == 6


def growing(**update: Any) -> JobSummary:
    checkpoint = CheckpointStatus(step=10, committed_at=NOW - 5, uri="")
    base = {"checkpoint": checkpoint, "since": NOW - GROW_AFTER_START_SECONDS - 1}
    return holding("job", "a", "b", spec_=spec(gang=ELASTIC), update=base | update)


def test_a_gang_regrows_just_after_a_commit() -> None:
    reservations = (entry("job", "a", "b"),)
    plan = admit(fleet(four(), [growing()]), reservations)
    assert [(e.number, e.nodes) for e in plan.entries] == [(0, ("a", "b")), (1, ("a", "b", "c", "d"))]
    again = admit(fleet(four(), [growing()]), plan.entries)
    assert again.entries == plan.entries


@pytest.mark.parametrize(
    "update",
    [
        {"checkpoint": None},
        {"checkpoint": CheckpointStatus(step=10, committed_at=NOW - 100, uri="")},
        {"since": NOW - 10},
        {"phase": Phase.STARTING},
    ],
)
def test_a_gang_does_not_grow_at_a_bad_moment(update: dict[str, Any]) -> None:
    assert len(admit(fleet(four(), [growing(**update)]), (entry("job", "a", "b"),)).entries) == 1


def test_nobody_grows_into_nodes_that_the_queue_could_use() -> None:
    waiting = summary("waiting", spec(gang={"nodes": 3, "gpusPerNode": 8}))
    plan = admit(fleet(four(), [growing(), waiting]), (entry("job", "a", "b"),))
    assert [e.number for e in plan.entries] == [0]


def test_another_schedulers_jobs_are_left_to_it() -> None:
    job = summary("job", spec(gang={"nodes": 2, "gpusPerNode": 8, "scheduler": {"kind": "kueue"}}))
    assert waits(fleet(four(), [job])) == {"job": Code.AWAITING_SCHEDULER}


def test_an_empty_fleet_and_an_empty_queue() -> None:
    assert waits(fleet([], [summary("job")])) == {"job": Code.GANG_TOO_LARGE}
    assert admit(fleet([], []), ()).entries == ()


# --- properties ---

GANGS = st.tuples(
    st.integers(1, 4), st.integers(0, 2), st.sampled_from((0, 2, 4, 8)), st.integers(-2, 2), st.integers(0, 900)
)
WORLDS = st.lists(
    st.tuples(st.sampled_from(("p", "q")), st.sampled_from((2, 4, 8)), st.booleans()), min_size=0, max_size=7
)


@given(WORLDS, st.lists(GANGS, max_size=8), st.integers(0, 40))
def test_whatever_the_queue_no_node_is_given_twice_and_every_wait_has_words(
    machines: list[tuple[str, int, bool]], gangs: list[tuple[int, int, int, int, int]], limit: int
) -> None:
    nodes = [node(f"n{i}", gpus, pool, ready=ready) for i, (pool, gpus, ready) in enumerate(machines)]
    jobs = [
        summary(
            f"job{i}",
            spec(gang={"nodes": {"min": low, "max": low + more}, "gpusPerNode": gpus}, priority=priority),
            age=age,
        )
        for i, (low, more, gpus, priority, age) in enumerate(gangs)
    ]
    before = fleet(nodes, jobs, limits={"team": limit})
    plan = admit(before, ())
    free = {n.name: n.gpus for n in nodes if n.ready}
    for held in plan.entries:
        assert len(set(held.nodes)) == len(held.nodes)
        for name in held.nodes:
            free[name] -= held.gpus
    assert all(left >= 0 for left in free.values())
    assert sum(e.gpus * len(e.nodes) for e in plan.entries) <= limit
    assert {e.uid for e in plan.entries} | plan.waits.keys() == {job.uid for job in jobs}
    assert all(wait.because and wait.code in set(Code) for wait in plan.waits.values())
    assert admit(before, plan.entries).entries == plan.entries  # a second pass changes nothing


@given(WORLDS, st.integers(1, 5), st.sampled_from((2, 4, 8)))
def test_a_place_is_found_whenever_one_exists(machines: list[tuple[str, int, bool]], size: int, gpus: int) -> None:
    nodes = [node(f"n{i}", have, pool, ready=ready) for i, (pool, have, ready) in enumerate(machines)]
    fitting = [n.pool for n in nodes if n.ready and n.gpus >= gpus]
    exists = any(fitting.count(pool) >= size for pool in ("p", "q"))
    place = FleetSpace(nodes, ()).place(GangRequest(WorkerShape(gpus, 0, 0), (size,)))
    assert (place is not None) == exists
    assert place is None or len(set(place.nodes)) == size


def test_what_is_set_aside_only_gets_freer() -> None:
    """The starvation proof in small: the k freest nodes are kept, so their sum never falls while others come and go."""
    nodes = four()
    held = [entry("s1", "a", gpus=6), entry("s2", "b", gpus=2), entry("s3", "c", gpus=4), entry("s4", "d", gpus=8)]
    ask = GangRequest(WorkerShape(8, 0, 0), (2,))
    space = FleetSpace(nodes, held)
    space.set_aside(ask)
    assert space.place(GangRequest(WorkerShape(2, 0, 0), (1,))) is not None  # the rest of a is nobody's
    assert space._set_aside == {"b", "c"}
    later = FleetSpace(nodes, [replace(held[0], gpus=8), *held[1:3], held[3]])
    later.set_aside(ask)
    assert later._set_aside == {"b", "c"}


def test_the_queue_is_looked_at_when_the_first_pause_in_it_is_over() -> None:
    """A job that waits for its commits has nodes asked for again then, also where nobody else waits."""
    waits = [
        summary(name, spec(), status=JobStatus(phase=Phase.QUEUED, retry_at=NOW + s))
        for name, s in (("a", 15.0), ("b", 9.0))
    ]
    over = summary("over", spec(), status=JobStatus(phase=Phase.FAILED, retry_at=NOW + 3.0))
    assert admit(fleet([], [*waits, over]), ()).look_after == pytest.approx(9.0)
    assert admit(fleet([], [over]), ()).look_after is None
