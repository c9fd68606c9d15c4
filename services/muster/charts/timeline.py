"""A job's life as lanes of a picture: what it was doing when, attempt by attempt, with its commits and its ends. Pure.

Places are percent of the time from the job's creation to its end, or to now.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.words.status import LIVING
from muster.words.text import duration
from muster.words.times import epoch_seconds

# The state that each event begins; all others begin none.
BEGINS: Mapping[str, str] = {
    "job.created": "queued",
    "job.imported": "queued",
    "job.queued": "queued",
    "job.starting": "starting",
    "job.running": "running",
    "job.suspected": "stalled",
    "job.restarting": "restarting",
    "job.stopping": "stopping",
    "job.suspended": "suspended",
    "job.succeeded": "",
    "job.failed": "",
    "job.cancelled": "",
    "job.deleted": "",
}
COMMITTED = "checkpoint.committed"
# The words of the job's phase, so that its badge, its timeline and its account of time name one thing by one word.
WORDS: Mapping[str, str] = {
    "queued": "Queued",
    "starting": "Starting",
    "running": "Running",
    "stalled": "Stalled",
    "restarting": "Restarting",
    "stopping": "Stopping",
    "suspended": "Suspended",
}
COMMITS_MAX = 120  # of a lane: more ticks than that are a grey bar
_TICKS_MAX = 6
_SHORTEST = 0.35  # percent: what is shorter would not be seen


@dataclass(frozen=True)
class StateSpan:
    """A state from one moment to the next."""

    state: str
    x: float
    width: float
    words: str


@dataclass(frozen=True)
class TimelineMark:
    """Something that happened at a moment."""

    x: float
    words: str


@dataclass(frozen=True)
class AttemptLane:
    """An attempt: its document, what it was doing, what it committed and what it cost."""

    attempt: Mapping[str, Any]
    spans: tuple[StateSpan, ...]
    commits: tuple[TimelineMark, ...]
    commit_steps: tuple[int, ...]
    seconds: float
    cost: Mapping[str, Any]

    @property
    def lives(self) -> bool:
        return self.attempt["outcome"] in LIVING

    @property
    def end(self) -> float:
        return self.spans[-1].x + self.spans[-1].width if self.spans else 0.0


@dataclass(frozen=True)
class JobTimeline:
    """The job's own lane, those of its attempts (newest first) and the axis below them."""

    spans: tuple[StateSpan, ...]
    lanes: tuple[AttemptLane, ...]
    ticks: tuple[TimelineMark, ...]
    seconds: float
    states: tuple[str, ...]


def timeline(
    created_at: float,
    end: float,
    attempts: Sequence[Mapping[str, Any]],
    costs: Sequence[Mapping[str, Any]],
    events: Iterable[Mapping[str, Any]],
) -> JobTimeline:
    """Return the timeline of `attempts` and `events` as the API shows them, oldest first. Times are in seconds since
    the epoch."""
    scale = _TimeScale(created_at, max(end, created_at + 1.0))
    happened = [(epoch_seconds(event["at"]), event) for event in events]
    states = _begun(_states(created_at, scale.end, happened), attempts)
    commits = [
        (epoch_seconds(event["data"].get("happenedAt") or at), int(event["data"].get("step") or 0))
        for at, event in happened
        if event["type"] == COMMITTED
    ]
    lanes = tuple(_lane(attempt, cost, scale, states, commits) for attempt, cost in zip(attempts, costs, strict=True))
    spans = tuple(scale.span(*state) for state in states)
    names = {span.state for span in spans} | {span.state for lane in lanes for span in lane.spans}
    return JobTimeline(
        spans, tuple(reversed(lanes)), _ticks(scale), scale.end - created_at, tuple(s for s in WORDS if s in names)
    )


@dataclass(frozen=True)
class _TimeScale:
    begin: float
    end: float

    def x(self, at: float) -> float:
        return round(100 * min(1.0, max(0.0, (at - self.begin) / (self.end - self.begin))), 3)

    def span(self, state: str, begin: float, end: float, reason: str = "") -> StateSpan:
        x = self.x(begin)
        width = max(_SHORTEST, self.x(end) - x)
        words = f"{WORDS[state]} for {duration(end - begin)}" + (f": {reason}" if reason else "")
        return StateSpan(state, min(x, 100 - width), round(width, 3), words)


