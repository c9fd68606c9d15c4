"""Is the gang hung, and who is it? From heartbeats alone; the stronger the evidence, the sooner it is believed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.seen import NODES, NOW, beat, running, starting, with_status, worker, write
from tests.unit.core.test_core_decide import check

from muster.operator.core.codes import Code
from muster.operator.core.observed import ObservedJob
from muster.operator.core.stalls import alarming
from muster.words.signals import Heartbeat, TrainerPhase
from muster.words.status import Failure, Phase

LEARNT = {"limit_seconds": 15.0, "doing": "backward", "moves": 3}


def gang(now: float, *ranks: dict[str, Any]) -> ObservedJob:
    """The running gang with these heartbeats, on two workers; each is fresh and not idle unless it says otherwise."""
    beats: list[list[Heartbeat]] = [[], []]
    for rank, facts in enumerate(ranks):
        told = LEARNT | facts
        silent, idle = told.pop("silent", 0.0), told.pop("idle", 0.0)
        at = now - silent
        beats[2 * rank // len(ranks)].append(
            beat(1, told.pop("step", 5), at, rank=rank, **{"progressed_at": min(at, now - idle)} | told)
        )
    workers = tuple(worker(index, heartbeats=tuple(of_worker)) for index, of_worker in enumerate(beats))
    return replace(running(), now=now, workers=workers)


def judged(seconds: float, seen_at: Any, start: float = NOW + 1_000.0, every: float = 0.5) -> tuple[ObservedJob, float]:
    """What comes of looking every so many seconds; seen_at(elapsed) gives the facts of each rank. Returns the state at
    the end, or when the gang was told to stop, and the seconds until then.
    """
    seen, elapsed = running(), 0.0
    while elapsed <= seconds:
        now = gang(start + elapsed, *seen_at(elapsed))
        seen = write(replace(now, status=seen.status))
        if seen.status.phase is not Phase.RUNNING:
            break
        elapsed += every
    return seen, elapsed


def failure(seen: ObservedJob) -> Failure:
    assert (seen.status.phase, seen.status.code) == (Phase.RESTARTING, Code.HANG), seen.status.because
    assert seen.status.last_failure is not None
    return seen.status.last_failure


def test_a_stopped_rank_is_named_within_seconds() -> None:
    seen, seconds = judged(60.0, lambda t: ({"idle": t}, {"silent": t, "idle": t, "stopped": t > 2.0}))
    found = failure(seen)
    assert seconds <= 5.0
    assert (found.rank, found.worker, found.node) == (1, 1, NODES[1])
    assert found.message == "rank 1 (worker 1 on b) is stopped (SIGSTOP or a debugger) in backward of step 6"
    assert "rank 1 in backward of step 6: stopped" in found.log_tail


def test_a_profiler_may_hold_a_rank_for_a_moment() -> None:
    seen, _ = judged(60.0, lambda t: ({}, {"silent": min(t, 1.5), "stopped": t <= 1.5}))
    assert seen.status.code == Code.TRAINING


def test_a_machine_that_is_paused_goes_on() -> None:
    """All at once, and for less than a minute: nobody is at fault, and nobody is restarted."""
    seen, _ = judged(59.0, lambda t: ({"silent": t, "idle": t, "stopped": True},) * 2)
    assert seen.status.phase is Phase.RUNNING


def test_a_rank_that_starts_may_be_stopped_too() -> None:
    seen = starting()
    held = beat(1, 0, phase=TrainerPhase.INIT, rank=1, stopped=True)
    seen = replace(seen, workers=(worker(0), worker(1, heartbeats=(held,))))
    seen = write(write(seen))
    seen = write(replace(seen, now=NOW + 2.5))
    assert failure(seen).rank == 1


def test_a_mute_rank_beside_one_that_beats() -> None:
    seen, seconds = judged(60.0, lambda t: ({"idle": t}, {"idle": t, "silent": t}, {"idle": t}, {"idle": t}))
    found = failure(seen)
    assert seconds <= 27.0
    assert (found.rank, found.worker) == (1, 0)
    assert "gave no sign of life for" in found.message


def test_a_rank_that_is_silent_where_it_may_be_is_named_when_time_is_up() -> None:
    """Reading a checkpoint may keep the interpreter busy; half an hour of it, while the others wait, does not."""
    loads = {"phase": TrainerPhase.LOAD, "limit_seconds": None, "step": 0}

    def facts(t: float) -> tuple[dict[str, Any], ...]:
        waits = loads | {"idle": t}
        return waits, waits | {"silent": t}, waits, waits

    seen, seconds = judged(3000.0, facts, every=10.0)
    found = failure(seen)
    assert 1800.0 < seconds < 2800.0
    assert (found.rank, found.worker, found.node) == (1, 0, NODES[0])
    assert "rank 1 (worker 0 on a) is silent, in phase load after step 0" in found.message


def test_a_mute_rank_of_a_gang_that_goes_on_is_left_alone() -> None:
    """Its thread starves, or its file can't be written; it trains all the same."""
    seen, _ = judged(300.0, lambda t: ({"step": int(t)}, {"silent": t}, {"step": int(t)}, {"step": int(t)}))
    assert seen.status.code == Code.TRAINING


