"""Budgets of a month: who waits, who is stopped and goes on again, and that every hour is counted once.

The clock of these tests stands in November 2023 (UTC).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.core.seen import NOW, fleet, gone, node, running, spec, summary, with_status, write
from tests.unit.core.test_core_admit import entry

from muster.operator.core import month_budgets
from muster.operator.core.admit import AdmissionPlan, admit
from muster.operator.core.audit import audit
from muster.operator.core.codes import Code
from muster.operator.core.decide import decide
from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.core.month_budgets import MonthBudgets
from muster.operator.core.observed import ObservedJob, QueueWait
from muster.plan.usage import held_of, usage
from muster.words.months import month_range
from muster.words.prices import InstancePrice, Prices
from muster.words.quotas import MonthSpent, ProjectQuota, Quota, Spent
from muster.words.status import Attempt, CheckpointStatus, GangStatus, JobStatus, Phase

HOUR = 3600.0
BEGINS, ENDS = month_range("2023-11")
PRICES = Prices(types={"big": InstancePrice(gpus=8, on_demand=40.0, spot=10.0)})
MINE: dict[str, Any] = {"project": "nlp", "owner": "ada"}


def spent(hours: float, money: float = 0.0, as_of: float = NOW, month: str = "2023-11", **people: Spent) -> MonthSpent:
    return MonthSpent(month=month, as_of=as_of, total=Spent(gpu_hours=hours, money=money), people=people)


def gang(nodes: int = 1, gpus: int = 8) -> Any:
    return spec(gang={"nodes": nodes, "gpusPerNode": gpus})


def runs(uid: str, hours: float, gpus: int = 8, ended: float | None = None, **changes: Any) -> JobSummary:
    """A job on one node, whose only attempt began so many hours ago."""
    attempt = Attempt(
        number=1, created_at=NOW - hours * HOUR, ended_at=ended, workers=1, gpus_per_worker=gpus, instance_type="big"
    )
    held = GangStatus(wanted=1, ready=1, nodes=("a",), pool="pool-a", capacity="on-demand", instance_type="big")
    status = JobStatus(phase=Phase.RUNNING, gang=held, attempt=1, attempts=(attempt,), since=NOW - hours * HOUR)
    return summary(uid, gang(1, gpus), status=status, **MINE | changes)


def seen(quota: ProjectQuota, *jobs: JobSummary, now: float = NOW, nodes: str = "abcd") -> Fleet:
    machines = [node(name, instance_type="big") for name in nodes]
    return fleet(machines, list(jobs), quotas={"nlp": quota}, prices=PRICES, now=now)


def plan(quota: ProjectQuota, *jobs: JobSummary, **more: Any) -> AdmissionPlan:
    held = tuple(entry(job.uid, *job.status.gang.nodes) for job in jobs if job.status.gang.nodes)
    return admit(seen(quota, *jobs, **more), held)


def waits(quota: ProjectQuota, *jobs: JobSummary, **more: Any) -> dict[str, str]:
    return {uid: wait.code for uid, wait in plan(quota, *jobs, **more).waits.items()}


def test_a_job_waits_for_a_budget_that_is_used_up_and_is_told_how_to_go_on() -> None:
    new = summary("new", gang(), **MINE)
    wait = plan(ProjectQuota(gpu_hours_per_month=100, spent=spent(100.0)), new).waits["new"]
    assert wait == QueueWait(
        Code.MONTH_LIMIT,
        "project nlp has used the 100 GPU-hours that it may use in 2023-11: it goes on when quota.gpuHoursPerMonth is "
        "raised, or from 2023-12-01 (UTC)",
    )
    assert waits(ProjectQuota(gpu_hours_per_month=110, spent=spent(100.0)), new) == {}
    assert waits(ProjectQuota(gpu_hours_per_month=100, spent=spent(100.0, month="2023-10")), new) == {}, "a new month"
    other = summary("other", gang(), project="cv")
    assert waits(ProjectQuota(gpu_hours_per_month=100, spent=spent(100.0)), other) == {}


def test_what_is_left_must_pay_for_a_quarter_of_an_hour_of_what_begins_and_what_runs() -> None:
    """Two jobs of 8 GPUs use 4 GPU-hours in a quarter of an hour: 3 are enough for the first and not for both."""
    both = [summary("first", gang(), age=2.0, **MINE), summary("second", gang(), age=1.0, **MINE)]
    quota = ProjectQuota(gpu_hours_per_month=100, spent=spent(97.0))
    assert waits(quota, *both) == {"second": Code.MONTH_LIMIT}
    assert "less than this gang and what runs use in 15 minutes" in plan(quota, *both).waits["second"].because
    assert waits(ProjectQuota(gpu_hours_per_month=101, spent=spent(97.0)), *both) == {}


def test_an_elastic_gang_grows_only_where_what_is_left_pays_for_it() -> None:
    """To grow is a restart: one for a few minutes is a loss. 16 GPUs use 4 GPU-hours in a quarter of an hour."""
    job = runs("runs", 0.1)
    grows = spec(gang={"nodes": {"min": 1, "max": 2}, "gpusPerNode": 8})
    commit = CheckpointStatus(step=5, committed_at=NOW - 1.0, uri="file:///x")
    elastic = replace(job, spec=grows, status=job.status.model_copy(update={"checkpoint": commit}))
    for left, nodes in ((3.9, ["a"]), (4.1, ["a", "b"])):
        wanted = seen(ProjectQuota(gpu_hours_per_month=100, spent=spent(100 - left)), elastic)
        found = admit(replace(wanted, grow_after_seconds=0.0), (entry("runs", "a"),))
        assert sorted({name for held in found.entries for name in held.nodes}) == nodes, left


def test_a_budget_of_nothing_lets_nothing_begin_and_stops_what_runs() -> None:
    for quota in (ProjectQuota(gpu_hours_per_month=0), ProjectQuota(person=Quota(money_per_month=0))):
        found = plan(quota, summary("new", gang(), **MINE), summary("cpu", gang(1, 0), **MINE), runs("runs", 0.1))
        assert {uid: wait.code for uid, wait in found.waits.items()} == dict.fromkeys(("new", "cpu"), Code.MONTH_LIMIT)
        assert found.budgets["runs"].code == Code.MONTH_LIMIT


def test_gpu_hours_that_are_used_up_do_not_stop_gangs_without_gpus() -> None:
    found = plan(
        ProjectQuota(gpu_hours_per_month=5, spent=spent(9.0)), summary("cpu", gang(1, 0), **MINE), runs("c", 1, 0)
    )
    assert (found.waits, found.budgets) == ({}, {})


def test_a_running_job_that_reaches_the_budget_is_stopped_by_what_it_used_since_the_api_counted() -> None:
    job = runs("runs", 2.0)
    counted = spent(100.0, as_of=NOW - HOUR)  # and 8 GPU-hours since
    assert plan(ProjectQuota(gpu_hours_per_month=108.1, spent=counted), job).budgets == {}
    assert plan(ProjectQuota(gpu_hours_per_month=108.0, spent=counted), job).budgets["runs"].code == Code.MONTH_LIMIT


def test_it_is_looked_again_when_the_budget_will_be_used_up_or_the_month_ends() -> None:
    quota = ProjectQuota(gpu_hours_per_month=108.0, spent=spent(100.0))
    assert plan(quota, runs("runs", 0.0)).look_after == pytest.approx(HOUR)
    assert plan(quota, summary("new", gang(), **MINE), nodes="").look_after == pytest.approx(ENDS - NOW)
    assert plan(ProjectQuota(gpus=8), runs("runs", 0.0)).look_after is None


def test_each_person_has_a_budget_of_their_own_within_the_project_s() -> None:
    quota = ProjectQuota(person=Quota(gpu_hours_per_month=10), spent=spent(11.0, ada=Spent(gpu_hours=11.0)))
    jobs = [summary("adas", gang(), **MINE), summary("bens", gang(), project="nlp", owner="ben")]
    found = plan(quota, *jobs).waits
    assert found.keys() == {"adas"}
    assert found["adas"].because.startswith("ada in project nlp has used the 10 GPU-hours")
    assert "quota.person.gpuHoursPerMonth is raised" in found["adas"].because


def test_money_is_kept_by_the_price_of_the_nodes_and_nothing_begins_without_one() -> None:
    job = runs("runs", 1.0)  # 40 an hour
    counted = spent(0.0, 60.0, as_of=NOW - HOUR)
    assert plan(ProjectQuota(money_per_month=100.5, spent=counted), job).budgets == {}
    stop = plan(ProjectQuota(money_per_month=100.0, spent=counted), job).budgets["runs"]
    assert stop.because.startswith("project nlp has used the 100 USD")
    quota = ProjectQuota(money_per_month=100.0)
    assert waits(quota, summary("new", gang(), **MINE)) == {}
    unknown = [node("a", instance_type="home-made")]
    wait = admit(replace(seen(quota, summary("new", gang(), **MINE)), nodes=tuple(unknown)), ()).waits["new"]
    assert wait.code == Code.MONTH_LIMIT
    assert "the price of on-demand nodes of type home-made is not known" in wait.because


def test_an_api_that_is_down_is_said_and_what_ran_since_is_counted() -> None:
    job = runs("runs", 5.0)
    quota = ProjectQuota(gpu_hours_per_month=60.0, spent=spent(20.0, as_of=NOW - 5 * HOUR))
    stop = plan(quota, job).budgets["runs"]
    assert "the API last counted at 2023-11-14T17:13:20Z, what ran since is added" in stop.because
    never = plan(ProjectQuota(gpu_hours_per_month=40.0), job).budgets["runs"]
    assert "the API last counted at 2023-11-01T00:00:00Z" in never.because


def test_who_was_stopped_goes_on_when_there_is_a_budget_again() -> None:
    stopped = summary("job", gang(), status=JobStatus(phase=Phase.SUSPENDED, code=Code.MONTH_LIMIT), **MINE)
    by_hand = summary("own", gang(), status=JobStatus(phase=Phase.SUSPENDED, code=Code.SUSPENDED), **MINE)
    spent_now = ProjectQuota(gpu_hours_per_month=100, spent=spent(99.0))
    assert plan(spent_now, stopped, by_hand).budgets == {}, "what is left would not last"
    for quota in (ProjectQuota(gpu_hours_per_month=200, spent=spent(99.0)), ProjectQuota()):
        assert {uid: told.code for uid, told in plan(quota, stopped, by_hand).budgets.items()} == {
            "job": Code.AWAITING_ADMISSION
        }
    assert plan(spent_now, stopped, now=ENDS + 1).budgets.keys() == {"job"}, "in the next month"


def told(seen_: ObservedJob, code: Code) -> ObservedJob:
    return replace(seen_, budget=QueueWait(code, "the words"))


def test_a_stopped_job_commits_is_suspended_and_goes_on_from_there() -> None:
    job = told(running(), Code.MONTH_LIMIT)
    first = decide(job)
    assert (first.status.phase, first.status.code, first.status.ends_as) == (
        Phase.STOPPING, Code.MONTH_LIMIT, Phase.SUSPENDED,
    )  # fmt: skip
    job = write(job, first)
    removal = decide(job)
    assert {action.grace_seconds for action in removal.actions} == {110.0}, "time to commit"  # type: ignore[union-attr]
    job = gone(job)
    for _ in range(3):
        decision = decide(job)
        assert audit(job, decision) == ()
        job = write(job, decision)
    assert (job.status.phase, job.status.code, job.status.because) == (Phase.SUSPENDED, Code.MONTH_LIMIT, "the words")
    assert job.status.attempts[-1].outcome == "suspended"
    assert job.status.restarts.total == 0
    for quiet in (job, replace(job, budget=None)):  # also for an operator that has just begun and knows nothing yet
        assert decide(quiet).status == job.status
    again = decide(told(job, Code.AWAITING_ADMISSION))
    assert (again.status.phase, again.status.because) == (Phase.QUEUED, "the words")
    assert audit(told(job, Code.AWAITING_ADMISSION), again) == ()


def test_what_another_scheduler_grants_waits_for_the_budget_too() -> None:
    waiting = replace(with_status(running(), JobStatus()), workers=(), wait=QueueWait(Code.MONTH_LIMIT, "spent"))
    assert decide(waiting).status.code == Code.MONTH_LIMIT
    assert decide(replace(waiting, wait=None)).status.phase is Phase.STARTING


# --- every hour is counted once ---

lives = st.builds(
    lambda since, length, workers, gpus, capacity, outcome: Attempt(
        number=1, created_at=BEGINS + since * HOUR, workers=workers, gpus_per_worker=gpus, capacity=capacity,
        ended_at=None if length is None else BEGINS + (since + length) * HOUR, instance_type="big", outcome=outcome,
    ),
    st.floats(-50, 340), st.none() | st.floats(0, 100), st.integers(1, 4), st.sampled_from([0, 4, 8]),
    st.sampled_from(["spot", "on-demand"]), st.sampled_from(["running", "running", "waiting"]),
)  # fmt: skip


def counts_once(attempts: list[Attempt], counted_until: float, month: str) -> None:
    """What the API counted until some moment and the core since are what all attempts used in the month until now."""
    jobs = []
    for number, attempt in enumerate(sorted(attempts, key=lambda each: each.created_at)):
        status = JobStatus(phase=Phase.RUNNING if attempt.ended_at is None else Phase.SUSPENDED, attempts=(attempt,))
        jobs.append(summary(f"job-{number}", gang(1, attempt.gpus_per_worker), status=status, **MINE))
    held = [one for job in jobs if (one := held_of(job.status.attempts[0], job.uid, job.uid, "ada", 0.0)) is not None]
    as_of = BEGINS + counted_until * (NOW - BEGINS)
    if month == "2023-11":  # else it is what was used in the month before, which is over
        known = usage(held, PRICES, BEGINS, ENDS, as_of).total
        so_far = usage([replace(h, until=as_of if h.until is None else min(h.until, as_of)) for h in held], PRICES,
                       BEGINS, ENDS, as_of).total  # fmt: skip
        counted = spent(so_far.gpu_hours, so_far.cost, as_of, ada=Spent(gpu_hours=so_far.gpu_hours, money=known.cost))
    else:
        counted = spent(1e6, 1e6, BEGINS - 1.0, month)
    quota = ProjectQuota(gpu_hours_per_month=1e9, money_per_month=1e9, spent=counted)
    budgets = MonthBudgets(seen(quota, *jobs))
    account = budgets._account(summary("new", gang(), **MINE))
    assert account is not None
    whole = usage(held, PRICES, BEGINS, ENDS, NOW).total
    assert account.gpu_hours[-1].used == pytest.approx(whole.gpu_hours, rel=1e-6, abs=1e-6)
    assert account.money[-1].used == pytest.approx(whole.cost, rel=1e-6, abs=1e-6)
    living = [h for h in held if h.until is None]
    assert account.gpu_hours[-1].per_hour == sum(h.workers * h.gpus_per_worker for h in living)


@settings(max_examples=40, deadline=None)
@given(st.lists(lives, max_size=6), st.floats(0, 1), st.sampled_from(["2023-11", "2023-11", "2023-10"]))
def test_every_hour_is_counted_once_whenever_the_api_counted(attempts: list[Attempt], at: float, month: str) -> None:
    counts_once(attempts, at, month)


# --- a whole month, with the production admission ---


def lives_through(
    budget: float, gangs: list[tuple[int, float]], api_down: bool, look: float
) -> tuple[float, list[str]]:
    """GPU-hours that were used in a month by jobs (GPUs, hours of work), and the jobs that are unfinished at its end.

    Every pass is admission's; a gang that is granted runs at once, and one that is told to stop is gone when the next
    pass comes. The API counts at each pass, or only at first.
    """
    left = {f"job-{index}": hours for index, (_, hours) in enumerate(gangs)}
    shapes = {f"job-{index}": gang(1, gpus) for index, (gpus, _) in enumerate(gangs)}
    attempts: dict[str, list[Attempt]] = {uid: [] for uid in left}
    phases: dict[str, tuple[Phase, str]] = dict.fromkeys(left, (Phase.QUEUED, Code.CREATED))
    now, counted = BEGINS + 1.0, spent(0.0, as_of=BEGINS)
    while now < BEGINS + 200 * HOUR:
        jobs = []
        for uid, (phase, code) in phases.items():
            nodes = (uid,) if phase is Phase.RUNNING else ()
            held = GangStatus(wanted=1, nodes=nodes, pool="pool-a", capacity="on-demand", instance_type="big")
            status = JobStatus(
                phase=phase, code=code, attempts=tuple(attempts[uid]), gang=held if nodes else GangStatus()
            )
            jobs.append(summary(uid, shapes[uid], age=now - BEGINS, status=status, **MINE))
        quota = ProjectQuota(gpu_hours_per_month=budget, spent=counted)
        machines = "".join(chr(97 + index) for index in range(len(left)))
        found = admit(replace(seen(quota, *jobs, now=now, nodes=machines)), ())
        for uid, (phase, _) in list(phases.items()):
            told_ = found.budgets.get(uid)
            if phase is Phase.RUNNING and told_ is not None and told_.code == Code.MONTH_LIMIT:
                attempts[uid][-1] = attempts[uid][-1].model_copy(update={"ended_at": now})
                phases[uid] = (Phase.SUSPENDED, Code.MONTH_LIMIT)
            elif phase is Phase.SUSPENDED and told_ is not None and told_.code == Code.AWAITING_ADMISSION:
                phases[uid] = (Phase.QUEUED, Code.AWAITING_ADMISSION)
            elif phase is Phase.QUEUED and any(each.uid == uid for each in found.entries):
                gpus = shapes[uid].gang.gpus_per_node
                attempts[uid].append(
                    Attempt(number=1, created_at=now, workers=1, gpus_per_worker=gpus, instance_type="big")
                )
                phases[uid] = (Phase.RUNNING, Code.TRAINING)
        step = min(look, found.look_after or look)
        for uid, (phase, _) in list(phases.items()):
            if phase is Phase.RUNNING:
                left[uid] -= step / HOUR
                if left[uid] <= 0:
                    attempts[uid][-1] = attempts[uid][-1].model_copy(update={"ended_at": now + step})
                    phases[uid] = (Phase.SUCCEEDED, Code.FINISHED)
        now += step
        held_now = [h for uid, each in attempts.items() for a in each if (h := held_of(a, uid, uid, "ada", 0.0))]
        if not api_down:
            total = usage(held_now, PRICES, BEGINS, ENDS, now).total
            counted = spent(total.gpu_hours, as_of=now)
    used = usage(held_now, PRICES, BEGINS, ENDS, now).total.gpu_hours
    return used, [uid for uid, (phase, _) in phases.items() if phase is not Phase.SUCCEEDED]


def keeps_its_budget(budget: float, gangs: list[tuple[int, float]], api_down: bool) -> None:
    used, unfinished = lives_through(budget, gangs, api_down, look=HOUR)
    per_hour = sum(gpus for gpus, _ in gangs)
    assert used <= budget + per_hour * (month_budgets.LOOK_SECONDS_MIN + 1.0) / HOUR, "more than the budget was used"
    asked = sum(gpus * hours for gpus, hours in gangs)
    if asked + per_hour * (1.0 + month_budgets.RUNWAY_SECONDS / HOUR) < budget:
        assert not unfinished, "a job waits although there is a budget"
    elif asked > budget:
        most = max(gpus for gpus, _ in gangs)
        assert used >= min(budget, asked) - most - per_hour * month_budgets.RUNWAY_SECONDS / HOUR, "a budget idles"


@settings(max_examples=10, deadline=None)
@given(
    st.floats(0, 300),
    st.lists(st.tuples(st.sampled_from([1, 4, 8]), st.floats(0.5, 40)), min_size=1, max_size=4),
    st.booleans(),
)
def test_no_month_uses_more_than_its_budget_and_none_idles(
    budget: float, gangs: list[tuple[int, float]], api_down: bool
) -> None:
    keeps_its_budget(budget, gangs, api_down)


# --- planted mistakes, each caught by what is asked above ---

WORK = [(8, 20.0), (8, 20.0), (4, 30.0)]
LIFE = [Attempt(number=1, created_at=BEGINS + 10 * HOUR, workers=2, gpus_per_worker=8, instance_type="big")]


def everything() -> None:
    for budget in (0.0, 37.3, 200.0, 2000.0):
        for api_down in (False, True):
            keeps_its_budget(budget, WORK, api_down)
    for month in ("2023-11", "2023-10"):
        counts_once(LIFE, 0.5, month)
    test_what_is_left_must_pay_for_a_quarter_of_an_hour_of_what_begins_and_what_runs()


MISTAKES: dict[str, tuple[str, Callable[..., Any]]] = {
    "what the API counted is counted again": ("_since", lambda self, spent_: self._begins),
    "what ran since the API counted is forgotten": ("_count", lambda self, job: self._account(job)),
    "what was used in the month before counts": ("_spent", lambda self, spent_: spent_),
    "what begins in the same pass is not counted": ("hold", lambda self, *what: None),
    "nobody is told to stop": ("waits", lambda self: {}),
    "a gang begins with nothing left": ("wait", lambda self, job: None),
    "it is looked again too late": ("look_after", lambda self: None),
}


def test_without_a_mistake_all_is_well() -> None:
    everything()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_caught(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = MISTAKES[mistake]
    monkeypatch.setattr(MonthBudgets, name, wrong)
    with pytest.raises(AssertionError):
        everything()
