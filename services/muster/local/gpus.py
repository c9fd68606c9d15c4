"""The GPUs of this machine, as the kernel and NVML show them, without loading torch."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Mapping
from pathlib import Path

from muster.words.names import Env

DEVICES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia/version")
_GPU = re.compile(r"nvidia\d+")
_VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)*\b")
# Windows' subsystem for Linux and AMD's driver: their GPUs can't be counted by names in /dev.
_UNCOUNTED = ("dxg", "kfd")


def gpu_count() -> int | None:
    """Return the number of GPUs of this machine; None if it can't be determined without torch."""
    try:
        names = [path.name for path in DEVICES.iterdir()]
    except OSError:
        return None
    count = max(sum(bool(_GPU.fullmatch(name)) for name in names), _nvml_count())
    return None if not count and any(name in names for name in _UNCOUNTED) else count


def _nvml_count() -> int:
    with contextlib.suppress(Exception):  # not installed, or there is no driver for it to ask
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return int(nvml.nvmlDeviceGetCount())
    return 0


def gpu_model() -> str:
    """Return the model of this machine's first GPU, such as `H100 80GB HBM3`; empty if NVML does not say it."""
    with contextlib.suppress(Exception):
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        name = nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0))
        return (name.decode() if isinstance(name, bytes) else str(name)).removeprefix("NVIDIA ")
    return ""


def gpu_bytes() -> int | None:
    """Return the memory of this machine's first GPU; None if NVML does not say it."""
    with contextlib.suppress(Exception):
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).total)
    return None


def own_gpu_count(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that a platform may give away unasked: all of the machine, or the first ones, where
    CUDA_VISIBLE_DEVICES names those; none where it names others, because workers get GPUs from the first one on."""
    there = gpu_count() or 0
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return there
    indices = [each.strip() for each in visible.split(",") if each.strip()]
    first_ones = indices == [str(number) for number in range(len(indices))]
    return len(indices) if first_ones and len(indices) <= there else 0


def has_control_device() -> bool:
    """Return whether the device exists through which every CUDA program reaches NVIDIA's driver."""
    return (DEVICES / "nvidiactl").exists() or any((DEVICES / name).exists() for name in _UNCOUNTED)


def driver_version() -> str:
    """The version of NVIDIA's kernel driver; empty where none is loaded."""
    try:
        match = _VERSION.search(DRIVER.read_text())
    except OSError:
        return ""
    return match.group() if match else ""


def pretends(environ: Mapping[str, str]) -> bool:
    """Return whether this platform only pretends to have GPUs, so that queues and pages can be tried without any."""
    return environ.get(Env.PRETEND_GPUS, "") not in ("", "0")
