"""Checks of `muster doctor` without a cluster: whether this machine can run Muster and train, a function per line."""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from muster.cli import running
from muster.cli.findings import Finding, Lines
from muster.cli.up import NEEDED
from muster.local import gpus, sandbox
from muster.words.state_folder import StateFolder
from muster.words.text import plural, size

PYTHON_MIN = (3, 11)
# A checkpoint of a model of 1B parameters takes 12 GB with its optimizer.
DISK_BYTES_MIN, DISK_BYTES_FEW = 1 << 30, 20 << 30
# NCCL and data loaders map tens of megabytes for each pair of ranks. Docker gives 64 MiB unless it is asked.
SHARED_BYTES_FEW = 1 << 30
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the machine's shared memory
# The oldest driver of each CUDA (NVIDIA, "CUDA Toolkit release notes", table of minor version compatibility).
DRIVERS_MIN: Mapping[int, int] = {11: 450, 12: 525, 13: 580}
TORCH_SECONDS_MAX = 180.0
_FACTS = """
import dataclasses, json
from muster.trainer.gpus import read_facts
print(json.dumps(dataclasses.asdict(read_facts())))
"""


@dataclass
class ExaminedMachine:
    """The machine that is examined, as the person who runs the command sees it."""

    state: StateFolder
    port: int = 8642

    @cached_property
    def torch_facts(self) -> dict[str, Any] | str:
        """Facts of muster.trainer.gpus from a process of its own, for torch takes seconds to load; or why there are
        none."""
        try:
            done = subprocess.run(
                [sys.executable, "-c", _FACTS], capture_output=True, text=True, timeout=TORCH_SECONDS_MAX, check=False
            )
        except subprocess.TimeoutExpired:
            return f"torch was not loaded within {TORCH_SECONDS_MAX:g} s"
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return facts


def examine_machine(machine: ExaminedMachine) -> list[Finding]:
    """Return the findings of every check."""
    return [Finding(title, *line) for title, check in CHECKS.items() for line in check(machine)]


def _python(_: ExaminedMachine) -> Lines:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < PYTHON_MIN:
        yield "failure", version, f"install Python {'.'.join(map(str, PYTHON_MIN))} or newer"
    else:
        yield "ok", version


def _packages(_: ExaminedMachine) -> Lines:
    missing = sorted({extra for module, extra in NEEDED.items() if importlib.util.find_spec(module) is None})
    if missing:
        yield "failure", f"the extras {', '.join(missing)} are not installed", "pip install 'muster-train[all]'"
    else:
        yield "ok", "all that `muster up` needs is installed"


def _gpus(machine: ExaminedMachine) -> Lines:
    there, driver = gpus.gpu_count(), gpus.driver_version()
    if there is None:
        yield "ok", "this system does not say how many GPUs it has: muster up --nodes 1 --gpus-per-node N"
    elif not there and driver:
        step = "start the container with NVIDIA's runtime (docker run --gpus all), or look at `nvidia-smi`"
        yield "warning", f"driver {driver} is loaded, and no GPU is visible", step
    elif not there:
        yield "ok", "none: jobs with gang.gpusPerNode: 0 train on the CPU"
    elif not driver:
        yield "failure", f"{plural(there, 'GPU')} and no NVIDIA driver", "install NVIDIA's driver"
    else:
        yield "ok", f"{there} × {gpus.gpu_model() or 'GPU'}, driver {driver}"
        if not gpus.has_control_device():
            step = "start the container with NVIDIA's runtime (docker run --gpus all)"
            yield "failure", "/dev/nvidiactl is missing, without which no program reaches a GPU", step


def _torch(machine: ExaminedMachine) -> Lines:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield "failure", "torch is not installed", "pip install 'muster-train[all]'"
        return
    if not (there := gpus.gpu_count()):
        yield "ok", version
        return
    facts = machine.torch_facts
    if isinstance(facts, str):
        yield "failure", f"torch {version} can't be loaded: {facts}", "pip install --force-reinstall torch"
    else:
        yield torch_against_driver(facts, there)


