"""Start of a worker that runs a program of the user's own.

On one machine (`run_program`) the worker's first process has given up its rights before it comes here, and whatever it
starts is held to that, too. It fetches what the program needs (`prepare`), starts the keeper of its checkpoints beside
it, and then becomes the launcher, `python -m muster.worker`, under the same process number.

In a pod (`python -m muster.trainer.launch.program`) each of these is a container. This one, an init container of
Muster's own image, fetches the same, and puts the launcher where the program's image finds it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from muster.trainer.launch.limits import limit_tasks
from muster.trainer.launch.report import write_termination_message
from muster.words.names import KEEPER_STATE, Env, ExitCode
from muster.words.signals import WorkerExit
from muster.worker.early_stop import STOP_SIGNALS, end_now, end_on_signals

PREPARE = "muster.trainer.programs.prepare"
KEEPER = "muster.trainer.programs.keeper"
LAUNCHER = "muster.worker"
KEEPER_SECONDS = 120.0  # in which the keeper has begun to watch: it imports, and opens the store
MAIN = 'import runpy\n\nrunpy.run_module("muster.worker", run_name="__main__", alter_sys=True)\n'
INIT = '"""The launcher of programs, without the rest of Muster."""\n'
HOOK = Path("muster", "worker", "hook")
_STATED = frozenset(int(code) for code in ExitCode)


class NotPrepared(Exception):
    """Failure to fetch what the program needs. The message says what; `exit_code` is the worker's."""

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
    keeper = subprocess.Popen([sys.executable, "-m", KEEPER, "--parent", str(os.getpid())], stdin=subprocess.DEVNULL)
    await_keeper(keeper, Path(os.environ.get(Env.WORKER_DIR) or ".") / KEEPER_STATE)
    sys.stdout.flush()
    sys.stderr.flush()
    # Handlers end here; the launcher sets its own. A signal between the two ends this process as it ends any other.
    os.execv(sys.executable, [sys.executable, "-m", LAUNCHER])  # noqa: S606


def await_keeper(keeper: subprocess.Popen[bytes], state: Path) -> None:
    """Return once the keeper watches: what a program saves before that would not be kept. Raises NotPrepared."""
    deadline = time.monotonic() + KEEPER_SECONDS
    while not state.exists():
        if keeper.poll() is not None or time.monotonic() > deadline:
            keeper.kill()
            how = f"ended with exit code {keeper.returncode}" if keeper.returncode is not None else "did not start"
            raise NotPrepared(int(ExitCode.STORAGE), f"the process that keeps the program's checkpoints {how}")
        time.sleep(0.02)


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


def write_launcher_files(folder: Path) -> None:
    """Give a foreign image the launcher of programs, the hook that counts steps, and `muster.run`, as a folder. Raises
    OSError where it can't be written.

    All of it is of the standard library and written for old Pythons, so that copying it is enough. `python3 FOLDER`
    starts the launcher. There `muster` is a package with an `__init__.py`, which comes before any other `muster` that
    the image may hold; in the hook's folder, which is on the program's own path, it has none, and hides nothing.
    """
    worker = _origin("muster.worker").parent
    hidden = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(worker, folder / "muster" / "worker", ignore=hidden, dirs_exist_ok=True)
    (folder / "muster" / "__init__.py").write_text(INIT)
    (folder / "__main__.py").write_text(MAIN)
    (folder / HOOK / "muster").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_origin("muster.run"), folder / HOOK / "muster" / "run.py")


def _origin(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{module} is part of this installation"
    assert spec.origin is not None, f"{module} is a file"
    return Path(spec.origin)


def main() -> int:
    """Prepare a program in its pod. What went wrong is the container's termination message."""
    end_on_signals()
    try:
        write_launcher_files(Path(os.environ[Env.LAUNCHER_DIR]))
        prepare([sys.executable, "-m", PREPARE])
    except NotPrepared as error:
        write_termination_message(WorkerExit(exit_code=error.exit_code, at=time.time(), message=str(error)))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
