"""The faults: how each is done to a job that trains, and what ought to come of it."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
from tests.drills.faults.house import COMMIT_EVERY, Job
from tests.drills.faults.store import Store
from tests.polling import eventually
from tests.processes import send

from muster.words.signals import Cause
from muster.words.status import Phase

STRUCK_AT = 30  # after the first commit, and far from the second, so that there is something to lose
VICTIM = 1
FILE_BYTES_MAX = 256 << 10
STORE_PAUSE_SECONDS, MACHINE_PAUSE_SECONDS = 12.0, 20.0


@dataclass(frozen=True)
class Kind:
    """strike: do it, and return when. cause: to be assigned; None: no attempt may end. ends: how the job ought to.

    same_losses: the finished job must have trained what the unharmed one did, bit for bit. changes: of the job.
    finding: the condition that must say so where no attempt ends for it. attempts: so many, where it matters.
    struck_at: after which step. patience: seconds in which somebody must have noticed.
    """

    name: str
    says: str
    strike: Callable[[Job, Store], float]
    cause: Cause | None
    ends: Phase = Phase.SUCCEEDED
    same_losses: bool = True
    changes: dict[str, Any] = field(default_factory=dict)
    on_s3: bool = False
    finding: str = ""
    attempts: int | None = None
    struck_at: int = STRUCK_AT
    patience: float = 90.0


def kill_rank(job: Job, store: Store) -> float:
    return _send(job.rank(1, VICTIM), signal.SIGKILL)


def kill_launcher(job: Job, store: Store) -> float:
    return _send(job.tree(1, VICTIM)[0], signal.SIGKILL)


def lose_node(job: Job, store: Store) -> float:
    """Every process of the node at once, children first, so that nobody is left to say anything."""
    tree = job.tree(1, VICTIM)
    send(tree, signal.SIGSTOP)
    at = time.time()
    send(reversed(tree), signal.SIGKILL)
    return at


def stop_rank(job: Job, store: Store) -> float:
    return _send(job.rank(1, VICTIM), signal.SIGSTOP)


def order(kind: str, **more: Any) -> Callable[[Job, Store], float]:
    return lambda job, store: job.order(VICTIM, kind, **more)


def order_again(kind: str, **more: Any) -> Callable[[Job, Store], float]:
    """Now, and to the next attempt from its first step on."""

    def strike(job: Job, store: Store) -> float:
        at = job.order(VICTIM, kind, **more)
        job.leave_order(VICTIM, kind, **more)
        return at

    return strike


def corrupt_tokens(job: Job, store: Store) -> float:
    """Token ids that the model doesn't have, in most of the prepared store."""
    (path,) = job.platform.state.cache.glob("*/tokens/*/tokens.bin")
    tokens = np.memmap(path, np.uint16, mode="r+")
    tokens[::64] = 60_000
    tokens.flush()
    return time.time()


def stop_store(job: Job, store: Store) -> float:
    """While a save is under way, for longer than a save takes."""
    before = job.heartbeat(1, 0)
    assert before is not None
    at = time.time()
    store.stop()
    with contextlib.suppress(AssertionError):
        eventually(lambda: _stepped(job, before.step + 2 * COMMIT_EVERY), "training without a store", 20)
    store.start()
    return at


def kill_operator(job: Job, store: Store) -> float:
    """A rank dies, and the operator while it recovers the job."""
    operator = job.platform.part("muster.operator")
    first = job.status().attempt
    at = kill_rank(job, store)
    # The next attempt may be quicker there than we look: RESTARTING lasts as long as one status takes to write.
    eventually(lambda: job.status().phase == Phase.RESTARTING or job.status().attempt > first, "its recovery")
    operator.kill()
    return at


def kill_api(job: Job, store: Store) -> float:
    return _send(job.platform.part("muster.api"), signal.SIGKILL)


def kill_prometheus(job: Job, store: Store) -> float:
    """It is gone before the rank dies and stays away through the recovery."""
    job.platform.prometheus.kill()
    return kill_rank(job, store)


def break_gpu(job: Job, store: Store) -> float:
    """The kernel log of a node says that a GPU fell off the bus (Xid 79)."""
    agent = job.platform.agent(job.status().gang.nodes[VICTIM])
    return agent.kernel_says("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.")


def kill_agent(job: Job, store: Store) -> float:
    agent = job.platform.agent(job.status().gang.nodes[VICTIM])
    at = time.time()
    agent.kill()
    return at


def take_back(job: Job, store: Store) -> float:
    """A spot notice for the victim's node."""
    folder, node = job.platform.state.notices, job.status().gang.nodes[VICTIM]
    job.platform.agent(node).kill()  # so that `heal` clears the notice away
    at = time.time()
    subprocess.run(
        [sys.executable, "-m", "muster.agent", "announce", node, "spot", "--folder", str(folder)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return at


def fill_disk(job: Job, store: Store) -> float:
    """No file of the gang's processes may grow beyond what a heartbeat needs: writes fail as on a full disk."""
    for worker in (0, 1):
        for process in job.tree(1, worker)[1:]:
            with contextlib.suppress(psutil.Error):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, FILE_BYTES_MAX))
    return time.time()


