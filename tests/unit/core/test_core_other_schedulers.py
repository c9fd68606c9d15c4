"""Gangs that another scheduler places: their waiting is queue time, and their nodes are named as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from tests.unit.core.seen import NOW, beat, fleet, node, observed, spec, summary, with_status, worker

from muster.api.core.events.types import events_between
from muster.operator.core.admit import admit
from muster.operator.core.codes import Code
from muster.operator.core.decide import decide
from muster.operator.core.observed import NodeReservation, ObservedJob
from muster.words.prices import Prices, bill
from muster.words.signals import TrainerPhase
from muster.words.status import LIVING, Attempt, AttemptOutcome, GangStatus, JobStatus, Phase

KUEUE = {"nodes": 2, "gpusPerNode": 8, "scheduler": {"kind": "kueue"}}


def waiting(seconds: float, **changes: Any) -> ObservedJob:
    """Admitted by nobody for so long: both pods wait at Kueue's gate."""
    open_request = NodeReservation("uid-1", 0, "team", ("kueue-0", "kueue-1"), "kueue", "on-demand", 0)
    seen = observed(spec=spec(gang=KUEUE, **changes), reservations=(open_request,))
    seen = with_status(seen, decide(seen).status)
    crew = tuple(replace(worker(i, state="starting", waiting="quota is used up"), node=f"kueue-{i}") for i in range(2))
    seen = replace(seen, workers=crew, now=NOW + 1.0)
    seen = with_status(seen, decide(seen).status)
    assert seen.status.code == Code.AWAITING_SCHEDULER
    return replace(seen, now=NOW + seconds)


def placed(seen: ObservedJob) -> ObservedJob:
    meeting = tuple(
        replace(worker(i, heartbeats=(beat(1, 0, seen.now, TrainerPhase.INIT, i),)), node=f"ip-{i}", since=seen.now)
        for i in range(2)
    )
    seen = replace(seen, workers=meeting)
    return with_status(seen, decide(seen).status)


def test_waiting_for_a_quota_is_queue_time_and_costs_nothing() -> None:
    seen = waiting(801.0)
    assert seen.status.attempts[-1].outcome == "waiting"
    assert bill(seen.status.attempts, Prices(), NOW + 801.0).node_hours == 0.0
    seen = placed(seen)
    seconds = seen.status.ledger.seconds
    assert seconds["queue"] >= 800.0
    assert seconds.get("starting", 0.0) <= 1.0
    attempt = seen.status.attempts[-1]
    assert (attempt.outcome, attempt.created_at) == ("running", NOW + 801.0)


def test_waiting_for_a_quota_is_not_activity() -> None:
    seen = waiting(801.0, activeDeadlineSeconds=300)
    assert decide(seen).status.phase is Phase.STARTING
    assert decide(placed(seen)).status.phase is Phase.STARTING


def test_nodes_are_named_as_they_are() -> None:
    seen = placed(waiting(10.0))
    assert seen.status.gang.nodes == ("ip-0", "ip-1")
    assert seen.status.attempts[-1].nodes == ("ip-0", "ip-1")


def test_what_another_scheduler_placed_is_counted_once() -> None:
    """Its pods are seen on the nodes; its entry among the reservations must not take the room a second time."""
    gang = GangStatus(wanted=1, nodes=("a",), pool="kueue", capacity="on-demand")
    theirs = summary("theirs", spec(gang=KUEUE | {"nodes": 1, "gpusPerNode": 4}))
    theirs = replace(theirs, status=JobStatus(phase=Phase.RUNNING, gang=gang, attempt=1))
    ours = summary("ours", spec(gang={"nodes": 1, "gpusPerNode": 4}))
    others = (NodeReservation("others/a", 0, "", ("a",), "", "", 4),)
    plan = admit(replace(fleet([node("a")], [theirs, ours]), others=others), ())
    assert [entry.nodes for entry in plan.entries if entry.uid == "ours"] == [("a",)]


def test_every_end_of_an_attempt_is_an_event() -> None:
    for outcome in get_args(AttemptOutcome):
        ended = JobStatus(attempt=1, attempts=(Attempt(number=1, created_at=1.0, ended_at=2.0, outcome=outcome),))
        told = [event.type for event in events_between(JobStatus(attempt=1), ended, 3.0)]
        assert (f"attempt.{outcome}" in told) == (outcome not in LIVING)
