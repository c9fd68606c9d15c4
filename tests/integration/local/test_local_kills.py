"""SIGTERM, SIGINT and SIGKILL of every process in turn: the job finishes, one gang at a time, nothing stays behind."""

from __future__ import annotations

import random
import signal
import subprocess
import time

import psutil
import pytest
from tests.integration.local.house import House
from tests.polling import WAIT_SECONDS_MAX, eventually

from muster.operator.local import processes
from muster.words.status import JobStatus, Phase

STEPS = 40
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGKILL]


def finishes(house: House, uid: str) -> JobStatus:
    status = house.becomes(uid, Phase.SUCCEEDED)
    assert house.never_two(uid)
    eventually(lambda: not processes.scan(house.state), "the last process to be gone")
    assert all_steps_follow_from_commits(house, uid)
    return status


def all_steps_follow_from_commits(house: House, uid: str) -> bool:
    """Every attempt begins right after the step that its predecessor left committed, and the last reaches the end."""
    resumed_at = {attempt.number: attempt.resume_step for attempt in house.status(uid).attempts}
    seen: dict[tuple[int, int], int] = {}
    for noted in house.steps(uid):
        who = (noted["attempt"], noted["rank"])
        assert noted["step"] == seen.get(who, resumed_at[noted["attempt"]]) + 1, noted
        seen[who] = noted["step"]
    last = max(resumed_at)  # it may have begun at the end: nothing was left to do
    assert [seen.get((last, rank), resumed_at[last]) for rank in (0, 1)] == [STEPS, STEPS]
    return True


@pytest.mark.parametrize("number", SIGNALS)
def test_the_operator_ends_and_the_next_adopts_the_gang(house: House, number: signal.Signals) -> None:
    house.start()
    uid = house.submit(steps=STEPS, env={"FAKE_HOLD_AT": "5"})
    house.stands_at(uid, 5)
    ended = house.signal(number)
    assert ended == (-9 if number == signal.SIGKILL else 0)
    gang = {process.pid for tree in house.trees(uid).values() for process in tree}
    assert len(gang) == 4, "the gang goes on alone"
    house.start()
    eventually(lambda: house.log.count("adopted a running worker") == 2, "the gang to be adopted")
    assert {process.pid for tree in house.trees(uid).values() for process in tree} == gang
    house.goes_on(uid)
    assert finishes(house, uid).attempt == 1


def test_a_gang_that_finished_alone_is_counted(house: House) -> None:
    house.start()
    uid = house.submit(steps=STEPS, env={"FAKE_HOLD_AT": "3"})
    house.stands_at(uid, 3)
    house.signal(signal.SIGKILL)
    house.goes_on(uid)
    eventually(lambda: not house.trees(uid), "the gang to finish alone")
    house.start()
    assert finishes(house, uid).attempt == 1


def test_everything_is_killed_and_the_next_attempt_begins_at_the_commit(house: House) -> None:
    house.start()
    uid = house.submit(steps=STEPS, env={"FAKE_HOLD_AT": "12"})
    house.stands_at(uid, 12)
    house.signal(signal.SIGKILL)
    processes.kill_all([process for tree in house.trees(uid).values() for process in tree])
    eventually(lambda: not house.trees(uid), "everything to be dead")
    house.goes_on(uid)
    house.start()
    status = finishes(house, uid)
    assert (status.attempt, status.restarts.by_cause) == (2, {"infrastructure": 1})
    assert status.attempts[1].resume_step >= 10
    assert status.last_failure is not None
    assert "left no exit record" in status.last_failure.message


@pytest.mark.parametrize("number", SIGNALS)
def test_a_launcher_ends(house: House, number: signal.Signals) -> None:
    house.start()
    uid = house.submit(steps=STEPS, env={"FAKE_HOLD_AT": "7"})
    house.stands_at(uid, 7)
    house.trees(uid)[1, 1][0].send_signal(number)
    house.goes_on(uid)
    status = finishes(house, uid)
    assert status.attempt == 2
    assert set(status.restarts.by_cause) == ({"preemption"} if number == signal.SIGTERM else {"infrastructure"})


