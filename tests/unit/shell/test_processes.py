"""tests/processes.py: whatever has ended reads as nothing, also while nobody has collected it."""

import signal
import subprocess
import sys

import psutil
from tests.polling import eventually
from tests.processes import command_of, environment_of, is_alive, kill, others, send


def test_a_process_is_read_while_it_lives_and_is_nothing_afterwards() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"],
        env={"MARK": "x"},
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    process = psutil.Process(child.pid)
    assert is_alive(process)
    assert process in set(others())
    assert command_of(process)[0] == sys.executable
    assert environment_of(process)["MARK"] == "x"

    kill([process])
    eventually(lambda: process.status() == psutil.STATUS_ZOMBIE, "the child to be a zombie")
    for collected in (False, True):
        if collected:
            child.communicate()
        assert not is_alive(process)
        assert process not in set(others())
        assert (command_of(process), environment_of(process)) == ([], {})
        send([process], signal.SIGTERM)
