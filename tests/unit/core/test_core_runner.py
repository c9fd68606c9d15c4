"""One pass of the operator, the queue behind it, and the asyncio shell around it: over a world of one dictionary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.polling import WAIT_SECONDS_MAX
from tests.unit.core.seen import (
    UID,
    crew,
    exited,
    fleet,
    node,
    observed,
    running,
    starting,
    summary,
    with_status,
    worker,
)

from muster.operator import runner as runner_module
from muster.operator.core.codes import Code
from muster.operator.core.decision import Action, JobDecision
from muster.operator.core.fleet import Fleet
from muster.operator.core.observed import NodeReservation, ObservedJob
from muster.operator.core.work_queue import WorkQueue
from muster.operator.pacing import RESYNC_RESTING, RETRY_SECONDS, RETRY_SECONDS_MAX
from muster.operator.runner import JobRunner, RunnerListener, serve
from muster.operator.world import FLEET, ReservationSet, VersionConflict
from muster.words.status import JobStatus, Phase

Step = tuple[str, Any]


class Shelf:
    """A world that holds one job, remembers every call, and raises what it is told to."""

    def __init__(self, seen: ObservedJob | None, stale: ObservedJob | None = None) -> None:
        self.seen, self.stale = seen, stale
        self.calls: list[Step] = []
        self.errors: dict[str, list[Exception]] = {}
        self.held: tuple[NodeReservation, ...] = ()
        self.version = 1
        self.applied = asyncio.Event()

    def _call(self, name: str, argument: Any = None) -> None:
        self.calls.append((name, argument))
        if self.errors.get(name):
            raise self.errors[name].pop(0)

    def now(self) -> float:
        return self.seen.now if self.seen else 0.0

    async def watch(self) -> AsyncIterator[str]:
        yield UID
        await asyncio.Event().wait()

    async def jobs(self) -> tuple[str, ...]:
        self._call("jobs")
        return (UID,) if self.seen else ()

    async def observe(self, uid: str, fresh: bool = False) -> ObservedJob | None:
        self._call("observe", fresh)
        if self.stale is not None and not fresh:
            return replace(self.stale, fresh=False)
        return replace(self.seen, fresh=fresh, reservations=self.held) if self.seen else None

    async def write_status(self, uid: str, status: JobStatus, version: str) -> None:
        self._call("write_status", status.phase)
        assert self.seen is not None
        self.seen = with_status(self.seen, status)

    async def apply(self, uid: str, action: Action) -> None:
        self._call("apply", action)
        self.applied.set()

    async def fleet(self, fresh: bool = False) -> Fleet:
        self._call("fleet", fresh)
        jobs = [summary(UID, self.seen.spec, status=self.seen.status)] if self.seen else []
        return fleet([node("a"), node("b")], jobs, fresh=fresh)

    async def reservations(self) -> ReservationSet:
        self._call("reservations")
        return ReservationSet(self.held, str(self.version))

    async def write_reservations(self, entries: tuple[NodeReservation, ...], version: str) -> None:
        self._call("write_reservations", entries)
        if version != str(self.version):
            raise VersionConflict("reservations")
        self.held, self.version = entries, self.version + 1

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class Notes(RunnerListener):
    def __init__(self) -> None:
        self.written: list[JobDecision] = []
        self.errors: list[str] = []

    def wrote(self, seen: ObservedJob, decision: JobDecision) -> None:
        self.written.append(decision)

    def failed(self, key: str, error: Exception, retry_seconds: float) -> None:
        self.errors.append(f"{key}: {error}")


def drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The runner awaits only the world, and this one never waits: no event loop is needed."""
    with pytest.raises(StopIteration) as end:
        coroutine.send(None)
    return end.value.value


def make(seen: ObservedJob | None, stale: ObservedJob | None = None) -> tuple[Shelf, Notes, JobRunner]:
    world, notes = Shelf(seen, stale), Notes()
    return world, notes, JobRunner(world, notes)


def waiting() -> ObservedJob:
    """In the queue, after a pause that is over."""
    return observed(observed().status.model_copy(update={"code": Code.BACKING_OFF.value}))


def test_words_that_the_next_moment_makes_moot_are_not_written_at_once() -> None:
    """That a job was made, how many of its workers are up: it mostly runs or is over before anybody could read."""
    up = with_status(starting(), starting().status, workers=(worker(0), worker(1)))
    ending = with_status(running(), running().status, workers=(crew()[0], exited(1, 0)))
    for seen in (observed(), up, ending):
        world, notes, runner = make(seen)
        runner._wrote = {} if seen.status.phase is Phase.QUEUED else {UID: 0.0}
        runner.enqueue(UID, 0.5)
        drive(runner.turn(0.5))
        assert notes.written == []
        runner.enqueue(UID, 5.5)
        while not notes.written:
            assert drive(runner.turn(5.5))
        assert "write_status" in world.names()


