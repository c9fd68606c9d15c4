"""Use of the machine's cores by the ranks of a worker. Other jobs may use the same cores.

The number of threads decides the order in which a sum is added up, so it depends only on what stays the same from one
attempt to the next: the cores that this process may run on, its control group's quota and the number of ranks. Where
others are busy on the same cores, only the way in which threads wait adapts, which changes no result.
"""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from pathlib import Path

CGROUP_LIMITS = (Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"))
CFS_PERIOD_MICROSECONDS = 100_000  # the kernel's default, which version 1 keeps in a file of its own
# A thread of OpenMP that waits for the others spins, by default for milliseconds (libgomp: 300,000 rounds). Where two
# jobs share a core, the spinning thread keeps the one that it waits for from running. These make it sleep at once:
# the first is the standard's, the second is for builds of torch with Intel's runtime, which heeds its own first.
PASSIVE_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def share_cores(ranks: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set threads for each of `ranks` ranks and how they wait, where the job's environment does not say otherwise."""
    environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    for name, value in PASSIVE_WAITING.items():
        environ.setdefault(name, value)


def usable_cores() -> int:
    """Cores that this process may run on, or those that its control group's quota is worth, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *map(math.ceil, filter(None, map(_quota, CGROUP_LIMITS)))]))


def _quota(path: Path) -> float | None:
    """The cores that a control group grants. Version 2: `max 100000`, `150000 100000`; version 1: `-1`, `150000`."""
    try:
        quota, *period = path.read_text().split()
        return int(quota) / int(period[0] if period else CFS_PERIOD_MICROSECONDS) if quota.isdecimal() else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
