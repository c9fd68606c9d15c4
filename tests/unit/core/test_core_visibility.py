"""What is told of a job names gangs of its own project alone: its status is read by whoever may read the job. Random
fleets are held to that in tests/sim/walks.py."""

from __future__ import annotations

from typing import Any

from tests.unit.core.seen import fleet, spec, summary
from tests.unit.core.test_core_admit import entry, four, holding
from tests.unit.core.test_core_preemption import gang, held, runs, seen

from muster.operator.core.admit import admit
from muster.operator.core.visibility import describe_jobs
from muster.words.quotas import ProjectQuota

OURS: dict[str, Any] = {"project": "nlp"}


def because(*jobs: Any, waiting: Any, **changes: Any) -> str:
    plan = admit(fleet(four(), [*jobs, waiting], **changes), held(*jobs))
    return plan.waits[waiting.uid].because


def test_who_holds_the_nodes() -> None:
    own, cv, bio = runs("own", "a", **OURS), runs("cv-secret", "b", "c", project="cv"), runs("bio", "d", project="bio")
    waiting = summary("waits", spec(gang={"nodes": 4, "gpusPerNode": 8}), **OURS)
    needs = "gang needs 4 nodes with 8 GPUs each, none is free; held by"
    told = because(own, cv, bio, waiting=waiting)
    assert told == f"{needs} 2 gangs of other projects 3 nodes (24 GPUs), team/own 1 node (8 GPUs)"
    theirs = summary("waits", spec(gang={"nodes": 4, "gpusPerNode": 8}), project="bio")
    told = because(own, cv, bio, waiting=theirs)
    assert told == f"{needs} 2 gangs of other projects 3 nodes (24 GPUs), team/bio 1 node (8 GPUs)"
    told = because(own, runs("cv-secret", "b", "c", "d", project="cv"), waiting=waiting)
    assert told == f"{needs} a gang of another project 3 nodes (24 GPUs), team/own 1 node (8 GPUs)"


def test_each_reader_of_the_same_shape_is_told_their_own() -> None:
    own, cv = runs("own", "a", "b", **OURS), runs("cv-secret", "c", "d", project="cv")
    both = [summary(f"waits-{project}", gang(2), project=project) for project in ("nlp", "cv")]
    waits = admit(fleet(four(), [own, cv, *both]), held(own, cv)).waits
    assert "team/own" in waits["waits-nlp"].because
    assert "cv-secret" not in waits["waits-nlp"].because
    assert "team/cv-secret" in waits["waits-cv"].because
    assert "team/own" not in waits["waits-cv"].because


def test_who_holds_a_namespaces_limit_and_for_whom_room_is_kept() -> None:
    cv = holding("cv-secret", "a", project="cv", spec_=gang(1))
    first, later = summary("cv-next", gang(2), age=900, project="cv"), summary("ours", gang(1), age=10, **OURS)
    plan = admit(fleet(four(), [cv, first, later], limits={"team": 16}), (entry("cv-secret", "a"),))
    assert plan.waits["ours"].because == (
        "gang needs 8 GPUs, 8 of the 16 that namespace team may hold are left; held by a gang of another project "
        "(8 GPUs); room is kept for a gang of another project, which has waited longer"
    )


def test_for_whom_a_gang_makes_room_and_who_makes_room_for_it() -> None:
    low, urgent = runs("low", "a", "b", "c", "d", project="cv"), summary("urgent", gang(4, 5), **OURS)
    plan = admit(seen(low, urgent, quotas={"nlp": ProjectQuota(preempts=True)}), held(low))
    told = "preempted by a gang of another project, which has priority 5 where this job has 0"
    assert plan.entries[0].yields_because == told
    assert plan.waits["urgent"].because.endswith("; a gang of another project is asked to commit and make room")


def test_a_few_are_named_and_the_others_counted() -> None:
    mine = [summary(f"own{i}", **OURS) for i in range(5)]
    theirs = [summary(f"cv{i}", project="cv") for i in range(2)]
    assert describe_jobs(mine[0], mine[:1]) == "team/own0"
    told = "team/own0, team/own1, team/own2, 2 more and 2 gangs of other projects"
    assert describe_jobs(mine[0], [*mine, *theirs]) == told
    assert describe_jobs(mine[0], theirs[:1]) == "a gang of another project"
