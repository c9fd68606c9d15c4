"""What projects are entitled to, and whose job is next."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.core.seen import fleet, spec, summary
from tests.unit.core.test_core_admit import entry, four, holding

from muster.operator.core.admit import admit
from muster.operator.core.fair_share import FleetShares, ShareClaim, entitlements
from muster.operator.core.fleet import Fleet, JobSummary
from muster.words.quotas import ProjectQuota, read_quotas

ONE = spec(gang={"nodes": 1, "gpusPerNode": 8})
TWO = spec(gang={"nodes": 2, "gpusPerNode": 8})


@pytest.mark.parametrize(
    ("claims", "entitled"),
    [
        ({"a": ShareClaim(1, 0, 100), "b": ShareClaim(1, 0, 100)}, {"a": 16, "b": 16}),
        ({"a": ShareClaim(3, 0, 100), "b": ShareClaim(1, 0, 100)}, {"a": 24, "b": 8}),
        ({"a": ShareClaim(1, 0, 4), "b": ShareClaim(1, 0, 100)}, {"a": 4, "b": 28}),
        ({"a": ShareClaim(1, 20, 100), "b": ShareClaim(1, 0, 100)}, {"a": 26, "b": 6}),
        ({"a": ShareClaim(1, 32, 100), "b": ShareClaim(1, 0, 100)}, {"a": 32, "b": 0}),
        ({"a": ShareClaim(1, 48, 100), "b": ShareClaim(1, 16, 100)}, {"a": 24, "b": 8}),
        ({"a": ShareClaim(1, 48, 2), "b": ShareClaim(1, 0, 100)}, {"a": 2, "b": 30}),
        ({}, {}),
    ],
)
def test_a_guarantee_first_then_the_rest_by_weight_and_what_nobody_asks_for_to_the_others(
    claims: dict[str, ShareClaim], entitled: dict[str, float]
) -> None:
    assert entitlements(32, claims) == pytest.approx(entitled)


CLAIM = st.builds(ShareClaim, st.sampled_from((0.001, 0.5, 1.0, 3.0, 1000.0)), st.integers(0, 60), st.integers(0, 60))


@given(st.integers(0, 100), st.dictionaries(st.sampled_from("abcdef"), CLAIM))
def test_nobody_has_more_than_they_ask_for_and_all_together_no_more_than_there_is(
    capacity: int, claims: dict[str, ShareClaim]
) -> None:
    entitled = entitlements(capacity, claims)
    assert all(-1e-9 <= entitled[name] <= claim.demand + 1e-6 for name, claim in claims.items())
    assert sum(entitled.values()) <= capacity + 1e-6
    wanting = [n for n, claim in claims.items() if entitled[n] < claim.demand - 1e-6]
    assert not wanting or sum(entitled.values()) == pytest.approx(capacity), "nothing idles while somebody wants it"


def queued(project: str, count: int, **changes: Any) -> list[JobSummary]:
    return [summary(f"{project}{i}", ONE, age=100 - i, project=project, **changes) for i in range(count)]


def granted(fleet_: Fleet, *entries: Any) -> list[str]:
    return [e.uid for e in admit(fleet_, entries).entries if e not in entries]


def test_projects_take_turns_by_weight_and_jobs_of_a_project_by_age() -> None:
    jobs = [*queued("a", 4), *queued("b", 4)]
    nodes = four()
    assert granted(fleet(nodes, jobs)) == ["a0", "b0", "a1", "b1"]  # by age: the first of each was made together
    weights = {"a": ProjectQuota(weight=3), "b": ProjectQuota(weight=1)}
    assert granted(fleet(nodes, jobs, quotas=weights)) == ["a0", "b0", "a1", "a2"]
    older = [*(summary(f"a{i}", ONE, age=200, project="a") for i in range(4)), *queued("b", 4)]
    assert granted(fleet(nodes, older)) == ["a0", "a1", "a2", "a3"], "without shares age alone decides"
    assert granted(fleet(nodes, older, quotas={"a": ProjectQuota(weight=1)})) == ["a0", "b0", "a1", "b1"]


def test_whoever_is_below_its_guarantee_comes_first_and_a_higher_priority_before_that() -> None:
    quotas = {"a": ProjectQuota(weight=9), "b": ProjectQuota(weight=0.1, guaranteed_gpus=16)}
    jobs = [*queued("a", 4), *queued("b", 4)]
    assert granted(fleet(four(), jobs, quotas=quotas)) == ["b0", "b1", "a0", "b2"]
    urgent = summary("urgent", spec(priority=1, gang={"nodes": 1, "gpusPerNode": 8}), project="a")
    assert granted(fleet(four(), [*jobs, urgent], quotas=quotas))[0] == "urgent"


def test_what_is_idle_is_borrowed() -> None:
    quotas = {"a": ProjectQuota(weight=0.1), "b": ProjectQuota(guaranteed_gpus=32)}
    assert granted(fleet(four(), queued("a", 4), quotas=quotas)) == ["a0", "a1", "a2", "a3"]


def test_a_gang_that_waits_is_told_what_its_project_holds_of_its_share() -> None:
    jobs = [holding("big", "a", "b", "c", "d", project="a"), *queued("a", 1), *queued("b", 1)]
    quotas = {"a": ProjectQuota(weight=1), "b": ProjectQuota(weight=1)}
    waits = admit(fleet(four(), jobs, quotas=quotas), (entry("big", "a", "b", "c", "d"),)).waits
    assert waits["a0"].because == (
        "gang needs 1 node with 8 GPUs each, none is free; held by team/big 4 nodes (32 GPUs); "
        "project a holds 32 GPUs of its share of 24"
    )
    assert waits["b0"].because.endswith("project b holds 0 GPUs of its share of 8")


def test_gangs_of_other_schedulers_and_ended_jobs_ask_for_no_share() -> None:
    kueue = spec(gang={"nodes": 2, "gpusPerNode": 8, "scheduler": {"kind": "kueue", "queue": "q"}})
    suspended = spec(suspend=True)
    jobs = [summary("k", kueue, project="a"), summary("s", suspended, project="a"), *queued("b", 4)]
    shares = FleetShares(fleet(four(), jobs, quotas={"a": ProjectQuota(weight=5)}))
    assert shares.entitled == {"b": 32.0}


def test_a_share_that_makes_no_sense_is_refused() -> None:
    found, faults = read_quotas({"a": '{"weight": 0}', "b": '{"guaranteedGpus": 8, "weight": 0.5}'}, {})
    assert found["b"] == ProjectQuota(guaranteed_gpus=8, weight=0.5)
    assert found["a"].gangs == 0
    assert len(faults) == 1