@pytest.mark.parametrize("seconds", [20.0, 80.0])
def test_a_paused_disk_is_no_hang(seconds: float) -> None:
    """Both ranks of worker 1 fall silent at once; the others go on, or wait for them."""
    waits = seconds < 60.0

    def facts(t: float) -> tuple[dict[str, Any], ...]:
        during = min(t, seconds) if t <= seconds else 0.0
        others = {"idle": during} if waits else {"step": int(t)}
        return others, others, {"silent": during, "idle": during}, {"silent": during, "idle": during}

    seen, _ = judged(120.0, facts)
    assert seen.status.phase is Phase.RUNNING, seen.status.because


def test_a_hang_in_a_collective_names_the_rank_that_is_behind() -> None:
    seen, seconds = judged(
        60.0,
        lambda t: (
            {"idle": t, "stands": "loop.py:7 backward" if t > 4 else ""},
            {"idle": t, "moves": 2, "doing": "forward", "stands": "objectives.py:9 sleep" if t > 4 else ""},
        ),
    )
    found = failure(seen)
    assert 7.5 <= seconds <= 9.0
    assert (found.rank, found.node) == (1, NODES[1])
    assert found.message.endswith("rank 1 (worker 1 on b) is behind, in forward of step 6")
    assert found.log_tail.splitlines() == [
        "rank 0 in backward of step 6: loop.py:7 backward",
        "rank 1 in forward of step 6: objectives.py:9 sleep",
    ]


def test_a_rank_of_which_only_an_old_word_is_known_is_not_behind() -> None:
    """In a cluster most workers are asked seldom: what they last said is of an earlier step."""
    old = {"idle": 0.5, "silent": 6.0, "step": 3}
    assert check(gang(NOW + 1_000.0, {"idle": 6.0}, old)).code == Code.TRAINING
    assert check(gang(NOW + 1_000.0, {"idle": 6.0}, {"idle": 6.0, "step": 3})).code == Code.STALLING


def test_a_hang_of_which_nobody_is_guilty() -> None:
    seen, _ = judged(60.0, lambda t: ({"idle": t}, {"idle": t}))
    found = failure(seen)
    assert (found.rank, found.node) == (None, None)
    assert found.message.startswith("no progress for ")
    assert found.log_tail == "ranks 0, 1 in backward of step 6"


@pytest.mark.parametrize(
    ("facts", "patience"),
    [
        ({"phase": TrainerPhase.EVALUATION, "limit_seconds": 60.0}, 60.0),
        ({"phase": TrainerPhase.CHECKPOINT, "limit_seconds": 300.0}, 300.0),
        ({"phase": TrainerPhase.CHECKPOINT, "limit_seconds": None}, 900.0),
        ({"doing": "data", "moves": 1}, 120.0),
        ({"limit_seconds": 600.0}, 600.0),
        ({"limit_seconds": None, "moves": 2}, 300.0),
        ({"limit_seconds": 30.0, "moves": 2}, 10.0),  # the others wait for it alone, and it could
    ],
)
def test_one_rank_in_a_slow_phase_keeps_the_others_waiting(facts: dict[str, Any], patience: float) -> None:
    """Evaluations, slow saves, slow storage, long steps and the first steps are no hangs. Rank 0 only waits."""
    for idle in (patience - 1.0, patience + 1.0):
        decision = check(gang(NOW + 2_000.0, {"idle": idle}, {"idle": idle} | facts))
        assert decision.code == (Code.TRAINING if idle < patience else Code.STALLING)
    seen, seconds = judged(1_400.0, lambda t: ({"idle": t}, {"idle": t} | facts))
    failure(seen)
    assert seconds == pytest.approx(1.5 * patience, abs=1.5)


def test_a_suspicion_ends_when_the_gang_goes_on() -> None:
    seen, _ = judged(300.0, lambda t: ({"idle": t % 20.0, "step": 5 + int(t / 20)},) * 2)
    assert seen.status.phase is Phase.RUNNING


def test_silence_of_all_takes_a_minute_and_a_half() -> None:
    seen, seconds = judged(200.0, lambda t: ({"silent": t, "idle": t},) * 2)
    assert "no sign of life from any rank" in failure(seen).message
    assert 90.0 <= seconds <= 92.0


def test_words_about_a_hang_are_not_written_twice() -> None:
    """Between suspicion and belief the status rests, however often it is looked at."""
    seen = write(gang(NOW + 1_000.0, {"idle": 16.0}, {"idle": 16.0}))
    for later in (1.0, 2.0, 3.0):
        again = gang(NOW + 1_000.0 + later, {"idle": 16.0 + later}, {"idle": 16.0 + later})
        decision = check(with_status(again, seen.status))
        assert decision.status == seen.status
        assert decision.wake_after is not None
        assert decision.wake_after <= 7.5 - later


def test_what_calls_for_a_look() -> None:
    fresh = beat(1, 5, NOW, **LEARNT)
    held = fresh.model_copy(update={"stopped": True})
    assert alarming((), NOW) == (False, False, False, False)
    assert alarming((fresh, held), NOW) == (True, False, False, False)
    assert alarming((fresh,), NOW + 15.1) == (False, True, False, False)
    assert alarming((fresh.model_copy(update={"at": NOW + 6}),), NOW + 6.0) == (False, False, True, False)
    assert alarming((fresh.model_copy(update={"at": NOW + 16}),), NOW + 16.0) == (False, False, True, True)