def disturb(job: Job, store: Store) -> float:
    """No fault: a store that hangs for a while in the middle of a save, then the whole machine paused, as a snapshot of
    it would.
    """
    at = time.time()
    for seconds, processes in ((STORE_PAUSE_SECONDS, store.processes), (MACHINE_PAUSE_SECONDS, job.platform.processes)):
        paused = processes()
        send(paused, signal.SIGSTOP)
        with contextlib.suppress(AssertionError):
            eventually(lambda: False, "nothing: the pause is the fault", seconds)
        send(paused, signal.SIGCONT)
        before = job.heartbeat(1, 0)
        step = before.step if before else 0
        eventually(lambda least=step + COMMIT_EVERY: _stepped(job, least), "training to go on", 60)  # type: ignore[misc]
    return at


def _send(process: psutil.Process, number: signal.Signals) -> float:
    at = time.time()
    process.send_signal(number)
    return at


def _stepped(job: Job, step: int) -> bool:
    beat = job.heartbeat(1, 0)
    return beat is not None and beat.step >= step


BROKEN = Cause.INFRASTRUCTURE


KINDS = (
    Kind("kill-rank", "SIGKILL of a rank", kill_rank, BROKEN),
    Kind("kill-launcher", "SIGKILL of a launcher", kill_launcher, BROKEN),
    Kind("node-gone", "all processes of a node at once", lose_node, BROKEN),
    Kind("stop-rank", "SIGSTOP of a rank", stop_rank, Cause.HANG),
    Kind("hang", "a rank never enters the collective", order("hang"), Cause.HANG),
    Kind(
        "straggler",
        "a rank takes 1.5 times as long",
        order("slow", factor=1.5, passes=10_000),
        None,
        finding="Straggler",
    ),
    Kind("exit-code", "a rank exits with 3", order("exit", code=3), Cause.UNKNOWN),
    Kind("exception", "a rank raises once", order("raise"), Cause.UNKNOWN),
    Kind(
        "bug",
        "a rank raises whenever it meets one batch",
        order("bug"),
        Cause.UNKNOWN,
        ends=Phase.FAILED,
        attempts=2,
    ),
    Kind(
        "out-of-memory",
        "an allocation is refused",
        order("memory"),
        Cause.OUT_OF_MEMORY,
        ends=Phase.FAILED,
        attempts=1,
    ),
    Kind(
        "nan",
        "the loss is NaN in one step",
        order("scale", by=float("nan")),
        Cause.NUMERIC,
        same_losses=False,
        finding="BatchesSkipped",
    ),
    Kind(
        "spike",
        "the loss is 1000 times too high in one step",
        order("scale", by=1e3),
        None,  # its gradient is clipped, and it is learnt from
        same_losses=False,
    ),
    Kind(
        "diverged",
        "the loss is 1000 times too high in every step",
        order("scale", by=1e3, passes=10_000),
        Cause.NUMERIC,
        same_losses=False,
        struck_at=80,  # what is usual must be known
    ),
    Kind(
        "nan-for-good",
        "the loss is NaN in every step",
        order("scale", by=float("nan"), passes=10_000),
        Cause.NUMERIC,
        same_losses=False,
    ),
    Kind(
        "nan-again",
        "the same, also where its data is passed over",
        order_again("scale", by=float("nan"), passes=10_000),
        Cause.NUMERIC,
        same_losses=False,
        struck_at=50,  # there is a commit before the newest
        attempts=3,
    ),
    Kind("corrupt-sample", "token ids outside of the vocabulary", corrupt_tokens, Cause.STORAGE),
    Kind("store-gone", "the S3 server is gone during saves", stop_store, None, on_s3=True),
    Kind("disk-full", "no checkpoint can be written", fill_disk, Cause.STORAGE),
    Kind("operator-gone", "SIGKILL of the operator while it recovers", kill_operator, BROKEN),
    Kind("prometheus-gone", "SIGKILL of a rank while Prometheus is gone", kill_prometheus, BROKEN),
    Kind("gpu-fault", "Xid 79 in a node's kernel log", break_gpu, BROKEN),
    Kind("agent-gone", "SIGKILL of a node's agent", kill_agent, None),
    Kind("spot-notice", "a node will be taken back", take_back, Cause.PREEMPTION),
    Kind("api-gone", "SIGKILL of the API", kill_api, None),
    Kind(
        "calm",
        f"none: evaluations, a store that hangs for {STORE_PAUSE_SECONDS:.0f} s, the machine paused for "
        f"{MACHINE_PAUSE_SECONDS:.0f} s",
        disturb,
        None,
        same_losses=False,
        changes={"training": {"length": {"steps": 400}, "evaluation": {"every": 10, "holdout": 0.2}}},
        on_s3=True,
    ),
)
