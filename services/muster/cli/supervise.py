"""Children of `muster up`: started, watched, started again when they die, stopped in order."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BACKOFF_SECONDS = 0.5
BACKOFF_SECONDS_MAX = 15.0
# A child that lived this long had started well, so its next death begins the backoff anew.
HEALTHY_SECONDS = 30.0
TAIL_BYTES = 4_000


def backoff_seconds(deaths: int) -> float:
    """The pause before the start that follows the n-th death in a row (from 1)."""
    return float(min(BACKOFF_SECONDS * 2 ** min(deaths - 1, 10), BACKOFF_SECONDS_MAX))


@dataclass
class ChildProcess:
    """One process of the platform: `python -m` runs `module` with `arguments`, and `log` takes its output."""

    name: str
    module: str
    arguments: Sequence[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    deaths: int = 0
    start_at: float = 0.0
    _log_from: int = field(default=0, repr=False)

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_from = log.tell()
            # A session of its own: Ctrl-C in the terminal reaches `muster up` alone, which then stops them in order.
            # --parent-pid: should `muster up` be killed, the child notices and ends itself.
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, *self.arguments, "--parent-pid", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started_at = time.monotonic()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def watch(self, now: float, say: Callable[[str], None]) -> None:
        """Notice a death and start again when its pause is over."""
        if self.alive:
            return
        if self.process is not None:
            self.deaths = 1 if now - self.started_at >= HEALTHY_SECONDS else self.deaths + 1
            pause = backoff_seconds(self.deaths)
            how = how_it_ended(self.process.returncode)
            say(f"{self.name} {how}; starting it again in {pause:g} s (log: {self.log})")
            self.process, self.start_at = None, now + pause
        if now >= self.start_at:
            self.start()

    def send_signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def reap(self) -> None:
        if self.process is not None:
            self.process.wait()

    def log_tail(self, lines: int = 6) -> str:
        """The end of what this life of the child has written."""
        try:
            with self.log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_from, end - TAIL_BYTES))
                return "\n".join(log.read().decode(errors="replace").strip().splitlines()[-lines:])
        except OSError:
            return ""


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
