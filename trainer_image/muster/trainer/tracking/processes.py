"""Starts the trackers' processes beside the ranks and ends them with these, however they are."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from muster.storage.small_files import write_whole
from muster.trainer.config import WorkerRun

FINISH_SECONDS: Final = 8.0  # from the end of the ranks on, for what they told last
KILL_SECONDS: Final = 2.0
FAULTS: Final = "tracking.faults"  # in the worker's folder: a line for each tracker that is left out
Command = tuple[str, ...]


def fault_file(directory: Path, kind: str) -> Path:
    """Return the file in which a tracker's process writes why it gave up."""
    return directory / f"tracking-{kind}.fault"


def commands(run: WorkerRun) -> dict[str, Command]:
    """Return the command of each tracker that the job requests. Only the first worker has any: its first rank has the
    log."""
    if run.worker:
        return {}
    return {kind: (sys.executable, "-m", "muster.trainer.tracking", kind) for kind in run.tracking.kinds}


class TrackerProcesses:
    """Processes of the trackers. One that ends by itself, or does not end when it should, is reported and otherwise
    ignored."""

    def __init__(self, directory: Path, commands: dict[str, Command], finish_seconds: float = FINISH_SECONDS) -> None:
        self._directory, self._finish_seconds = directory, finish_seconds
        self._faults: list[str] = []
        self._finishing = threading.Event()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # They inherit what is blocked: when the worker is asked to stop, the ranks' last steps are still to be told.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        try:
            self._start(commands)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for kind, process in self._processes.items():
            threading.Thread(target=self._watch, args=(kind, process), name=f"track-{kind}", daemon=True).start()

    def _start(self, commands: dict[str, Command]) -> None:
        for kind, command in commands.items():
            try:
                self._processes[kind] = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            except OSError as error:
                self._left_out(kind, str(error))

    @property
    def faults(self) -> Sequence[str]:
        """Faults of the trackers that are left out."""
        return tuple(self._faults)

    def finish(self) -> None:
        """Let the trackers send the remaining records, for a while; then kill them, with all that they started."""
        self._finishing.set()
        for process in self._processes.values():
            assert process.stdin is not None, "it was asked for"
            with contextlib.suppress(OSError):
                process.stdin.close()
        deadline = time.monotonic() + self._finish_seconds + KILL_SECONDS
        for kind, process in self._processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(process)
                self._left_out(kind, "it did not end with the run, and was killed")

    def _watch(self, kind: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code == 0 or (code < 0 and self._finishing.is_set()):
            return
        try:
            why = fault_file(self._directory, kind).read_text()
        except OSError:
            why = f"its process ended with code {code}: it did not answer in time, or crashed"
        self._left_out(kind, why)

    def _left_out(self, kind: str, why: str) -> None:
        self._faults.append(f"{kind} is left out from here on: {why}")
        print(f"tracking: warning: {self._faults[-1]}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):  # a full disk
            write_whole(self._directory / FAULTS, "\n".join(self._faults))


def _kill(process: subprocess.Popen[bytes]) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    process.kill()
    process.wait()