def test_a_pass_writes_or_acts_but_never_both() -> None:
    world, notes, runner = make(waiting())
    runner.enqueue(UID, 0.0)
    assert drive(runner.turn(0.0))
    assert world.names() == ["observe", "write_status"]
    assert len(notes.written) == 1
    world, notes, runner = make(starting())
    runner.enqueue(UID, 0.0)
    drive(runner.turn(0.0))
    assert world.names() == ["observe", "apply", "apply"]
    assert notes.written == []


def test_the_queue_is_served_and_the_job_starts() -> None:
    world, _, runner = make(observed())
    drive(runner.resync(0.0))
    while drive(runner.turn(0.0)):
        pass
    assert world.seen is not None
    assert (world.seen.status.phase, world.seen.status.gang.nodes) == (Phase.STARTING, ("a", "b"))
    assert world.held[0].nodes == ("a", "b")
    assert ("fleet", True) in world.calls, "nothing is granted on a stale view"


def test_who_begins_goes_on_before_others_begin() -> None:
    """Of many jobs that are admitted at once the first then trains while the last still waits for its turn."""
    world, _, runner = make(observed())
    drive(runner.resync(0.0))
    while world.seen is not None and world.seen.status.phase is not Phase.STARTING:
        assert drive(runner.turn(0.0))
    runner.queue.enqueue("another", -1.0)  # due for longer
    keys = iter(lambda: runner.queue.take(0.0), None)
    assert [key for key in keys if key != FLEET] == [UID, "another"]


def test_nodes_are_given_afresh_and_taken_back_by_any_read() -> None:
    world, _, runner = make(observed())
    drive(runner.admission(0.0))
    assert world.calls[-3:-1] == [("fleet", False), ("fleet", True)]
    (held,) = world.held
    gave_back = observed().status.model_copy(update={"reservation": held.number + 1, "phase": Phase.SUCCEEDED})
    world, _, runner = make(observed(gave_back))
    world.held = (held,)
    drive(runner.admission(1.0))
    assert (world.calls[1:], world.held) == ([("fleet", False), ("write_reservations", ())], ())
    world, _, runner = make(None)
    world.held = (held,)
    drive(runner.admission(2.0))
    assert world.calls[1:3] == [("fleet", False), ("fleet", True)], "that a job is not there any more is absence"


def test_absence_is_looked_for_again_in_a_fresh_read() -> None:
    """A cached read shows no worker; the fresh one shows that they are there, so nothing is started."""
    seen = starting()
    stopping = with_status(seen, seen.status.model_copy(update={"phase": Phase.RESTARTING}))
    there = replace(stopping, workers=(worker(0), worker(1)))
    world, notes, runner = make(there, stale=stopping)
    runner.enqueue(UID, 0.0)
    drive(runner.turn(0.0))
    assert [call for call in world.calls if call[0] == "observe"] == [("observe", False), ("observe", True)]
    assert notes.written == []


def test_a_conflict_is_looked_at_again_freshly_and_counts_nothing() -> None:
    world, notes, runner = make(waiting())
    world.errors["write_status"] = [VersionConflict("somebody was faster")]
    runner.enqueue(UID, 0.0)
    drive(runner.turn(0.0))
    assert notes.written == []
    drive(runner.turn(0.0))
    assert [call for call in world.calls if call[0] == "observe"] == [("observe", False), ("observe", True)]
    assert len(notes.written) == 1
    assert notes.errors == []


def test_an_error_is_told_and_the_job_is_tried_again_later() -> None:
    world, notes, runner = make(starting())
    world.errors["apply"] = [OSError("503")] * 3
    runner.enqueue(UID, 0.0)
    now = 0.0
    for attempt in range(3):
        assert drive(runner.turn(now))
        assert not drive(runner.turn(now)), "not at once"
        runner.enqueue(UID, now)
        assert not drive(runner.turn(now)), "not on news either"
        now += RETRY_SECONDS * 2**attempt
    drive(runner.turn(now))
    assert notes.errors == [f"{UID}: 503"] * 3
    assert world.names().count("apply") == 5


def test_a_decision_that_audit_refuses_is_not_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    world, notes, runner = make(starting())
    monkeypatch.setattr(runner_module, "audit", lambda seen, decision: ("this is wrong",))
    runner.enqueue(UID, 0.0)
    drive(runner.turn(0.0))
    assert world.names() == ["observe"]
    assert notes.errors == [f"{UID}: this is wrong"]


def test_a_job_that_is_gone_is_believed_only_freshly() -> None:
    world, _, runner = make(None)
    runner.enqueue(UID, 0.0)
    drive(runner.turn(0.0))
    assert world.calls == [("observe", False), ("observe", True)]


