"""The timeline: what the job was doing when, from its events and attempts."""

from __future__ import annotations

from typing import Any

from muster.charts.goodput import parts
from muster.charts.timeline import COMMITS_MAX, StateSpan, timeline
from muster.words.status import Attempt
from muster.words.times import rfc3339

COST: dict[str, Any] = {"cost": 0.0}


def attempt(number: int, begin: float, end: float | None = None, first: float | None = None, **more: Any) -> Any:
    made = Attempt(number=number, created_at=begin, ended_at=end, first_step_at=first, **more)
    return made.model_dump(mode="json", by_alias=True)


def event(at: float, kind: str, message: str = "", **data: Any) -> dict[str, Any]:
    return {"id": 0, "at": rfc3339(at), "type": kind, "message": message, "data": data, "attempt": None}


def states(spans: tuple[StateSpan, ...]) -> list[tuple[str, float, float]]:
    return [(span.state, span.x, span.width) for span in spans]


def test_a_failure_and_its_recovery_are_on_it() -> None:
    story = timeline(
        1_000.0,
        1_100.0,
        [
            attempt(1, 1_010.0, 1_050.0, 1_020.0, outcome="failed", cause="hang", message="rank 3 is silent"),
            attempt(2, 1_060.0, None, 1_070.0),
        ],
        [COST, COST],
        [
            event(1_000.0, "job.created"),
            event(1_010.0, "job.starting"),
            event(1_020.0, "job.running"),
            event(1_030.0, "checkpoint.committed", step=40),
            event(1_040.0, "job.suspected", "no step for 20 s"),
            event(1_050.0, "job.restarting", "attempt 1 failed"),
            event(1_060.0, "job.starting"),
            event(1_070.0, "job.running"),
        ],
    )
    assert states(story.spans) == [
        ("queued", 0, 10),
        ("starting", 10, 10),
        ("running", 20, 20),
        ("stalled", 40, 10),
        ("restarting", 50, 10),
        ("starting", 60, 10),
        ("running", 70, 30),
    ]
    assert story.spans[4].words == "Restarting for 10s: attempt 1 failed"
    newest, oldest = story.lanes
    assert (newest.attempt["number"], oldest.attempt["number"]) == (2, 1)
    assert states(oldest.spans) == [("starting", 10, 10), ("running", 20, 20), ("stalled", 40, 10)]
    assert [(mark.x, mark.words) for mark in oldest.commits] == [(30, "Checkpoint of step 40")]
    assert (oldest.end, newest.lives, newest.commits) == (50, True, ())


def test_an_attempt_is_starting_until_its_first_step_on_both_lanes() -> None:
    """The phase is Running as soon as its processes are; one that dies reading its data has never trained."""
    events = [event(0.0, "job.starting"), event(20.0, "job.running"), event(60.0, "job.restarting")]
    story = timeline(0.0, 100.0, [attempt(1, 5.0, 60.0, None, outcome="failed")], [COST], events)
    assert states(story.spans) == [("starting", 0, 60), ("restarting", 60, 40)]
    assert states(story.lanes[0].spans) == [("starting", 5, 55)]
    story = timeline(0.0, 100.0, [attempt(1, 5.0, None, 43.0)], [COST], events[:2])
    assert states(story.spans) == [("starting", 0, 43), ("running", 43, 57)]
    assert states(story.lanes[0].spans) == [("starting", 5, 38), ("running", 43, 57)]


def test_what_looked_stalled_and_commits_goes_on() -> None:
    told = [event(0.0, "job.created"), event(10.0, "job.running"), event(20.0, "job.suspected")]
    story = timeline(0.0, 100.0, [], [], [*told, event(40.0, "checkpoint.committed", step=1)])
    assert [span.state for span in story.spans] == ["queued", "running", "stalled", "running"]


def test_an_ended_job_has_nothing_after_its_end_and_a_short_state_can_be_seen() -> None:
    story = timeline(0.0, 10_000.0, [], [], [event(0.1, "job.running"), event(9_999.9, "job.succeeded")])
    assert [span.state for span in story.spans] == ["queued", "running"]
    assert all(span.width >= 0.35 and span.x + span.width <= 100 for span in story.spans)


def test_thousands_of_commits_are_a_few_ticks_and_times_are_round() -> None:
    commits = [event(10.0 + number, "checkpoint.committed", step=number) for number in range(5_000)]
    story = timeline(0.0, 6_000.0, [attempt(1, 5.0, None, 6.0)], [COST], commits)
    assert len(story.lanes[0].commits) <= COMMITS_MAX
    assert len(story.lanes[0].commit_steps) == 5_000
    assert [tick.words for tick in story.ticks] == ["0s", "30m00s", "1h00m", "1h30m"]


def test_a_job_of_half_a_year_has_few_ticks() -> None:
    assert 2 <= len(timeline(0.0, 180 * 86_400.0, [], [], []).ticks) <= 7


def test_shares_of_the_time_add_up() -> None:
    found = parts({"productive": 1.0, "queue": 1.0, "starting": 1.0, "draining": 0.0, "teleported": 0.001})
    assert [part.state for part in found] == ["productive", "starting", "queue", "teleported"]
    assert sum(part.tenths for part in found) == 1_000
    assert found[-1].words == "Teleported"
    assert parts({}) == ()
