"""A program of the user's own on this machine: what a pod does in containers of its own is done by one process here.

The first process of the worker has given up its rights before it comes here, and whatever it starts is held to that,
too. It fetches what the program needs (`prepare`), starts the keeper of its checkpoints beside it, and then becomes the
launcher, `python -m muster.worker`, under the same process number.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import NoReturn

from muster.contract.names import Env, ExitCode
from muster.trainer.launch.early_stop import STOP_SIGNALS, end_now
from muster.trainer.launch.limits import limit_tasks

PREPARE = "muster.trainer.programs.prepare"
KEEPER = "muster.trainer.programs.keeper"
LAUNCHER = "muster.worker"
_STATED = frozenset(int(code) for code in ExitCode)


class NotPrepared(Exception):
    """What the program needs could not be fetched. The message says what; `exit_code` is the worker's."""

    def __init__(self, exit_code: int, message: str) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def runs_program(environ: Mapping[str, str]) -> bool:
    """Return whether this worker's job is a program, not a training. What is no configuration is neither: whoever
    reads it says what is wrong."""
    try:
        config = json.loads(environ.get(Env.CONFIG) or "{}")
    except ValueError:
        return False
    return isinstance(config, dict) and isinstance(config.get("program"), dict)


def run_program() -> NoReturn:
    """Prepare the program, and become its launcher. Raises NotPrepared, and OSError where no process can be started."""
    limit_tasks()
    prepare([sys.executable, "-m", PREPARE])
    # Closed at its end like any other; the launcher knows nothing of it but its file.
    subprocess.Popen([sys.executable, "-m", KEEPER, "--parent", str(os.getpid())], stdin=subprocess.DEVNULL)
    sys.stdout.flush()
    sys.stderr.flush()
    # Handlers end here; the launcher sets its own. A signal between the two ends this process as it ends any other.
    os.execv(sys.executable, [sys.executable, "-m", LAUNCHER])  # noqa: S606


def prepare(command: Sequence[str]) -> None:
    """Run `prepare` to its end. Its last words are the reason if it fails. Raises NotPrepared."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")

    def end_both(number: int, frame: FrameType | None) -> None:
        process.kill()
        end_now()

    before = {number: signal.signal(number, end_both) for number in STOP_SIGNALS}
    last = ""
    try:
        for line in process.stderr or ():
            sys.stderr.write(line)
            sys.stderr.flush()
            last = line.strip() or last
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == 0:
        return
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    stated = code if code in _STATED else int(ExitCode.PREFLIGHT_FAILED)
    raise NotPrepared(stated, last or f"the process that fetches what the program needs {how}")
