"""`muster up`: one per folder, clear words when it can't start, children watched over, a clean end."""

import json
import os
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from tests.integration.cli.house import House
from tests.polling import WAIT_SECONDS_MAX, eventually
from tests.ports import free_port
from tests.processes import is_alive

from muster.words.notices import MACHINE


def ready(house: House) -> bool:
    try:
        with urllib.request.urlopen(f"{house.url}/readyz", timeout=WAIT_SECONDS_MAX) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def test_a_day_in_the_life(house: House) -> None:
    """Start, be found, refuse a second one, restart a dead child, hear of a broken GPU, stop."""
    kernel_log = house.root / "kernel.log"
    kernel_log.touch()
    house.environ["MUSTER_AGENT_KERNEL_LOG"] = str(kernel_log)
    house.up()
    eventually(lambda: ready(house), "the platform to be ready")
    with pytest.raises(urllib.error.HTTPError, match="401"):  # loopback is open to the machine's other users
        urllib.request.urlopen(f"{house.url}/api/v1/jobs", timeout=WAIT_SECONDS_MAX)
    assert house.ask("ls") == {"items": [], "more": False}

    second = house.muster("up", "--port", "0", expect=2)
    assert house.process is not None
    assert second.stderr.splitlines() == [
        f"error: a `muster up` runs on {house.state.root} already (pid {house.process.pid}, {house.url})",
        "next:  use it as it is, stop it with `muster down`, or start another with --state FOLDER --port PORT",
    ]
    assert house.muster("up", "--detach", expect=2).stderr == second.stderr

    for module in ("muster.api", "muster.operator", "muster.agent"):
        eventually(lambda: house.child(module), module).kill()  # noqa: B023 - asked before the next round
        eventually(lambda: house.child(module), f"a new {module}")  # noqa: B023 - asked before the next round
    eventually(lambda: ready(house), "the new API to answer")
    assert house.ask("ls")["items"] == []

    kernel_log.write_text("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.\n")
    eventually((house.state.notices / f"{MACHINE}.json").exists, "the agent to say what the kernel said")

    code, errors = house.stop(signal.SIGINT)
    assert code == 0
    assert "the API was killed by SIGKILL; starting it again in 0.5 s" in errors
    assert "the operator was killed by SIGKILL; starting it again in 0.5 s" in errors
    assert errors.splitlines()[-1] == "Stopping. No job runs."
    eventually(lambda: not house.processes(), "the last process to be gone")
    assert house.muster("ls", expect=3).stderr.startswith("error: no Muster server is named, and none runs")


def test_children_of_a_killed_platform_end_themselves(house: House) -> None:
    house.up()
    assert house.process is not None
    platform = psutil.Process(house.process.pid)
    eventually(lambda: len(platform.children()) == 3, "API, operator and agent")
    children = platform.children()
    house.process.kill()
    house.process.communicate()
    eventually(lambda: not any(map(is_alive, children)), "the end of its children")


def test_the_next_up_needs_no_patience_from_its_user(house: House) -> None:
    """Right after a `kill -9`, on the same port, while the orphans may still hold it."""
    port = str(free_port())  # one that the kernel gives to nobody else while no platform holds it
    house.up("--port", port)
    assert house.process is not None
    house.process.kill()
    house.process.communicate()
    house.up("--port", port)
    assert house.url.endswith(f":{port}")
    eventually(lambda: ready(house), "the platform to be ready")
    assert house.stop()[0] == 0


def test_a_port_in_use_is_refused_in_one_line_with_the_next_step(house: House) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = house.muster("up", "--port", str(port), expect=2)
    assert result.stderr.splitlines() == [
        f"error: port {port} on 127.0.0.1 is in use",
        f"next:  choose another: muster up --port {port + 1}, or --port 0 for any free one",
    ]
    eventually(lambda: not house.processes(), "the last process to be gone")


@pytest.mark.parametrize("how", ["a file in the way", "a read-only folder"])
def test_a_state_folder_that_can_not_be_written_is_refused(house: House, how: str) -> None:
    if how == "a file in the way":
        (house.root / "file").write_text("")
        folder = house.root / "file" / "state"
    else:
        folder = Path("/proc/muster")  # nobody writes there, not even root
    result = house.muster("up", "--state", str(folder), "--port", "0", expect=2)
    assert result.stderr.startswith(f"error: can't write to the state folder {folder}: ")
    assert result.stderr.splitlines()[1] == "next:  choose a folder that you may write to: muster up --state FOLDER"


def test_a_child_that_does_not_start_is_told_with_its_last_words(house: House) -> None:
    house.state.root.mkdir(parents=True)
    house.state.database.write_text("this is no database")
    result = house.muster("up", "--port", "0", expect=1)
    assert "error: the API ended with exit code" in result.stderr
    assert f"next:  the whole log is in {house.state.logs / 'api.log'}" in result.stderr
    eventually(lambda: not house.processes(), "the last process to be gone")


def test_detached_and_down(house: House) -> None:
    up = json.loads(house.muster("up", "--detach", "--port", "0", "--json").stdout)
    assert os.getpgid(up["pid"]) == up["pid"], "a session of its own"
    house.url = up["url"]
    eventually(lambda: ready(house), "the platform to be ready")
    down = house.ask("down")
    assert down == {"stopped": True, "pid": up["pid"], "jobsTrainingOn": []}
    eventually(lambda: not house.processes(), "the last process to be gone")
    assert "no `muster up` runs on" in house.muster("down", expect=1).stderr


def test_up_ends_with_the_program_that_started_it(house: House) -> None:
    with house.start("up", "--port", "0", "--parent-pid", "1") as process:
        _, errors = process.communicate(timeout=WAIT_SECONDS_MAX)
    assert process.returncode == 0, errors
    eventually(lambda: not house.processes(), "the last process to be gone")
