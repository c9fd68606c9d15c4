"""Processes of one state folder, found by what they carry and not by who started them: orphans have no parent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.words.names import Env


@dataclass(frozen=True)
class FoundProcess:
    pid: int
    what: str


def of_state(root: Path) -> list[FoundProcess]:
    """Platform, workers and ranks of that folder. This process and those above it are not meant, whatever they name."""
    import psutil

    above = {os.getpid()}
    with contextlib.suppress(psutil.Error):  # one that ends meanwhile has nobody above it
        ancestor = psutil.Process().parent()
        while ancestor is not None:
            above.add(ancestor.pid)
            ancestor = ancestor.parent()
    matches = []
    for process in psutil.process_iter():
        if process.pid in above:
            continue
        with contextlib.suppress(psutil.Error):  # gone meanwhile, or somebody else's
            command = process.cmdline()
            if process.status() != psutil.STATUS_ZOMBIE and is_of_state(command, process.environ(), root):
                matches.append(FoundProcess(process.pid, " ".join(command)[:160] or process.name()))
    return matches


def is_of_state(command: Sequence[str], environ: Mapping[str, str], root: Path) -> bool:
    """A part of the platform has the folder as an argument; whatever a worker starts inherits its worker folder."""
    if environ.get(Env.WORKER_DIR, "").startswith(f"{root}/"):
        return True
    return str(root) in command and any(word.startswith("muster.") for word in command)


def end(processes: list[FoundProcess]) -> None:
    """Send SIGKILL to what did not end when it was asked to."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, 9)


def belongs_to(pid: int, job_uid: str, attempt: int) -> bool:
    """Return whether the pid is still a rank of that attempt. Pids are reused; the environment distinguishes them."""
    import psutil

    try:
        environ = psutil.Process(pid).environ()
    except psutil.Error:
        return False
    return environ.get(Env.JOB_UID) == job_uid and environ.get(Env.ATTEMPT) == str(attempt)