@pytest.mark.parametrize("number", SIGNALS)
def test_a_rank_ends(house: House, number: signal.Signals) -> None:
    house.start()
    uid = house.submit(steps=STEPS, env={"FAKE_HOLD_AT": "7"})
    house.stands_at(uid, 7)
    house.trees(uid)[1, 0][1].send_signal(number)
    house.goes_on(uid)
    status = finishes(house, uid)
    assert status.attempt == 2
    assert set(status.restarts.by_cause) == ({"preemption"} if number == signal.SIGTERM else {"infrastructure"})


def test_the_deaf_and_the_strays_are_ended_whole(house: House) -> None:
    """Worker 1 ignores SIGTERM, and every rank has a helper in a session of its own that does too."""
    house.start()
    uid = house.submit(steps=10_000, env={"FAKE_STUBBORN": "1", "FAKE_STRAY": "1", "FAKE_HOLD_AT": "6"})
    house.stands_at(uid, 6)

    def whole() -> dict[tuple[int, int], list[psutil.Process]]:
        trees = house.trees(uid)
        return trees if len(trees) == 2 and all(len(tree) >= 4 for tree in trees.values()) else {}

    # A rank does not wait for its helper, whose shell may not have started its own yet.
    eventually(whole, "launcher, rank, shell and sleeper of both workers")[1, 0][0].kill()
    eventually(lambda: {attempt for attempt, _ in house.trees(uid)} == {2}, "the second attempt to be alone")
    eventually(lambda: {n["rank"] for n in house.steps(uid) if n["attempt"] == 2} == {0, 1}, "its ranks to train")
    assert house.never_two(uid)
    house.set_spec(uid, cancel=True)
    house.becomes(uid, Phase.STOPPING)
    for tree in house.trees(uid).values():
        tree[0].kill()
    house.becomes(uid, Phase.CANCELLED)
    eventually(lambda: not processes.scan(house.state), "the last process to be gone")


def test_a_storm_of_kills(house: House) -> None:
    """Operators, launchers and ranks die at random moments; the seed is told, the moments are the machine's."""
    seed = time.time_ns() % 1_000_000
    dice = random.Random(seed)
    print(f"seed {seed}")
    house.start()
    uid = house.submit(steps=STEPS, env={"FAKE_STEP_SECONDS": "0.04"})
    for _ in range(8):
        house.reaches(uid, min(STEPS - 1, house.newest_step(uid) + 1))
        victims = [process for tree in house.trees(uid).values() for process in tree]
        if dice.random() < 0.5:
            house.signal(signal.SIGKILL)
            processes.kill_all([victim for victim in victims if dice.random() < 0.3])
            house.start()
        else:
            processes.kill_all(dice.sample(victims, k=min(1, len(victims))))
        if house.status(uid).phase.terminal:
            break
    finishes(house, uid)


def test_the_operator_ends_with_its_parent_and_the_gang_does_not(house: House) -> None:
    parent = subprocess.Popen(["sleep", "600"])
    operator = house.start("--parent-pid", str(parent.pid))
    uid = house.submit(steps=STEPS, env={"FAKE_HOLD_AT": "3"})
    house.stands_at(uid, 3)
    parent.kill()
    parent.wait()
    assert operator.wait(WAIT_SECONDS_MAX) == 0
    assert "is gone" in house.log
    house.start()
    house.goes_on(uid)
    assert finishes(house, uid).attempt == 1


def test_told_so_the_operator_stops_the_gangs_too(house: House) -> None:
    house.start("--stop-workers")
    uid = house.submit(steps=10_000)
    house.reaches(uid, 7)
    assert house.signal(signal.SIGTERM) == 0
    eventually(lambda: not processes.scan(house.state), "the last process to be gone")
    committed = house.newest_step(uid)
    house.start()
    status = eventually(lambda: (status := house.status(uid)).attempt == 2 and status, "the next attempt")
    assert status.resume_step == committed, "they were given the time to commit"
    assert status.restarts.by_cause == {"preemption": 1}, "it costs the user nothing"