def torch_against_driver(facts: Mapping[str, Any], there: int) -> tuple[Any, str, str]:
    """Return the line about a torch on a machine with so many GPUs; `facts` are those of muster.trainer.gpus."""
    version, built, driver = facts["torch"], facts["built_for"], facts["driver"]
    if not built:
        step = "install a torch with CUDA that this driver can run (see nvidia-smi for the newest), in this environment"
        return "failure", f"torch {version} was built without CUDA: no job trains on the {plural(there, 'GPU')}", step
    cuda = re.search(r"CUDA (\d+)", built)
    needed = DRIVERS_MIN.get(int(cuda.group(1))) if cuda else None
    if needed is not None and driver and int(driver.split(".")[0]) < needed:
        step = f"install driver {needed} or newer, or a torch for an older CUDA"
        return (
            "failure",
            f"torch {version} was built for {built}, which needs driver {needed}; this one is {driver}",
            step,
        )
    if facts["count"] < there:
        why = f" ({facts['words']})" if facts["words"] else ""
        hidden = facts["visible"]
        step = f"CUDA_VISIBLE_DEVICES={hidden} hides some" if hidden is not None else "look at `nvidia-smi` and `dmesg`"
        state = "failure" if not facts["count"] else "warning"
        return state, f"torch {version} for {built} sees {facts['count']} of {plural(there, 'GPU')}{why}", step
    return "ok", f"{version} for {built}; it sees {plural(there, 'GPU')}", ""


def _nccl(machine: ExaminedMachine) -> Lines:
    if not gpus.gpu_count() or isinstance(facts := machine.torch_facts, str) or not facts["built_for"]:
        return
    if facts["nccl"]:
        yield "ok", facts["nccl"]
    else:
        yield "failure", "this torch has no NCCL: gangs of several GPUs can't train", "install another build of torch"


def _disk(machine: ExaminedMachine) -> Lines:
    folder = machine.state.root
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        yield "failure", f"{machine.state.root} can't be written", "choose another: muster up --state FOLDER"
        return
    free = shutil.disk_usage(folder).free
    words, step = f"{size(free)} free for {machine.state.root}", "choose a larger disk: muster up --state FOLDER"
    if free < DISK_BYTES_MIN:
        yield "failure", words, step
    elif free < DISK_BYTES_FEW:
        yield "warning", f"{words}; checkpoints of large models take more", step
    else:
        yield "ok", words


def _port(machine: ExaminedMachine) -> Lines:
    here = running.who(machine.state)
    if here is not None:
        yield "ok", f"`muster up` runs at {here.url or 'an address that it has yet to say'} (pid {here.pid})"
        return
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", machine.port))
        yield "ok", f"{machine.port} is free"
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"can't be had: {error.strerror}"
        yield "warning", f"{machine.port} {why}", f"muster up --port {machine.port + 1}"


def _shared_memory(_: ExaminedMachine) -> Lines:
    try:
        memory = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        yield "warning", f"{SHARED_MEMORY}: {error.strerror}", "mount a tmpfs there"
        return
    total = memory.f_blocks * memory.f_frsize
    if total < SHARED_BYTES_FEW:
        step = "in a container: docker run --ipc=host, or --shm-size=16g"
        yield "warning", f"{size(total)} in {SHARED_MEMORY}: several ranks on one machine may run out of it", step
    else:
        yield "ok", f"{size(total)} in {SHARED_MEMORY}"


def _isolation(_: ExaminedMachine) -> Lines:
    if gaps := sandbox.gaps():
        yield "warning", f"a job runs as you. It {'; it '.join(gaps)}", "let only people submit whom you trust so far"
    else:
        yield "ok", "Landlock and seccomp keep jobs to their own folders"


CHECKS: Mapping[str, Callable[[ExaminedMachine], Lines]] = {
    "python": _python,
    "packages": _packages,
    "gpus": _gpus,
    "torch": _torch,
    "nccl": _nccl,
    "disk": _disk,
    "port": _port,
    "shared memory": _shared_memory,
    "isolation of jobs": _isolation,
}
