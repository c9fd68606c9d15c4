"""What projects and people may hold, and what a gang is told that must wait for it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.core.seen import NOW, fleet, node, spec, summary
from tests.unit.core.test_core_admit import entry, four, holding, placed

from muster.operator.core.admit import BACKFILL_SECONDS, admit
from muster.operator.core.codes import Code
from muster.operator.core.fleet import Fleet, JobSummary
from muster.recipe.document import JobSpec
from muster.words.quotas import NOTHING, ProjectQuota, Quota, read_quotas
from muster.words.status import CheckpointStatus

MINE: dict[str, Any] = {"project": "nlp", "owner": "ada"}


def gang(nodes: Any = 1, gpus: int = 8) -> JobSpec:
    return spec(gang={"nodes": nodes, "gpusPerNode": gpus})


def seen(quota: ProjectQuota, *jobs: JobSummary, nodes: Any = None) -> Fleet:
    return fleet(nodes or four(), list(jobs), quotas={"nlp": quota})


def told(fleet_: Fleet, uid: str, *entries: Any) -> tuple[str, str]:
    wait = admit(fleet_, entries).waits[uid]
    return wait.code, wait.because


def test_a_project_holds_no_more_gpus_than_it_may_and_its_jobs_are_told_who_holds_them() -> None:
    jobs = [holding("big", "a", "b", **MINE), summary("new", gang(2), **MINE), summary("other", gang(), project="cv")]
    held = entry("big", "a", "b")
    assert told(seen(ProjectQuota(gpus=24), *jobs), "new", held) == (
        Code.PROJECT_LIMIT,
        "gang needs 16 GPUs, 8 of the 24 that project nlp may hold are left; held by team/big (16 GPUs)",
    )
    assert placed(seen(ProjectQuota(gpus=32), *jobs), (held,)).keys() == {"big", "new"}
    assert placed(seen(ProjectQuota(gpus=24), *jobs), (held,)).keys() == {"big", "other"}


def test_a_person_holds_no_more_than_they_may_of_a_project() -> None:
    quota = ProjectQuota(gpus=32, person=Quota(gpus=8))
    jobs = [holding("mine", "a", **MINE), summary("new", gang(), **MINE), summary("bens", gang(), project="nlp")]
    assert told(seen(quota, *jobs), "new", entry("mine", "a")) == (
        Code.PERSON_LIMIT,
        "gang needs 8 GPUs, 0 of the 8 that ada in project nlp may hold are left; held by team/mine (8 GPUs)",
    )
    assert placed(seen(quota, *jobs), (entry("mine", "a"),)).keys() == {"mine", "bens"}


def test_gangs_are_counted_also_those_without_gpus() -> None:
    jobs = [holding("a-gang", "a", spec_=gang(1, 0), **MINE), summary("new", gang(1, 0), **MINE)]
    code, because = told(seen(ProjectQuota(gangs=1), *jobs), "new", entry("a-gang", "a", gpus=0))
    assert code == Code.PROJECT_LIMIT
    assert because == "project nlp may run 1 gang at a time and runs 1; held by team/a-gang (0 GPUs)"
    assert placed(seen(ProjectQuota(gangs=2), *jobs), (entry("a-gang", "a", gpus=0),)).keys() == {"a-gang", "new"}


def test_processes_are_counted_by_nodes_and_told_as_processes() -> None:
    """A node with 8 GPUs has 8 ranks; one without has those that its job names."""
    of_cpus = spec(gang={"nodes": 2, "processesPerNode": 3})
    jobs = [holding("big", "a", **MINE), summary("new", of_cpus, **MINE), summary("other", of_cpus, project="cv")]
    held = entry("big", "a")
    assert told(seen(ProjectQuota(processes=13), *jobs), "new", held) == (
        Code.PROJECT_LIMIT,
        "gang needs 6 processes, 5 of the 13 that project nlp may hold are left; held by team/big (8 processes)",
    )
    assert placed(seen(ProjectQuota(processes=14), *jobs), (held,)).keys() == {"big", "new", "other"}
    person = ProjectQuota(processes=64, person=Quota(processes=8))
    assert told(seen(person, *jobs), "new", held)[0] == Code.PERSON_LIMIT


@pytest.mark.parametrize(
    ("quota", "because"),
    [
        (ProjectQuota(processes=8), "gang needs 16 processes, and project nlp may never hold more than 8"),
        (ProjectQuota(gpus=8), "gang needs 16 GPUs, and project nlp may never hold more than 8"),
        (ProjectQuota(gpus=0), "gang needs 16 GPUs, and project nlp may never hold more than 0"),
        (ProjectQuota(gangs=0), "project nlp may run no gang at all"),
        (ProjectQuota(person=Quota(gpus=8)), "gang needs 16 GPUs, and ada in project nlp may never hold more than 8"),
    ],
)
def test_a_gang_that_no_waiting_helps_is_told_so(quota: ProjectQuota, because: str) -> None:
    assert told(seen(quota, summary("new", gang(2), **MINE)), "new") == (Code.EXCEEDS_LIMIT, because)


def test_a_gang_that_one_limit_never_lets_run_waits_for_no_other() -> None:
    """Else it would keep the project's room from those who can use it, and say that it waits for others to end."""
    quota = ProjectQuota(gpus=16, person=Quota(gpus=8))
    jobs = [holding("big", "a", project="nlp", owner="ben"), summary("new", gang(2), **MINE)]
    assert told(seen(quota, *jobs), "new", entry("big", "a"))[0] == Code.EXCEEDS_LIMIT


