"""Use of the hardware beside each step: of this process, of the machine's network and of its GPU."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from muster.trainer.train.hardware import LOOK_SECONDS, HardwareReader

NET = """Inter-|   Receive                |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 9999999 1 0 0 0 0 0 0 9999999 1 0 0 0 0 0 0
  eth0: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0
"""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "net").mkdir()
    (tmp_path / "self").mkdir()
    (tmp_path / "net/dev").write_text(NET.format(received=1_000, sent=500))
    (tmp_path / "self/statm").write_text("900 25 3 1 0 5 0\n")
    return tmp_path


def test_rates_are_of_the_time_between_two_looks(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, used = Clock(), [10.0]
    monkeypatch.setattr(time, "process_time", lambda: used[0])
    reader = HardwareReader(torch.device("cpu"), clock, proc)
    assert reader.use() == {}, "a moment ago"
    clock.now += 4.0
    used[0] += 6.0
    (proc / "net/dev").write_text(NET.format(received=9_000, sent=2_500))
    assert reader.use() == {
        "cpuCores": 1.5,
        "networkReceivedBytes": 2_000.0,
        "networkSentBytes": 500.0,
        "processMemoryBytes": 102_400.0,
    }
    clock.now += LOOK_SECONDS / 2
    assert reader.use() == {}


def test_what_a_machine_does_not_tell_is_left_out(tmp_path: Path) -> None:
    clock = Clock()
    reader = HardwareReader(torch.device("cpu"), clock, tmp_path / "nothing")
    clock.now += LOOK_SECONDS
    assert set(reader.use()) == {"cpuCores"}


class Nvml:
    """NVML of one GPU that does not tell its power."""

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        assert handle == "GPU-1234"
        return SimpleNamespace(gpu=83, memory=12)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=5 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        raise RuntimeError("Not Supported")


def test_the_gpu_that_torch_uses_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1234"))
    clock = Clock()
    reader = HardwareReader(torch.device("cuda", 0), clock, tmp_path, Nvml())
    clock.now += LOOK_SECONDS
    use = reader.use()
    assert (use["gpuUse"], use["gpuMemoryBytes"]) == (0.83, float(f"{5 << 30:.4g}"))
    assert "gpuWatts" not in use
