"""The lock of the `muster up` that runs on a state folder: held as long as it lives."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import time
from dataclasses import asdict

from muster.cli.errors import CliError, usage
from muster.client.address import state_folder
from muster.client.running import RunningPlatform, read_running, who
from muster.local.private import make_private_folder
from muster.words.state_folder import StateFolder

__all__ = ["RunningPlatform", "StateLock", "already_running", "stop_command", "who"]


class StateLock:
    """Held as long as this process lives, however it ends; children don't inherit it.

    If it `crashed_before`, the last holder was killed, and its children may not have noticed yet.
    """

    def __init__(self, state: StateFolder) -> None:
        """Take the lock. Raises CliError (exit 2) when another `muster up` has it or the folder can't be written."""
        self.state = state
        self.file = _open(state)
        if not _take(self.file):
            other = read_running(state.running)
            os.close(self.file)
            raise already_running(state, other)
        self.crashed_before = read_running(state.running) is not None
        self.write(RunningPlatform(os.getpid(), "", time.time()))

    def write(self, running: RunningPlatform) -> None:
        # In place: a renamed file would be another file than the locked one.
        text = json.dumps(asdict(running)).encode()
        os.pwrite(self.file, text.ljust(200), 0)

    def release(self) -> None:
        os.ftruncate(self.file, 0)
        os.close(self.file)


def already_running(state: StateFolder, other: RunningPlatform | None) -> CliError:
    where = f" (pid {other.pid}{f', {other.url}' if other.url else ''})" if other else ""
    return usage(
        f"a `muster up` runs on {state.root} already{where}",
        f"use it as it is, stop it with `{stop_command(state)}`, or start another with --state FOLDER --port PORT",
        "already-running",
    )


def stop_command(state: StateFolder) -> str:
    """Return the command that stops the platform of this state folder, and no other one of this machine."""
    named = "" if state.root == state_folder(None).root else f" --state {shlex.quote(str(state.root))}"
    return f"muster down{named}"


def _open(state: StateFolder) -> int:
    try:
        make_private_folder(state.root, state.running)
        state.logs.mkdir(exist_ok=True)
        return os.open(state.running, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise usage(
            f"can't write to the state folder {state.root}: {reason}",
            "choose a folder that you may write to: muster up --state FOLDER",
            "state-not-writable",
        ) from None


def _take(file: int) -> bool:
    """Return whether the lock is ours now. It tries for half a second, since each reader (`who`) holds it briefly."""
    for _ in range(100):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(0.005)
    return False
