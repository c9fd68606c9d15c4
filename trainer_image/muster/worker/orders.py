"""Orders of a worker that runs a program: what to start, where, and with which variables."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.worker.cores import share_cores
from muster.worker.files import read_document
from muster.worker.heartbeats import HangPolicy
from muster.worker.names import FIRST_INCARNATION, LAUNCHER_ENV, PREPARED, RESULTS, STOP, WORK, WorkerVariables


class BadOrders(Exception):
    """The program can't be started as the job describes it. The message says why, and what to change."""


@dataclass(frozen=True)
class WorkerOrders:
    """One worker's orders."""

    command: tuple[str, ...]
    once: bool
    """Whether the command is started once, not once for each rank."""
    hang: HangPolicy
    steps: int | None
    job_uid: str
    attempt: int
    worker: int
    incarnation: int
    resume_step: int
    fence: str | None
    directory: str
    work: str
    """Working directory."""
    prepared: Mapping[str, Any]
    """Files that were fetched before the start; empty where there are none (a run by hand)."""


def read_orders(environ: Mapping[str, str] = os.environ) -> WorkerOrders:
    """Read the orders from the environment and the worker's folder. Raises BadOrders."""
    try:
        program = json.loads(environ.get(WorkerVariables.CONFIG) or "")["program"]
        command = tuple(str(word) for word in program["command"])
        hang = program.get("hang") or {}
        steps = program.get("steps")
    except (ValueError, TypeError, KeyError) as error:
        raise BadOrders(
            f"{WorkerVariables.CONFIG} holds no program that could be started ({error!r}); submit the job"
        ) from None
    if not command:
        raise BadOrders("program.command is empty; name a program, such as train.py")
    directory = os.path.abspath(environ.get(WorkerVariables.WORKER_DIR) or ".")
    prepared = read_document(os.path.join(directory, PREPARED)) or {}

    def number(name: str, default: int) -> int:
        text = environ.get(name) or ""
        return int(text) if text.isdecimal() else default

    return WorkerOrders(
        command=command,
        once=program.get("launcher") == "none",
        hang=HangPolicy(hang.get("silentSeconds"), hang.get("stepSeconds"), bool(hang.get("off"))),
        steps=steps if isinstance(steps, int) else None,
        job_uid=environ.get(WorkerVariables.JOB_UID) or "",
        attempt=number(WorkerVariables.ATTEMPT, 1),
        worker=number(WorkerVariables.WORKER, 0),
        incarnation=number(WorkerVariables.INCARNATION, FIRST_INCARNATION),
        resume_step=int(prepared.get("resumeStep", number(WorkerVariables.RESUME_STEP, 0)) or 0),
        fence=environ.get(WorkerVariables.FENCE) or None,
        directory=directory,
        work=str(prepared.get("workDir") or os.path.join(directory, WORK)),
        prepared=prepared,
    )


def link_image_files(orders: WorkerOrders, image: str) -> None:
    """Show the files of the image's own working directory in the program's, by links, where no source was given: the
    program finds them by its relative paths, and what it writes beside them, such as `checkpoint.folder`, lies on the
    volume that the keeper of checkpoints shares. What lies there already comes first. Raises OSError."""
    inside = os.path.realpath(image)
    if orders.prepared.get("sourceDir") or inside == "/" or os.path.realpath(orders.work).startswith(inside + os.sep):
        return
    for name in os.listdir(inside):
        with contextlib.suppress(FileExistsError):
            os.symlink(os.path.join(inside, name), os.path.join(orders.work, name))


def command_line(orders: WorkerOrders, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command as it is started. Raises BadOrders for one that is not there."""
    first = orders.command[0]
    if first.endswith(".py") or first == "-m":
        if first != "-m" and not os.path.isfile(os.path.join(orders.work, first)):
            raise BadOrders(f"program.command: there is no file {first} in {orders.work}{_near(first, orders.work)}")
        return [environ.get("PYTHON_EXEC") or sys.executable, "-u", *orders.command]  # as torchrun has it
    if "/" in first:
        path = os.path.join(orders.work, first)
        if not os.path.exists(path):
            raise BadOrders(f"program.command: there is no file {first}{_near(first, orders.work)}")
        if not os.access(path, os.X_OK) or os.path.isdir(path):
            raise BadOrders(f"program.command: {first} can't be executed; make it executable, or name its interpreter")
        return [path, *orders.command[1:]]
    if shutil.which(first, path=environ.get("PATH")) is None:
        what = f"no command {first} in this image ({environ.get('PATH', 'no PATH')})"
        raise BadOrders(f"program.command: there is {what}{_near(first, orders.work)}")
    return list(orders.command)


def _near(name: str, folder: str) -> str:
    """Return a hint of what may be meant, from the files beside it."""
    place, _, last = name.rpartition("/")
    try:
        names = os.listdir(os.path.join(folder, place))
    except OSError:
        return ""
    close = difflib.get_close_matches(last, names, 1)
    if close:
        return f"; did you mean {os.path.join(place, close[0])}?"
    if not names:
        return "; the working directory is empty: name the program's folder in program.source"
    return f"; there are {', '.join(sorted(names)[:8])}" + (" and more" if len(names) > 8 else "")


def results_path(orders: WorkerOrders, environ: Mapping[str, str]) -> str:
    """Return the path at which the program leaves its results."""
    return environ.get(WorkerVariables.RESULTS) or os.path.join(orders.directory, RESULTS)


def program_environment(orders: WorkerOrders, environ: Mapping[str, str], ranks_per_node: int) -> dict[str, str]:
    """Return the variables of the program's processes, besides those of each rank. The job's own come first."""
    hook = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")
    prepared, own = orders.prepared, dict(environ)
    paths = [hook, str(prepared.get("sourceDir") or ""), own.get("PYTHONPATH", "")]
    variables = {
        "PYTHONUNBUFFERED": "1",
        **own,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TORCHELASTIC_RUN_ID": f"{orders.job_uid}-{orders.attempt}",
        LAUNCHER_ENV: str(os.getpid()),
        WorkerVariables.WORKER_DIR: orders.directory,
        WorkerVariables.RESUME_STEP: str(orders.resume_step),
        WorkerVariables.STOP_FILE: os.path.join(orders.directory, STOP),
        WorkerVariables.RESULTS: results_path(orders, own),
    }
    share_cores(1 if orders.once else ranks_per_node, variables)
    for variable, key in (
        (WorkerVariables.SOURCE_DIR, "sourceDir"),
        (WorkerVariables.INPUTS_DIR, "inputsDir"),
        (WorkerVariables.CHECKPOINT_DIR, "checkpointDir"),
        (WorkerVariables.RESUME_DIR, "resumeDir"),
    ):
        if key in prepared:
            variables.pop(variable, None)
            if prepared[key]:
                variables[variable] = str(prepared[key])
    variables.setdefault(WorkerVariables.CHECKPOINT_DIR, os.path.join(orders.directory, "checkpoints"))
    return variables
