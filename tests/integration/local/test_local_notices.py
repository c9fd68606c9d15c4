"""What is announced for a virtual node moves the gang, and what it costs is as the cause says."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.integration.local.house import House
from tests.polling import eventually

from muster.words.signals import Cause
from muster.words.status import JobStatus, Phase

STEPS = 10_000  # no gang is done before it is moved, however long an announcement takes


def announce(house: House, node: str, what: str) -> None:
    folder = str(house.state.notices)
    command = [sys.executable, "-m", "muster.agent", "announce", node, what, "--folder", folder]
    subprocess.run(command, check=True, capture_output=True)


def running(house: House, uid: str, attempt: int) -> JobStatus:
    def there() -> JobStatus | None:
        status = house.status(uid)
        return status if (status.attempt, status.phase) == (attempt, Phase.RUNNING) else None

    return eventually(there, f"attempt {attempt} to run; {house.status(uid).because}")


def begin(house: House) -> tuple[str, JobStatus]:
    house.start()
    uid = house.submit(steps=STEPS, env={"FAKE_STEP_SECONDS": "0.05"})
    status = running(house, uid, 1)
    house.reaches(uid, 7)
    return uid, status


@pytest.mark.parametrize(("what", "cause"), [("spot", Cause.PREEMPTION), ("drain", Cause.EVICTION)])
def test_a_node_that_goes_is_left_with_a_commit_and_nothing_is_charged(house: House, what: str, cause: Cause) -> None:
    uid, first = begin(house)
    doomed = first.gang.nodes[1]
    announce(house, doomed, what)
    second = running(house, uid, 2)
    assert doomed not in second.gang.nodes
    assert second.resume_step >= 7, "it committed where it stood, not at the last multiple of five"
    assert second.last_failure is not None
    assert (second.last_failure.cause, second.last_failure.node) == (cause, doomed)
    assert second.restarts.by_cause == {cause: 1}
    assert second.restarts.recent == (), "no budget is charged"
    assert second.node_faults == ()
    assert house.never_two(uid)


def test_a_broken_gpu_keeps_the_node_out_until_it_is_cleared(house: House) -> None:
    uid, first = begin(house)
    broken = first.gang.nodes[0]
    announce(house, broken, "xid:79")
    second = running(house, uid, 2)
    assert broken not in second.gang.nodes
    assert second.last_failure is not None
    assert second.last_failure.cause == Cause.INFRASTRUCTURE
    assert "Xid 79" in second.last_failure.message
    assert [fault.node for fault in second.node_faults] == [broken]
    waiting = house.submit(name="second", steps=STEPS, nodes=2)
    eventually(lambda: "1 free" in house.status(waiting).because, "the second gang to wait for the broken node")
    announce(house, broken, "clear")
    assert broken in running(house, waiting, 1).gang.nodes


def test_a_lost_process_is_restarted_in_place_and_only_once(house: House) -> None:
    uid, first = begin(house)
    announce(house, first.gang.nodes[0], "xid:31")
    second = running(house, uid, 2)
    assert second.gang.nodes == first.gang.nodes
    assert second.restarts.by_cause == {Cause.INFRASTRUCTURE: 1}
    house.reaches(uid, second.resume_step + 40)
    assert house.status(uid).attempt == 2, "the notice still stands and concerns nobody any more"


@pytest.mark.long
def test_what_is_only_recorded_moves_nobody(house: House) -> None:
    uid, first = begin(house)
    for what in ("rebalance", "xid:63", "xid:9999"):
        for node in first.gang.nodes:
            announce(house, node, what)
        house.reaches(uid, house.newest_step(uid) + 40)
    house.set_spec(uid, cancel=True)
    assert house.becomes(uid, Phase.CANCELLED).attempt == 1


def test_rubbish_in_the_folder_is_no_notice(house: House) -> None:
    house.state.notices.mkdir(parents=True)
    for name, text in {
        "local-0.json": "{",
        "local-1.json": '{"node":1}',
        "local-2": "x",
        ".local-3.json.7": "",
    }.items():
        (house.state.notices / name).write_text(text)
    house.start()
    uid = house.submit(steps=10)
    assert house.becomes(uid, Phase.SUCCEEDED).attempt == 1
