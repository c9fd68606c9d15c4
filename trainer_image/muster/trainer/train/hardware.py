"""Use of the hardware by rank 0: processor and memory of its process, network of its machine, and its GPU.

The step's record carries it to the page of the job. Prometheus and the node agent have the same of every node; a
person who looks at one job wants to see beside its loss whether the GPU has work.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PROC = Path("/proc")
# Between two looks. A tenth of it costs a tenth of a millisecond at every step of a small model, and its processor's
# use is mere noise; ten times of it shows nothing of a pause for a checkpoint.
LOOK_SECONDS = 2.0
_PAGE_BYTES = 4096


class HardwareReader:
    """Reads the hardware's use now and then. What this machine does not tell is left out."""

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.monotonic, proc: Path = PROC, nvml: Any = None
    ) -> None:
        self._clock, self._proc = clock, proc
        self._gpu = _gpu_of(device, nvml)
        self._looked_at, self._counted = clock(), self._counters()

    def use(self) -> dict[str, float]:
        """Return what was used since the last look, by name; empty where that was a moment ago."""
        now = self._clock()
        passed = now - self._looked_at
        if passed < LOOK_SECONDS:
            return {}
        before, self._counted = self._counted, self._counters()
        self._looked_at = now
        rates = {name: (value - before[name]) / passed for name, value in self._counted.items() if name in before}
        return {name: float(f"{value:.4g}") for name, value in {**rates, **self._levels()}.items()}

    def _counters(self) -> dict[str, float]:
        """Return what only grows: processor seconds of this process, and bytes of the machine's network."""
        counters = {"cpuCores": time.process_time()}
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = (self._proc / "net/dev").read_text().splitlines()[2:]
            fields = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines)}
            cards = [values for name, values in fields.items() if name != "lo"]
            counters["networkReceivedBytes"] = float(sum(int(values[0]) for values in cards))
            counters["networkSentBytes"] = float(sum(int(values[8]) for values in cards))
        return counters

    def _levels(self) -> dict[str, float]:
        levels: dict[str, float] = {}
        with contextlib.suppress(OSError, ValueError, IndexError):
            levels["processMemoryBytes"] = float(int((self._proc / "self/statm").read_text().split()[1]) * _PAGE_BYTES)
        if self._gpu is not None:
            nvml, handle = self._gpu
            with contextlib.suppress(Exception):  # NVML's errors are its own, and a GPU may lack any of these
                levels["gpuUse"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            with contextlib.suppress(Exception):
                levels["gpuMemoryBytes"] = float(nvml.nvmlDeviceGetMemoryInfo(handle).used)
            with contextlib.suppress(Exception):
                levels["gpuWatts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1_000
        return levels


def _gpu_of(device: torch.device, nvml: Any) -> tuple[Any, Any] | None:
    """Return NVML and its handle of the device; None where there is no GPU, or nvidia-ml-py is not installed."""
    if device.type != "cuda":
        return None
    with contextlib.suppress(Exception):
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        # By its UUID: CUDA_VISIBLE_DEVICES renumbers what torch sees, and NVML sees all.
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return nvml, nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    return None
