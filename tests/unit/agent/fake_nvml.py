"""NVML with as many GPUs as a test wants. Each name here exists in nvidia-ml-py: test_agent_gpus.py sees to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 0, 3, 15, 16
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_AGGREGATE_ECC = 0, 1, 1
NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS, NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR = 0, 1
NVML_TEMPERATURE_GPU = 0
NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY = 0, 1
NVML_NVLINK_ERROR_DL_CRC_FLIT, NVML_NVLINK_ERROR_DL_CRC_DATA = 2, 3
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
NVML_GPU_RECOVERY_ACTION_NONE, NVML_GPU_RECOVERY_ACTION_GPU_RESET, NVML_GPU_RECOVERY_ACTION_NODE_REBOOT = 0, 1, 2
NVML_GPU_RECOVERY_ACTION_DRAIN_P2P, NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET = 3, 4
nvmlClocksEventReasonSwPowerCap, nvmlClocksEventReasonHwSlowdown = 0x4, 0x8
nvmlClocksEventReasonSwThermalSlowdown, nvmlClocksEventReasonHwThermalSlowdown = 0x20, 0x40
nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80


class FakeNvml:
    """gpus: state of each. unsupported: functions that this driver has no answer to. Looks like the module."""

    def __init__(self, gpus: int = 1) -> None:
        self.gpus: list[dict[str, Any]] = [
            {"lost": False, "rows": (0, 0, 0, 0), "throttle": 0, "action": 0, "ecc": (5, 0), "links": 2}
            for _ in range(gpus)
        ]
        self.unsupported: set[str] = set()
        self.broken: str | None = None

    def __getattr__(self, name: str) -> Any:
        if name in globals():
            return globals()[name]
        raise AttributeError(name)

    def _gpu(self, name: str, handle: int) -> dict[str, Any]:
        if name in self.unsupported:
            raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
        if self.gpus[handle]["lost"]:
            raise NVMLError(NVML_ERROR_GPU_IS_LOST)
        return self.gpus[handle]

    def nvmlInit(self) -> None:
        if self.broken:
            raise NVMLError(12)

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.0"

    def nvmlDeviceGetCount(self) -> int:
        if self.broken:
            raise NVMLError(1)
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._gpu("nvmlDeviceGetHandleByIndex", index)
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0".encode())

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self._gpu("nvmlDeviceGetMemoryInfo", handle)
        return SimpleNamespace(used=10, total=80)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return int(self._gpu("nvmlDeviceGetTotalEccErrors", handle)["ecc"][kind])

    def nvmlDeviceGetRemappedRows(self, handle: int) -> Any:
        return self._gpu("nvmlDeviceGetRemappedRows", handle)["rows"]

    def nvmlDeviceGetRetiredPages(self, handle: int, cause: int) -> list[int]:
        self._gpu("nvmlDeviceGetRetiredPages", handle)
        return [1, 2][: cause + 1]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return int(self._gpu("nvmlDeviceGetCurrentClocksEventReasons", handle)["throttle"])

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._gpu("nvmlDeviceGetPowerUsage", handle)
        return 250_000

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self._gpu("nvmlDeviceGetTemperature", handle)
        return 61

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self._gpu("nvmlDeviceGetNvLinkState", handle)["links"]:
            raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
        return 1

    def nvmlDeviceGetNvLinkErrorCounter(self, handle: int, link: int, counter: int) -> int:
        self._gpu("nvmlDeviceGetNvLinkErrorCounter", handle)
        return 3

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:
        action = self._gpu("nvmlDeviceGetFieldValues", handle)["action"]
        value = SimpleNamespace(uiVal=action)
        return [SimpleNamespace(nvmlReturn=NVML_SUCCESS, value=value) for _ in fields]