State = tuple[str, float, float, str]  # its name, when it began and ended, why


def _states(created_at: float, end: float, events: Sequence[tuple[float, Mapping[str, Any]]]) -> list[State]:
    """Return the job's states from its creation on. A checkpoint shows that an apparent stall had ended."""
    states: list[State] = []
    name, since, reason = "queued", created_at, ""
    for at, event in events:
        begins = BEGINS.get(event["type"])
        if event["type"] == COMMITTED and name == "stalled":
            begins = "running"
        if begins is None:
            continue
        if begins == name:
            reason = event["message"] or reason
            continue
        if name and at > since:
            states.append((name, since, at, reason))
        name, since, reason = begins, max(at, since), event["message"]
    if name and end > since:
        states.append((name, since, end, reason))
    return states


def _begun(states: Sequence[State], attempts: Sequence[Mapping[str, Any]]) -> list[State]:
    """The states in which an attempt is starting until its first step, as its own lane says, and not only until its
    processes run."""
    for attempt in attempts:
        first = attempt["firstStepAt"] or attempt["endedAt"]
        begin, until = epoch_seconds(attempt["createdAt"]), math.inf if first is None else epoch_seconds(first)
        states = [part for state in states for part in _split(state, begin, until)]
    joined: list[State] = []
    for name, since, end, reason in states:
        if joined and joined[-1][0] == name:
            joined[-1] = (name, joined[-1][1], end, reason)
        else:
            joined.append((name, since, end, reason))
    return joined


def _split(state: State, begin: float, until: float) -> list[State]:
    """The state, of which what runs between these moments is starting."""
    name, since, end, reason = state
    if name != "running" or since >= until or end <= begin:
        return [state]
    parts = [
        ("running", since, begin, reason),
        ("starting", max(since, begin), min(end, until), reason),
        ("running", until, end, reason),
    ]
    return [part for part in parts if part[2] > part[1]]


def _lane(
    attempt: Mapping[str, Any],
    cost: Mapping[str, Any],
    scale: _TimeScale,
    states: Sequence[State],
    commits: Sequence[tuple[float, int]],
) -> AttemptLane:
    begin = epoch_seconds(attempt["createdAt"])
    end = epoch_seconds(attempt["endedAt"]) if attempt["endedAt"] is not None else scale.end
    first = epoch_seconds(attempt["firstStepAt"]) if attempt["firstStepAt"] is not None else end
    early = "queued" if attempt["outcome"] == "waiting" else "starting"
    spans = [scale.span(early, begin, min(first, end))] if first > begin else []
    spans += [scale.span(*state) for state in _training(first, end, states)]
    own = [(at, step) for at, step in commits if begin <= at <= end]
    ticks = own[:: max(1, -(-len(own) // COMMITS_MAX))]
    marks = tuple(TimelineMark(scale.x(at), f"Checkpoint of step {step:,}") for at, step in ticks)
    return AttemptLane(attempt, tuple(spans), marks, tuple(step for _, step in own), end - begin, cost)


def _training(first: float, end: float, states: Sequence[State]) -> list[State]:
    """Training from the first step to the end, with what was stalled of it."""
    states_of_training: list[State] = []
    at = first
    for name, since, until, reason in states:
        if name != "stalled" or until <= first or since >= end:
            continue
        if since > at:
            states_of_training.append(("running", at, since, ""))
        at = min(until, end)
        states_of_training.append(("stalled", max(since, first), at, reason))
    if end > at:
        states_of_training.append(("running", at, end, ""))
    return states_of_training


_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)


def _ticks(scale: _TimeScale) -> tuple[TimelineMark, ...]:
    """Round times since the creation; the picture says no date, which would be of one time zone alone."""
    whole = scale.end - scale.begin
    step: float = next((step for step in _STEPS if whole / step <= _TICKS_MAX), 0)
    if not step:
        days = -(-whole // (86_400 * _TICKS_MAX))
        step = days * 86_400.0
    return tuple(
        TimelineMark(scale.x(scale.begin + index * step), duration(index * step))
        for index in range(int(whole // step) + 1)
    )
