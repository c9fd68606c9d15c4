"""The platform stops or is killed mid-job, then `muster up`: the job finishes, and never in two gangs."""

import json
import signal
from typing import Any

import psutil
import pytest
from tests.integration.cli.house import House
from tests.polling import eventually
from tests.processes import command_of, kill, send

STEPS = 200  # far more than a gang trains while a test looks at it


def submit(house: House) -> str:
    """A job that has a commit and much to do yet; returns its id."""
    file = house.job_file("survivor", length={"steps": STEPS}, evaluation=None)
    uid = str(house.ask("submit", str(file), "--set", "checkpoint.every=20")["id"])
    house.wait_for_step("survivor", 24)
    return uid


def finish(house: House, uid: str) -> dict[str, Any]:
    """Watch it to its end, then stop the platform; returns the status."""
    *_, last = house.muster("get", "survivor", "--follow", "--json").stdout.splitlines()
    status: dict[str, Any] = json.loads(last)["status"]
    assert (status["phase"], status["progress"]["step"]) == ("Succeeded", STEPS)
    assert [point["step"] for point in house.ask("metrics", uid)["points"]] == list(range(1, STEPS + 1))
    code, errors = house.stop()
    assert code == 0, errors
    eventually(lambda: not house.processes(), "the last process to be gone")
    return status


def gang(house: House) -> set[psutil.Process]:
    """Launchers, ranks and what these started."""
    return {process for process in house.processes() if "muster.trainer" in " ".join(command_of(process))}


@pytest.mark.long
def test_a_gang_outlives_its_platform_and_is_adopted(house: House) -> None:
    """First after a goodbye, then after a `kill -9`; it is the same gang all the time.

    The gang is paused while it is looked at and while a platform starts, however long that takes: it must not be done
    before. It trains both with a platform and without.
    """
    house.up()
    uid = submit(house)
    members = gang(house)
    send(members, signal.SIGSTOP)
    assert len(members) >= 4, "two launchers, two ranks and their helpers"
    code, errors = house.stop()
    assert code == 0
    assert "These jobs train on: survivor." in errors

    for step, end in ((50, house.kill), (80, lambda: None)):
        assert set(house.processes()) == members, "no platform runs"
        send(members, signal.SIGCONT)
        eventually(lambda step=step: newest_step(house, uid) >= step, f"step {step} without a platform")
        send(members, signal.SIGSTOP)
        house.up()
        assert gang(house) == members
        send(members, signal.SIGCONT)
        eventually(lambda step=step: newest_step(house, uid) >= step + 10, f"step {step + 10} with a platform")
        send(members, signal.SIGSTOP)
        end()
    send(members, signal.SIGCONT)
    status = finish(house, uid)
    assert (status["attempt"], status["restarts"]["total"]) == (1, 0)


def newest_step(house: House, uid: str) -> int:
    return max(beat.step for beat in house.beats(uid))


@pytest.mark.long
def test_a_gang_that_ended_with_its_platform_is_followed_by_one_other(house: House) -> None:
    """First by --stop-jobs, which loses nothing, then by a `kill -9` of every process at once."""
    house.up("--stop-jobs")
    uid = submit(house)
    code, errors = house.stop()
    assert code == 0
    assert "these jobs save a checkpoint and stop too: survivor" in errors
    eventually(lambda: not house.processes(), "the last process to be gone")

    house.up()
    eventually(lambda: any(beat.attempt == 2 and beat.step >= 60 for beat in house.beats(uid)), "attempt 2")
    members = gang(house)
    send(members, signal.SIGSTOP)  # it must not be done before it is killed
    house.kill()
    kill(members)
    eventually(lambda: not house.processes(), "the last process to be gone")

    house.up()
    status = finish(house, uid)
    first, second, third = status["attempts"]
    assert (first["outcome"], first["lostSteps"], second["resumeStep"]) == ("preempted", 0, first["lastStep"])
    assert (second["outcome"], second["cause"]) == ("failed", "infrastructure")
    assert third["resumeStep"] >= 40, "from a checkpoint of attempt 2"
    beats = house.beats(uid)
    for attempt in (1, 2):
        last_sign = max(beat.at for beat in beats if beat.attempt == attempt)
        assert all(beat.started_at > last_sign for beat in beats if beat.attempt > attempt), "one gang at any time"
