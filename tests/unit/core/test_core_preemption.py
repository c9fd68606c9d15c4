"""Whom a gang may put out, who is chosen, and what becomes of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.sim.walks import walk
from tests.unit.core.seen import NOW, fleet, gone, node, running, spec, summary, write
from tests.unit.core.test_core_admit import entry, four, holding

from muster.operator.core.admit import AdmissionPlan, admit
from muster.operator.core.audit import audit
from muster.operator.core.codes import Code
from muster.operator.core.decide import decide
from muster.operator.core.decision import RemoveWorker
from muster.operator.core.evictions import REQUEUE_SECONDS, RESTART_SECONDS, cost, served_seconds
from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.core.observed import NodeReservation
from muster.recipe.document import JobSpec
from muster.words.quotas import ProjectQuota
from muster.words.signals import Cause
from muster.words.status import Attempt, CheckpointStatus, GoodputAccount, JobStatus, Phase

MAY = {"default": ProjectQuota(preempts=True)}


def gang(nodes: Any = 1, priority: int = 0, **top: Any) -> JobSpec:
    return spec(priority=priority, gang={"nodes": nodes, "gpusPerNode": 8}, **top)


def committed(seconds_ago: float) -> dict[str, Any]:
    return {"checkpoint": CheckpointStatus(step=1, committed_at=NOW - seconds_ago, uri="s3://ckpt")}


def served(seconds: float) -> dict[str, Any]:
    return {"ledger": GoodputAccount(seconds={"productive": seconds, "queue": 9000.0, "suspended": 9.0}, since=NOW)}


def waiting(uid: str, age: float = 0.0, **status: Any) -> JobSummary:
    return summary(uid, gang(1), age, JobStatus(queued_at=NOW - age, since=NOW - age, **status))


def runs(uid: str, *nodes: str, priority: int = 0, ago: float = 10.0, **changes: Any) -> JobSummary:
    changes.setdefault("spec_", gang(len(nodes), priority))
    return holding(uid, *nodes, update=committed(ago) | changes.pop("update", {}), **changes)


def seen(*jobs: JobSummary, nodes: Any = None, quotas: Any = MAY) -> Fleet:
    return fleet(nodes or four(), list(jobs), quotas=quotas)


def held(*jobs: JobSummary) -> tuple[NodeReservation, ...]:
    return tuple(entry(job.uid, *job.status.gang.nodes, number=job.status.reservation) for job in jobs)


def yielding(plan: AdmissionPlan) -> dict[str, str]:
    return {e.uid: e.yields_to for e in plan.entries if e.yields_to}


def test_a_gang_of_a_lower_priority_makes_room_and_both_are_told_so() -> None:
    low, urgent = runs("low", "a", "b", "c", "d"), summary("urgent", gang(4, 5))
    plan = admit(seen(low, urgent), held(low))
    (there,) = plan.reservations
    assert (there.yields_to, there.yields_because) == (
        "urgent",
        "preempted by team/urgent, which has priority 5 where this job has 0",
    )
    assert there.nodes == low.status.gang.nodes, "it holds them until it is gone"
    assert plan.waits["urgent"].code == Code.AWAITING_PREEMPTION
    assert plan.waits["urgent"].because == (
        "gang needs 4 nodes with 8 GPUs each; team/low is asked to commit and make room"
    )
    assert admit(seen(low, urgent), plan.entries).entries == plan.entries, "it is said once"


@pytest.mark.parametrize(
    ("victim", "job", "quotas"),
    [
        (runs("low", "a"), summary("new", gang(1, 5)), {}),
        (runs("low", "a"), summary("new", gang(1, 5)), {"default": ProjectQuota(gpus=64)}),
        (runs("low", "a"), summary("new", gang(1, 5), project="other"), MAY),
        (runs("low", "a", update=served(599)), summary("new", gang(1, 0)), MAY),
        (runs("low", "a"), waiting("old", **served(600)), MAY),
        (runs("low", "a", priority=6), summary("new", gang(1, 5)), MAY),
        (runs("low", "a", spec_=gang(1, recovery={"dryRun": True})), summary("new", gang(1, 5)), MAY),
        (runs("low", "a", spec_=gang(1, cancel=True)), summary("new", gang(1, 5)), MAY),
        (runs("low", "a", phase=Phase.RESTARTING), summary("new", gang(1, 5)), MAY),
        (runs("low", "a"), summary("new", spec(priority=5, gang={"nodes": 1, "gpusPerNode": 0})), MAY),
        (runs("low", "a"), summary("new", gang(1, 5)), {"default": ProjectQuota(preempts=True, gpus=8)}),
    ],
    ids=[
        "nobody may",
        "quota alone",
        "other project",
        "in its first minutes",
        "both have had them",
        "higher",
        "dry run",
        "ends",
        "restarts",
        "cpu",
        "limit",
    ],
)
def test_who_puts_out_nobody(victim: JobSummary, job: JobSummary, quotas: Any) -> None:
    nodes = [replace(node("a"), slots=1)]
    assert yielding(admit(seen(victim, job, nodes=nodes, quotas=quotas), held(victim))) == {}


def test_gangs_of_another_scheduler_are_left_to_it() -> None:
    kueue = spec(gang={"nodes": 1, "gpusPerNode": 8, "scheduler": {"kind": "kueue", "queue": "q"}})
    theirs, urgent = runs("theirs", "a", spec_=kueue), summary("urgent", gang(1, 5))
    others = (NodeReservation("others/a", 0, "", ("a",), "", "", 8),)
    assert yielding(admit(replace(seen(theirs, urgent, nodes=[node("a")]), others=others), ())) == {}


def test_the_cheapest_set_is_chosen_by_uncommitted_work_and_restart_cost() -> None:
    fresh, stale = runs("fresh", "a", ago=10), runs("stale", "b", ago=3000)
    slow = runs("slow", "c", update={"attempts": (Attempt(number=1, created_at=NOW - 9000, first_step_at=NOW - 5000),)})
    two = runs("two", "d", "e", ago=10)
    nodes = [node(name) for name in "abcde"]
    jobs = (fresh, stale, slow, two)
    assert yielding(admit(seen(*jobs, summary("u", gang(1, 5)), nodes=nodes), held(*jobs))).keys() == {"fresh"}
    assert yielding(admit(seen(*jobs, summary("u", gang(2, 5)), nodes=nodes), held(*jobs))).keys() == {"two"}
    assert yielding(admit(seen(*jobs, summary("u", gang(3, 5)), nodes=nodes), held(*jobs))).keys() == {"fresh", "two"}
    assert cost(fresh, NOW) == 8 * (10 + RESTART_SECONDS + REQUEUE_SECONDS)


def test_no_more_is_put_out_than_twice_what_is_asked_for_where_that_will_do() -> None:
    pair, four_ = runs("pair", "a", "b"), runs("four", "c", "d", "e", "f", ago=0)
    nodes = [node(name) for name in "abcdef"]
    for size, out in ((1, {"pair"}), (2, {"pair"}), (3, {"four"}), (4, {"four"}), (6, {"pair", "four"})):
        jobs = (pair, four_, summary("u", gang(size, 5)))
        assert yielding(admit(seen(*jobs, nodes=nodes), held(pair, four_))).keys() == out


def test_a_gang_of_a_higher_priority_has_up_to_four_times_as_much_put_out_where_nothing_less_would_do() -> None:
    large = runs("large", "a", "b", "c", "d")
    assert yielding(admit(seen(large, summary("u", gang(1, 5))), held(large))) == {"large": "u"}
    five = [node(name) for name in "abcde"]
    larger = runs("larger", "a", "b", "c", "d", "e")
    assert yielding(admit(seen(larger, summary("u", gang(1, 5)), nodes=five), held(larger))) == {}
    borrowed = runs("borrowed", "a", "b", "c", "d", project="cv", ago=9000)
    equal = summary("equal", gang(1), project="nlp")
    assert yielding(admit(seen(borrowed, equal, quotas=shared(cv=1, nlp=9)), held(borrowed))) == {}


def test_what_is_free_counts() -> None:
    one, urgent = runs("one", "a"), summary("u", gang(4, 5))
    plan = admit(seen(one, urgent), held(one))
    assert yielding(plan) == {"one": "u"}
    small = summary("small", gang(1), age=-1)
    assert [e.uid for e in admit(seen(one, urgent, small), plan.entries).reservations] == ["one"], "b, c and d are kept"


def test_half_nodes_are_put_out_together() -> None:
    half = spec(gang={"nodes": 1, "gpusPerNode": 4})
    jobs = [runs(f"half{i}", "ab"[i // 2], spec_=half, ago=[10, 20, 500, 10][i]) for i in range(4)]
    entries = tuple(entry(job.uid, *job.status.gang.nodes, gpus=4) for job in jobs)
    plan = admit(seen(*jobs, summary("u", gang(1, 5)), nodes=[node("a"), node("b")]), entries)
    assert yielding(plan).keys() == {"half0", "half1"}


def test_an_elastic_gang_is_made_smaller_before_one_is_stopped() -> None:
    elastic = runs("elastic", "a", "b", "c", spec_=gang({"min": 1, "max": 3}))
    fixed, urgent = runs("fixed", "d"), summary("u", gang(2, 5))
    plan = admit(seen(elastic, fixed, urgent), held(elastic, fixed))
    assert yielding(plan) == {"elastic": "u"}
    smaller = next(e for e in plan.entries if (e.uid, e.number) == ("elastic", 1))
    assert (len(smaller.nodes), smaller.yields_to) == (1, "")
    gone_on = replace(elastic, status=elastic.status.model_copy(update={"reservation": 1, "phase": Phase.QUEUED}))
    after = admit(seen(gone_on, fixed, urgent), plan.entries)
    freed = set(elastic.status.gang.nodes) - set(smaller.nodes)
    assert {e.uid: set(e.nodes) for e in after.entries} == {"elastic": set(smaller.nodes), "fixed": {"d"}, "u": freed}


def test_the_nodes_are_kept_until_the_last_is_free_and_given_back_if_nobody_wants_them() -> None:
    one, two, urgent = runs("one", "a", "b"), runs("two", "c", "d"), summary("u", gang(4, 5))
    plan = admit(seen(one, two, urgent), held(one, two))
    assert yielding(plan) == {"one": "u", "two": "u"}
    back = replace(summary("one", gang(2), age=50), status=one.status.model_copy(update={"phase": Phase.QUEUED}))
    back = replace(back, status=back.status.model_copy(update={"reservation": 1, "gang": type(one.status.gang)()}))
    half = admit(seen(back, two, urgent), plan.entries)
    assert yielding(half) == {"two": "u"}
    assert {e.uid for e in half.reservations} == {"two"}, "who made room does not take it again"
    cancelled = summary("u", gang(4, 5, cancel=True))
    spared = admit(seen(back, two, cancelled), plan.entries)
    assert yielding(spared) == {}
    assert {e.uid for e in spared.entries} == {"one", "two"}


def test_what_is_freed_for_one_gang_goes_to_no_other_whoever_is_gone_first() -> None:
    a, b = replace(node("a"), instance_type="new"), replace(node("b"), instance_type="old")
    on_a, on_b = runs("on-a", "a", ago=50), runs("on-b", "b")
    any_type = summary("any", gang(1, 5), age=9)
    new = gang(1, 5)
    new = new.model_copy(update={"gang": new.gang.model_copy(update={"instance_types": ("new",)})})
    needs_new = summary("needs-new", new, age=1)
    plan = admit(seen(on_a, on_b, any_type, needs_new, nodes=[a, b]), held(on_a, on_b))
    assert yielding(plan) == {"on-a": "needs-new", "on-b": "any"}
    nominated = {entry.uid: entry.nodes for entry in plan.entries if entry.nominated}
    assert nominated == {"any": ("b",), "needs-new": ("a",)}
    # The node of the later one is free first. The earlier one waits for its own.
    on_a = waiting("on-a", age=99, reservation=1)
    later = admit(seen(on_a, on_b, any_type, needs_new, nodes=[a, b]), plan.entries)
    assert {entry.uid: entry.nodes for entry in later.reservations} == {"on-b": ("b",), "needs-new": ("a",)}
    assert later.preemptions == ()
    urgent = summary("urgent", gang(1, 9))
    taken = admit(seen(on_a, on_b, any_type, needs_new, urgent, nodes=[a, b]), plan.entries)
    assert ("urgent", ("a",)) in [(entry.uid, entry.nodes) for entry in taken.reservations], "of a higher priority"


def test_an_order_is_taken_back_also_where_nobody_waits_any_more() -> None:
    low, urgent = runs("low", "a", "b", "c", "d"), summary("urgent", gang(4, 5))
    told = admit(seen(low, urgent), held(low)).entries
    assert admit(seen(low), told).entries == held(low)


def test_a_new_job_does_not_wait_for_as_long_as_another_of_its_project_runs() -> None:
    old, new = runs("old", "a", update=served(600)), summary("new", gang(1))
    fleet_ = seen(old, new, nodes=[node("a")])
    plan = admit(fleet_, held(old))
    assert yielding(plan) == {"old": "new"}
    assert plan.entries[0].yields_because == (
        "preempted by team/new, so that each job of project default soon has its first 10 minutes"
    )
    assert plan.preemptions[0].reasons == ("so that each job of project default soon has its first 10 minutes",)
    # Once it is gone, it is older and in the queue as well. What it freed is for whom it was freed all the same.
    gone_ = waiting("old", age=900, reservation=1, **served(600))
    (granted,) = admit(seen(gone_, waiting("new"), nodes=[node("a")]), plan.entries).entries
    assert granted.uid == "new"
    begun = runs("new", "a", update={"ledger": GoodputAccount(since=NOW)})
    assert yielding(admit(seen(gone_, begun, nodes=[node("a")]), held(begun))) == {}, "it does not come back at once"


def test_a_large_gang_is_not_made_smaller_for_a_new_small_one_of_its_project() -> None:
    elastic = gang({"min": 1, "max": 4})
    large = runs("large", "a", "b", "c", "d", spec_=elastic, update=served(9000))
    assert yielding(admit(seen(large, summary("new", gang(1))), held(large))) == {}
    assert yielding(admit(seen(large, summary("new", gang(2))), held(large))) == {"large": "new"}


def test_first_minutes_are_those_on_nodes_over_all_attempts() -> None:
    waits = waiting("waits", **served(100))
    there = runs("there", "a", update={"ledger": GoodputAccount(seconds={"loading": 100.0}, since=NOW - 50)})
    assert (served_seconds(waits, NOW), served_seconds(there, NOW)) == (100, 150)


def test_a_gang_in_its_first_minutes_is_chosen_after_one_that_has_had_them() -> None:
    young, old = runs("young", "a", update=served(100)), runs("old", "b", ago=300, update=served(600))
    nodes = [node("a"), node("b")]
    assert yielding(admit(seen(young, old, summary("u", gang(1, 5)), nodes=nodes), held(young, old))) == {"old": "u"}
    assert yielding(admit(seen(young, summary("u", gang(1, 5)), nodes=nodes[:1]), held(young))) == {"young": "u"}


def test_whoever_made_room_before_is_chosen_after_whoever_did_not() -> None:
    began = {"created_at": NOW - 9000, "first_step_at": NOW - 9000 + RESTART_SECONDS}
    before = Attempt(number=1, created_at=NOW - 20_000, outcome="preempted")
    again = runs("again", "a", update={"attempts": (before, Attempt(number=2, **began))})
    never = runs("never", "b", update={"attempts": (Attempt(number=1, **began),)}, ago=300)
    nodes = [node("a"), node("b")]
    plan = admit(seen(again, never, summary("u", gang(1, 5)), nodes=nodes), held(again, never))
    assert yielding(plan) == {"never": "u"}


def shared(**weights: float) -> dict[str, ProjectQuota]:
    return {project: ProjectQuota(weight=weight, preempts=True) for project, weight in weights.items()}


def test_what_was_borrowed_is_taken_back_by_whoever_is_entitled_to_it() -> None:
    jobs = [runs(f"cv{i}", name, project="cv", ago=100 - i) for i, name in enumerate("abcd")]
    waiting = [summary(f"nlp{i}", gang(), project="nlp", age=-i) for i in range(4)]
    plan = admit(seen(*jobs, *waiting, quotas=shared(cv=1, nlp=1)), held(*jobs))
    assert yielding(plan) == {"cv3": "nlp0", "cv2": "nlp1"}, "two of four nodes, the newest checkpoints first"
    assert plan.reservations[3].yields_because == (
        "preempted by a gang of another project, for another project holds 0 GPUs of its share of 16, "
        "and project cv holds 32 GPUs of its share of 16"
    )
    assert yielding(admit(seen(*jobs, *waiting, quotas=shared(cv=3, nlp=1)), held(*jobs))) == {"cv3": "nlp0"}
    young = [replace(job, status=job.status.model_copy(update={"since": NOW - 60.0})) for job in jobs]
    assert yielding(admit(seen(*young, *waiting, quotas=shared(cv=1, nlp=1)), held(*jobs))) == {}


def test_nobody_is_pushed_below_their_share_by_more_than_is_gained() -> None:
    whole = runs("cv", "a", "b", "c", "d", project="cv")
    waiting = summary("nlp", gang(4), project="nlp")
    assert yielding(admit(seen(whole, waiting, quotas=shared(cv=1, nlp=1)), held(whole))) == {}
    three, one = runs("cv", "a", "b", "c", project="cv"), runs("cv2", "d", project="cv")
    waiting = summary("nlp", gang(3), project="nlp")
    plan = admit(seen(three, one, waiting, quotas=shared(cv=1, nlp=1)), held(three, one))
    assert yielding(plan) == {"cv": "nlp"}, "16 GPUs are gained, 8 are lost"
    three, one = runs("nlp", "a", "b", "c", project="nlp"), runs("cv2", "d", project="cv")
    waiting = summary("cv", gang(3), project="cv")
    assert yielding(admit(seen(three, one, waiting, quotas=shared(cv=1, nlp=1)), held(three, one))) == {}, (
        "and not back"
    )


def test_the_share_of_the_set_that_is_put_out_counts_as_in_kueue_14543() -> None:
    """There a preemptor's own gangs are counted as gone while others are chosen, and then left running, so that what
    was chosen is not allowed any more; the one that was put out takes its place again, for ever.
    """
    mine = runs("mine", "a", "b", project="nlp", ago=3000)
    theirs = runs("theirs", "c", "d", project="cv", ago=10)
    next_ = summary("next", gang(2), status=JobStatus(queued_at=NOW, since=NOW, **served(600)), project="nlp")
    assert yielding(admit(seen(mine, theirs, next_, quotas=shared(cv=1, nlp=1)), held(mine, theirs))) == {}
    urgent = summary("next", gang(2, 1), project="nlp")
    plan = admit(seen(mine, theirs, urgent, quotas=shared(cv=1, nlp=1)), held(mine, theirs))
    assert yielding(plan) == {"theirs": "next"}, "a lower priority yields whatever the shares"


def test_a_gang_that_makes_room_commits_goes_back_into_the_queue_and_pays_nothing() -> None:
    there = running()
    order = replace(there.reservations[0], yields_to="urgent", yields_because="preempted by team/urgent, which …")
    there = replace(there, reservations=(order,))
    stale = decide(replace(there, fresh=False))
    assert stale.trusts_absence, "an old read may show an order that was taken back"
    told = decide(there)
    assert audit(there, told) == ()
    assert (told.status.phase, told.status.code) == (Phase.RESTARTING, Code.EVICTED)
    assert told.because == "attempt 1 ended: eviction: preempted by team/urgent, which …"
    stopping = write(there, told)
    removals = [action for action in decide(stopping).actions if isinstance(action, RemoveWorker)]
    assert [action.grace_seconds for action in removals] == [110.0, 110.0], "time to commit"
    empty = gone(stopping)
    for _ in range(5):
        decision = decide(empty)
        assert audit(empty, decision) == ()
        empty = write(empty, decision)
    status = empty.status
    assert (status.phase, status.gang.nodes, status.reservation) == (Phase.QUEUED, (), 1)
    assert (status.restarts.recent, status.preemptions_in_a_row, status.excluded_nodes) == ((), 0, ())
    assert status.attempts[-1].cause == Cause.EVICTION


def test_preemption_goes_round_in_no_circle_whatever_the_fleet() -> None:
    """More of them: python tests/sim/walks.py."""
    states = put_out = 0
    for seed in (*range(400), 11491):  # which went round while only gangs of equal priority counted for the turns
        seen_ = walk(seed)
        assert not seen_.fault
        states, put_out = states + seen_.states, put_out + seen_.evictions
    assert states > 1300
    assert put_out > 200


def test_no_gang_is_offered_more_nodes_in_the_pass_that_puts_it_out() -> None:
    assert walk(397543).fault == ""


@pytest.mark.parametrize("seed", [41777, 105795, 109818])
def test_what_was_freed_for_a_gang_does_not_go_back_when_lower_ones_are_put_out(seed: int) -> None:
    """Fleets that went round for ever: a project's turn came sooner as its gangs of lower priority were put out, and
    its gang that had just made room for an equal took the nodes again.
    """
    assert walk(seed).fault == ""
