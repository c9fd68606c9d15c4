"""The GPUs of this machine, as the kernel and NVML show them, without loading torch."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Mapping
from pathlib import Path

from muster.contract.names import Env

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
    found = max(sum(bool(_GPU.fullmatch(name)) for name in names), _nvml_count())
    return None if not found and any(name in names for name in _UNCOUNTED) else found


def _nvml_count() -> int:
    with contextlib.suppress(Exception):  # not installed, or there is no driver for it to ask
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return int(nvml.nvmlDeviceGetCount())
    return 0


def has_control_device() -> bool:
    """Return whether the device exists through which every CUDA program reaches NVIDIA's driver."""
    return (DEVICES / "nvidiactl").exists() or any((DEVICES / name).exists() for name in _UNCOUNTED)


def driver_version() -> str:
    """The version of NVIDIA's kernel driver; empty where none is loaded."""
    try:
        found = _VERSION.search(DRIVER.read_text())
    except OSError:
        return ""
    return found.group() if found else ""


def pretends(environ: Mapping[str, str]) -> bool:
    """Return whether this platform only pretends to have GPUs, so that queues and pages can be tried without any."""
    return environ.get(Env.PRETEND_GPUS, "") not in ("", "0")