async def test_serve_runs_until_it_is_cancelled() -> None:
    world, _, runner = make(observed())
    task = asyncio.create_task(serve(runner, workers=3))
    async with asyncio.timeout(WAIT_SECONDS_MAX):
        await world.applied.wait()
    assert world.seen is not None
    assert world.seen.status.phase is Phase.STARTING
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- the queue ---


def test_a_key_is_in_one_pair_of_hands() -> None:
    queue = WorkQueue()
    queue.enqueue("x", 0.0)
    assert queue.take(0.0) == "x"
    queue.enqueue("x", 0.0)
    assert queue.take(5.0) is None
    queue.done("x", 5.0, None)
    assert queue.take(5.0) == "x", "news that came meanwhile is not lost"


def test_it_wakes_when_asked_or_when_there_is_news() -> None:
    queue = WorkQueue()
    queue.enqueue("x", 0.0)
    queue.take(0.0)
    queue.done("x", 0.0, 30.0)
    assert (queue.take(29.9), queue.next_at()) == (None, 30.0)
    queue.enqueue("x", 10.0)
    assert (queue.next_at(), queue.take(10.0)) == (10.0, "x")
    queue.done("x", 10.0, None)
    assert (queue.take(1e9), len(queue)) == (None, 0)


def test_retries_slow_down_to_a_limit() -> None:
    queue, now = WorkQueue(), 0.0
    queue.enqueue("x", now)
    pauses = []
    for _ in range(12):
        assert queue.take(now) == "x"
        pauses.append(queue.failed("x", now))
        now += pauses[-1]
    assert pauses[:3] == [RETRY_SECONDS, 2 * RETRY_SECONDS, 4 * RETRY_SECONDS]
    assert pauses[-1] == RETRY_SECONDS_MAX


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("notice", "take", "done", "failed", "prefer")), st.sampled_from("abc"), st.floats(0, 50)
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_no_key_is_ever_lost(operations: list[tuple[str, str, float]]) -> None:
    """Every key that was noticed since it was last seen to comes up again, once, whatever happens."""
    queue, now = WorkQueue(), 0.0
    hand: list[str] = []
    owed: set[str] = set()
    for what, key, seconds in operations:
        now += seconds
        if what == "notice":
            queue.enqueue(key, now)
            owed.add(key)
        elif what == "prefer":
            queue.prefer(key, seconds > 25)
        elif what == "take" and (taken := queue.take(now)) is not None:
            assert taken not in hand
            hand.append(taken)
            owed.discard(taken)
        elif what in ("done", "failed") and hand:
            key = hand.pop()
            if what == "failed":
                queue.failed(key, now)
                owed.add(key)
            else:
                queue.done(key, now, None)
    for key in hand:
        queue.done(key, now, None)
    due = set()
    while (taken := queue.take(now + 1e6)) is not None:
        assert taken not in due
        due.add(taken)
        queue.done(taken, now, None)
    assert owed <= due


def test_admission_is_a_key_like_any_other() -> None:
    world, notes, runner = make(observed())
    world.errors["reservations"] = [OSError("down")]
    runner.enqueue(FLEET, 0.0)
    drive(runner.turn(0.0))
    assert notes.errors == [f"{FLEET}: down"]
    drive(runner.turn(RETRY_SECONDS))
    assert world.held


def test_what_keeps_failing_is_said_in_the_status_and_a_cancel_is_still_obeyed() -> None:
    world, _, runner = make(starting())
    world.errors["apply"] = [OSError("No space left on device")] * 4
    runner.enqueue(UID, 0.0)
    now = 0.0
    for _ in range(4):
        assert drive(runner.turn(now))
        now = runner.queue.next_at() or now
    assert world.seen is not None
    assert "can't be created: No space left on device" in world.seen.status.because
    assert sum(call[0] == "write_status" for call in world.calls) == 1, "said once"
    world.errors["apply"] = [OSError("No space left on device")] * 40
    world.seen = replace(world.seen, spec=world.seen.spec.model_copy(update={"cancel": True}))
    for _ in range(8):
        drive(runner.turn(now))
        now = runner.queue.next_at() or now
    assert world.seen.status.phase is Phase.CANCELLED


def test_jobs_that_rest_are_looked_at_in_one_of_many_resyncs() -> None:
    seen = observed(JobStatus(phase=Phase.SUSPENDED, code="Suspended", because="asked for"))
    world, _, runner = make(replace(seen, spec=seen.spec.model_copy(update={"suspend": True})))
    looks = []
    for now in range(3 * RESYNC_RESTING):
        before = world.names().count("observe")
        drive(runner.resync(float(now)))
        while drive(runner.turn(float(now))):
            pass
        looks.append(world.names().count("observe") - before)
    assert looks[0] == 1, "at first everything is looked at"
    assert 2 <= sum(looks[1:]) <= 3, "and then each once in so many"
    runner.enqueue(UID, 1e3)
    before = world.names().count("observe")
    while drive(runner.turn(1e3)):
        pass
    assert world.names().count("observe") == before + 1, "an event is an event"
