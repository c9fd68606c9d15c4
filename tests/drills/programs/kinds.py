"""The faults: how each is done to a program that trains, and what ought to come of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.drills.programs.runs import STATE, MusterRun, Run
from tests.polling import eventually
from tests.processes import send

from muster.words.signals import Cause
from muster.words.status import Phase

SAVER, VICTIM = 0, 1  # ranks: rank 0 writes the checkpoints
LATE_SECONDS = 1.0  # of each request to a slow store
MISSING_FILE = ["trian.py"]
ENDS_AT_ONCE = ["sh", "-c", "echo 'KeyError: the flag --data is missing' >&2; exit 3"]


@dataclass(frozen=True)
class Kind:
    """A fault. `inject` does it and returns when, in seconds since the epoch; None: it is there from the start."""

    name: str
    description: str
    inject: Callable[[MusterRun], float] | None
    cause: Cause | None
    """Cause to be assigned; None: no attempt may end."""
    final_phase: Phase = Phase.SUCCEEDED
    attempts: int | None = None
    """Number of attempts, where it matters."""
    command: list[str] | None = None
    """Command in place of the example's."""
    on_s3: bool = False
    inject_elsewhere: Callable[[Run], float] | None = None
    """The same fault under another launcher; None: it has no meaning there, or nothing to compare."""


def order(rank: int, kind: str, **details: Any) -> Callable[[Run], float]:
    return lambda run: run.order(rank, kind, **details)


def kill_rank(run: Run) -> float:
    at = time.time()
    run.rank(VICTIM).kill()
    return at


def stop_rank(run: Run) -> float:
    at = time.time()
    run.rank(VICTIM).send_signal(signal.SIGSTOP)
    return at


def kill_launcher(run: Run) -> float:
    at = time.time()
    run.launcher().kill()
    return at


def kill_node(run: MusterRun) -> float:
    """SIGKILL of all processes of a node, children first, so that nobody is left to report."""
    tree = run.tree(VICTIM)
    send(tree, signal.SIGSTOP)
    at = time.time()
    send(reversed(tree), signal.SIGKILL)
    return at


def kill_keeper(run: MusterRun) -> float:
    at = time.time()
    run.keeper().kill()
    return at


def announce_spot(run: MusterRun) -> float:
    """A spot notice for the node of the victim."""
    at = time.time()
    run.announce_spot(run.status.gang.nodes[VICTIM])
    return at


def ask_to_end(run: Run) -> float:
    """SIGTERM to the launcher: all that another launcher learns of a node that will be taken back."""
    at = time.time()
    run.launcher().terminate()
    return at


def announce_spot_ignored(run: MusterRun) -> float:
    for rank in (SAVER, VICTIM):
        run.order(rank, "ignore_sigterm")
    return announce_spot(run)


def slow_store(run: MusterRun) -> float:
    at = time.time()
    run.site.plan.late_seconds = LATE_SECONDS
    run.site.plan.rates = {"late": 1.0}
    return at


def delete_while_uploaded(run: MusterRun) -> float:
    slow_store(run)
    eventually(lambda: run.keeper_state().get("state") == "uploading", "an upload")
    at = time.time()
    with contextlib.suppress(FileNotFoundError):
        (run.checkpoints() / STATE).unlink()
    return at


def link_and_fifo(run: MusterRun) -> float:
    """Both lie among the checkpoints, by names of checkpoints, to the end."""
    at = time.time()
    (run.checkpoints() / "best.pt").symlink_to(STATE)
    os.mkfifo(run.checkpoints() / "pipe.pt")
    return at


LOST = Cause.INFRASTRUCTURE
_BUG, _ZERO, _THREE = order(VICTIM, "fail"), order(VICTIM, "end", code=0), order(VICTIM, "end", code=3)
_STUCK, _BACKWARD = order(VICTIM, "stay_away"), order(VICTIM, "hang_in_backward")
_SWALLOWED = order(VICTIM, "swallow_nccl_error")
_FULL, _NCCL, _MEMORY = order(SAVER, "fill_disk"), order(VICTIM, "fail_in_nccl"), order(VICTIM, "exhaust_memory")

KINDS = (
    Kind("command-missing", "the command names no file", None, Cause.USER_ERROR, Phase.FAILED, 1, MISSING_FILE),
    Kind(
        "exits-at-once",
        "the program ends with 3 before it trains",
        None,
        Cause.USER_ERROR,
        Phase.FAILED,
        2,
        ENDS_AT_ONCE,
    ),
    Kind("exception", "a rank raises once", _BUG, Cause.UNKNOWN, inject_elsewhere=_BUG),
    Kind("exit-code", "a rank ends with 3, and says nothing", _THREE, Cause.UNKNOWN),
    Kind("exit-zero", "a rank ends with 0 while the other runs on", _ZERO, Cause.UNKNOWN, inject_elsewhere=_ZERO),
    Kind("ignores-sigterm", "a spot notice for ranks that ignore SIGTERM", announce_spot_ignored, Cause.PREEMPTION),
    Kind("daemon", "a rank leaves a daemon and raises", order(VICTIM, "fail_with_a_daemon"), Cause.UNKNOWN),
    Kind("outputs", "a rank closes its outputs and ends with 5", order(VICTIM, "end_without_outputs"), Cause.UNKNOWN),
    Kind("chdir", "a rank goes where it can't save", order(SAVER, "change_directory"), Cause.UNKNOWN),
    Kind("deleted", "the checkpoint is deleted while it is uploaded", delete_while_uploaded, None, on_s3=True),
    Kind("link-and-fifo", "a link and a FIFO lie among the checkpoints", link_and_fifo, None),
    Kind("slow-store", f"each request to the store takes {LATE_SECONDS:g} s", slow_store, None, on_s3=True),
    Kind("disk-full", "no file may grow beyond 64 KiB", _FULL, Cause.STORAGE, inject_elsewhere=_FULL),
    Kind("backward", "a rank hangs in backward", _BACKWARD, Cause.HANG, inject_elsewhere=_BACKWARD),
    Kind("collective", "a rank never enters the collective", _STUCK, Cause.HANG, inject_elsewhere=_STUCK),
    Kind("stop-rank", "SIGSTOP of a rank", stop_rank, Cause.HANG, inject_elsewhere=stop_rank),
    Kind("spot-notice", "a node will be taken back", announce_spot, Cause.PREEMPTION, inject_elsewhere=ask_to_end),
    Kind("out-of-memory", "an allocation is refused", _MEMORY, Cause.OUT_OF_MEMORY, Phase.FAILED, 1),
    Kind("nccl", "a collective fails with a network error", _NCCL, LOST, inject_elsewhere=_NCCL),
    Kind("nccl-exit-zero", "the same, swallowed: the rank ends with 0", _SWALLOWED, LOST, inject_elsewhere=_SWALLOWED),
    Kind("kill-rank", "SIGKILL of a rank", kill_rank, LOST, inject_elsewhere=kill_rank),
    Kind("kill-launcher", "SIGKILL of a launcher", kill_launcher, LOST, inject_elsewhere=kill_launcher),
    Kind("kill-node", "SIGKILL of everything on a node", kill_node, LOST),
    Kind("kill-keeper", "SIGKILL of the keeper of checkpoints", kill_keeper, Cause.STORAGE),
)


def is_hang(kind: Kind) -> bool:
    return kind.cause is Cause.HANG