def test_a_quota_lowered_below_what_runs_stops_nothing_and_gives_nothing() -> None:
    jobs = [holding("big", "a", "b", **MINE), summary("new", gang(), **MINE)]
    plan = admit(seen(ProjectQuota(gpus=8), *jobs), (entry("big", "a", "b"),))
    assert plan.entries == (entry("big", "a", "b"),)
    assert plan.waits["new"].because.startswith("gang needs 8 GPUs, 0 of the 8 that project nlp may hold are left")


def test_an_elastic_gang_begins_with_what_there_is_room_for_and_grows_no_further() -> None:
    elastic = gang({"min": 1, "max": 3})
    assert placed(seen(ProjectQuota(gpus=16), summary("new", elastic, **MINE))) == {"new": ("a", "b")}
    commit = CheckpointStatus(step=1, committed_at=NOW - 1.0, uri="s3://ckpt")
    grown = holding("grows", "a", spec_=elastic, update={"checkpoint": commit}, **MINE)
    offers = admit(seen(ProjectQuota(gpus=16), grown), (entry("grows", "a"),)).entries
    assert [len(offer.nodes) for offer in offers] == [1, 2]
    assert len(admit(seen(ProjectQuota(gpus=8), grown), (entry("grows", "a"),)).entries) == 1


def test_room_is_kept_for_a_gang_that_has_waited_long() -> None:
    running = holding("runs", "a", **MINE)
    large, small = summary("large", gang(2), age=BACKFILL_SECONDS, **MINE), summary("small", gang(), **MINE)
    quota, held = ProjectQuota(gpus=16), entry("runs", "a")
    assert told(seen(quota, running, large, small), "small", held) == (
        Code.PROJECT_LIMIT,
        "gang needs 8 GPUs, 8 of the 16 that project nlp may hold are left; held by team/runs (8 GPUs); "
        "room is kept for team/large, which has waited longer",
    )
    young = summary("large", gang(2), age=BACKFILL_SECONDS - 1, **MINE)
    assert "small" in placed(seen(quota, running, young, small), (held,))
    hopeless = summary("large", gang(3), age=BACKFILL_SECONDS, **MINE)
    assert "small" in placed(seen(quota, running, hopeless, small), (held,))


def test_room_in_a_project_is_not_kept_for_somebody_whose_own_limit_is_reached() -> None:
    quota = ProjectQuota(gpus=16, person=Quota(gpus=8))
    jobs = [
        holding("adas", "a", **MINE),
        summary("waits", gang(), age=BACKFILL_SECONDS, **MINE),
        summary("bens", gang(), project="nlp", owner="ben"),
    ]
    assert "bens" in placed(seen(quota, *jobs), (entry("adas", "a"),))


def test_no_room_is_kept_for_a_gang_that_no_fleet_of_these_nodes_carries() -> None:
    """It is told that first, also while its limit is in use: seed 16690 of the simulation."""
    running = holding("runs", "a", **MINE)
    large, small = summary("large", gang(5), age=BACKFILL_SECONDS, **MINE), summary("small", gang(), **MINE)
    seen_ = seen(ProjectQuota(gpus=40), running, large, small)
    lowered = seen(ProjectQuota(gpus=40), running, large, small, nodes=[*four()[:3], node("d", ready=False)])
    for fleet_ in (seen_, lowered):
        assert told(fleet_, "large", entry("runs", "a")) == (
            Code.GANG_TOO_LARGE,
            "gang needs 5 nodes with 8 GPUs each; the largest pool has 4 such nodes",
        )
        assert "small" in placed(fleet_, (entry("runs", "a"),))


def test_room_is_kept_for_a_gang_while_a_node_that_it_needs_is_not_ready() -> None:
    running = holding("runs", "a", **MINE)
    large, small = summary("large", gang(4), age=BACKFILL_SECONDS, **MINE), summary("small", gang(), **MINE)
    ill = [*four()[:3], node("d", ready=False)]
    fleet_ = seen(ProjectQuota(gpus=32), running, large, small, nodes=ill)
    assert told(fleet_, "small", entry("runs", "a"))[0] == Code.PROJECT_LIMIT


def test_many_holders_are_named_the_largest_first() -> None:
    jobs = [holding(f"job{i}", f"n{i}", spec_=gang(1, i), **MINE) for i in range(1, 6)]
    held = [entry(f"job{i}", f"n{i}", gpus=i) for i in range(1, 6)]
    nodes = [node(f"n{i}") for i in range(1, 8)]
    _, because = told(seen(ProjectQuota(gpus=16), *jobs, summary("new", gang(1, 4), **MINE), nodes=nodes), "new", *held)
    assert because.endswith("held by team/job5 (5 GPUs), team/job4 (4 GPUs), team/job3 (3 GPUs) and 2 more")


def test_of_a_quota_that_makes_no_sense_the_last_one_goes_on_and_else_nothing_begins() -> None:
    known = {"nlp": ProjectQuota(gpus=8)}
    written = {"nlp": "{", "cv": '{"gpus": -1}', "asr": '{"gpus": 4, "newer": 1}', "tts": "[]"}
    found, faults = read_quotas(written, known)
    assert found == {"nlp": known["nlp"], "cv": NOTHING, "asr": ProjectQuota(gpus=4), "tts": NOTHING}
    assert [fault.split(" can't")[0] for fault in faults] == [
        "the quota of project nlp",
        "the quota of project cv",
        "the quota of project tts",
    ]
