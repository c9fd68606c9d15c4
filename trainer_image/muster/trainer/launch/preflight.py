"""A look before the gang meets, by an init container: `python -m muster.trainer.launch.preflight` ends with 0, or with
84 (90, 80) and why, so that a bad node costs seconds instead of a rendezvous that times out.

Each check has an answer to failure, by MUSTER_PREFLIGHT (`gpus=exclude,disk=retry,network=warn,efa=warn`):
    warn      say it, and go on
    retry     end with 84: the next attempt may find it well (infrastructure, the node is charged)
    exclude   end with 90: as with retry, and this node is left at once
    stop      end with 80: no restart will help
"""

from __future__ import annotations

from muster.worker.early_stop import end_on_signals

if __name__ == "__main__":
    end_on_signals()  # before the imports that take their time

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from muster.local.gpus import has_control_device
from muster.trainer.errors import NodeUnfit, UserError
from muster.trainer.gpus import must_have_gpus, read_facts
from muster.trainer.launch.all_reduce_check import check_all_reduce
from muster.trainer.launch.report import write_termination_message
from muster.words.names import Env, ExitCode, Rendezvous
from muster.words.signals import WorkerExit

ANSWERS = {"gpus": "exclude", "disk": "retry", "efa": "exclude", "network": "warn", "collective": "retry"}
DISK_BYTES_MIN = 2 * 2**30  # for token stores and the files of a commit on their way to the bucket
RESOLVE_SECONDS = 30.0  # the names of a gang that is just being made take a moment


@dataclass(frozen=True)
class PreflightFault:
    check: str
    message: str
    users: bool = False  # it lies in what the job brings along, so that every node would show it


def main() -> int:
    answers = ANSWERS | dict(pair.split("=", 1) for pair in os.environ.get(Env.PREFLIGHT, "").split(",") if "=" in pair)
    faults = _faults(CHECKS) or _faults(GANG_CHECKS)
    for fault in faults:
        print(f"preflight: {fault.check}: {fault.message} ({_answer(fault, answers)})", file=sys.stderr, flush=True)
    end = verdict(faults, answers)
    if end.exit_code:
        write_termination_message(end)
    return end.exit_code


def _faults(checks: dict[str, Callable[[], str | None]]) -> list[PreflightFault]:
    faults = []
    for name, check in checks.items():
        try:
            if (message := check()) is not None:
                faults.append(PreflightFault(name, message))
        except UserError as error:
            faults.append(PreflightFault(name, str(error), users=True))
    return faults


def _answer(fault: PreflightFault, answers: dict[str, str]) -> str:
    """The answer to this check; `stop` for the user's own fault, unless it is only to be a warning."""
    answer = answers.get(fault.check, "warn")
    return "stop" if fault.users and answer != "warn" else answer


def verdict(faults: list[PreflightFault], answers: dict[str, str]) -> WorkerExit:
    """The worst answer decides; its faults are named."""
    for answer, code in (
        ("stop", ExitCode.USER_ERROR),
        ("exclude", ExitCode.PREFLIGHT_EXCLUDE),
        ("retry", ExitCode.PREFLIGHT_FAILED),
    ):
        mine = [fault for fault in faults if _answer(fault, answers) == answer]
        if mine:
            words = "; ".join(f"{fault.check}: {fault.message}" for fault in mine)
            return WorkerExit(exit_code=int(code), at=time.time(), message=f"preflight failed ({answer}): {words}")
    return WorkerExit(exit_code=0, at=time.time())


def gpus() -> str | None:
    """Check that this worker has as many GPUs as ranks, and that each answers to an allocation. Raises UserError for a
    torch without CUDA."""
    ranks, device = int(os.environ.get(Rendezvous.RANKS_PER_NODE, "1")), os.environ.get(Env.DEVICE)
    if device == "cpu" or (not device and not has_control_device()):
        return None
    import torch

    try:
        must_have_gpus(read_facts(), ranks)
    except NodeUnfit as error:
        return str(error).removeprefix("preflight failed: ")
    for index in range(ranks):
        try:
            torch.ones(1024, device=f"cuda:{index}").sum().item()
        except RuntimeError as error:
            return f"GPU {index} does not compute: {str(error).splitlines()[0]}"
    return None


def disk() -> str | None:
    folders = [Path(os.environ[name]) for name in (Env.WORKER_DIR, Env.CACHE_DIR) if os.environ.get(name)]
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            probe = folder / ".preflight"
            probe.write_bytes(b"0" * 4096)
            probe.unlink()
        except OSError as error:
            return f"{folder} can't be written: {error.strerror}"
        if free < DISK_BYTES_MIN:
            return f"{folder} has {free / 2**30:.1f} GiB free, {DISK_BYTES_MIN / 2**30:.0f} are needed"
    return None


def efa() -> str | None:
    """Check that EFA's devices are there, where EFA is requested."""
    if "FI_EFA_USE_HUGE_PAGE" not in os.environ:
        return None
    devices = Path("/sys/class/infiniband")
    return None if devices.is_dir() and any(devices.iterdir()) else "no EFA device is visible in this pod"


def network() -> str | None:
    """The rendezvous' name resolves. (Worker 0 does not listen yet: all preflights run before any launcher.)"""
    host = os.environ.get(Rendezvous.HOST, "")
    deadline = time.monotonic() + RESOLVE_SECONDS
    while host:
        try:
            socket.getaddrinfo(host, None)
            return None
        except OSError as error:
            if time.monotonic() > deadline:
                return f"the name of worker 0, {host}, does not resolve: {error}"
        time.sleep(1.0)
    return None


CHECKS: dict[str, Callable[[], str | None]] = {"gpus": gpus, "disk": disk, "efa": efa, "network": network}
# Only where this node is well, for here all wait for all: a gang that can't meet anyway should not take the time to.
GANG_CHECKS: dict[str, Callable[[], str | None]] = {"collective": check_all_reduce}


if __name__ == "__main__":
    sys.exit(main())
