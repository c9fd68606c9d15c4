"""GPU health through NVML. Driver and library may be absent, or older than a question: that is said once, and the rest
works. One call that fails is one number that is missing.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from muster.agent.source import LogOnChange
from muster.agent.xid import recovery_remedy
from muster.words.notices import Notice, Remedy
from muster.words.signals import SignalKind

PAUSE_SECONDS, ABSENT_SECONDS = 5.0, 60.0
LINKS_MAX = 18  # of an H100
# What the driver may ask for; NVML_GPU_RECOVERY_ACTION_* gives their numbers.
RECOVERY_ACTIONS = ("NONE", "GPU_RESET", "NODE_REBOOT", "DRAIN_P2P", "DRAIN_AND_RESET", "BUS_RESET", "SYSTEM_REBOOT")
THROTTLES = {
    "power": "nvmlClocksEventReasonSwPowerCap",
    "thermal": "nvmlClocksEventReasonSwThermalSlowdown",
    "hardware": "nvmlClocksEventReasonHwSlowdown",
    "hardware_thermal": "nvmlClocksEventReasonHwThermalSlowdown",
    "power_brake": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
}
LINK_ERRORS = {
    "replay": "NVML_NVLINK_ERROR_DL_REPLAY",
    "recovery": "NVML_NVLINK_ERROR_DL_RECOVERY",
    "crc_flit": "NVML_NVLINK_ERROR_DL_CRC_FLIT",
    "crc_data": "NVML_NVLINK_ERROR_DL_CRC_DATA",
}


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment."""

    index: int
    device: str  # PCI address
    uuid: str
    lost: bool = False
    # (metric without its prefix, value of its label) to number, for everything that NVML could tell.
    values: dict[tuple[str, str], float] = field(default_factory=dict)


class GpuSource:
    """Source of the node's GPUs, read by NVML. `nvml` is the library; None takes nvidia-ml-py where it is installed."""

    name = "nvml"

    def __init__(self, nvml: Any = None) -> None:
        self.pause_seconds = PAUSE_SECONDS
        self._nvml = nvml
        self._ready = False
        self._identities: dict[int, tuple[str, str]] = {}  # index → device, uuid: a GPU that is lost can't say them
        self._unasked: set[tuple[int, str]] = set()  # what this GPU or driver has no answer to
        self._log = LogOnChange(self.name)
        self.readings: tuple[GpuReading, ...] = ()

    def look(self) -> tuple[Notice, ...]:
        if not self._ready and not self._start():
            return ()
        try:
            self.readings = tuple(self._read(index) for index in range(self._count()))
        except Exception as error:  # the driver was unloaded, or replaced by another version
            self._log.say(f"NVML stopped to answer: {error}; asking again every {ABSENT_SECONDS:.0f} s")
            self._ready, self.readings, self.pause_seconds = False, (), ABSENT_SECONDS
            return ()
        return tuple(notice for reading in self.readings for notice in judge(reading))

    def acknowledge(self) -> None:
        """Do nothing: the driver is asked again anyway."""

    def _start(self) -> bool:
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            versions = (
                f"driver {_text(self._nvml.nvmlSystemGetDriverVersion())}, {self._nvml.nvmlDeviceGetCount()} GPUs"
            )
        except Exception as error:  # no library, no driver, or one that does not match the other
            self._log.say(f"no GPU health: {type(error).__name__}: {error}")
            self.pause_seconds = ABSENT_SECONDS
            return False
        self._log.fine(f"NVML answers: {versions}")
        self._ready, self.pause_seconds = True, PAUSE_SECONDS
        return True

    def _count(self) -> int:
        """Lost GPUs drop out of the driver's count on some versions, and must still be reported."""
        return max(int(self._nvml.nvmlDeviceGetCount()), len(self._identities))

    def _read(self, index: int) -> GpuReading:
        nvml = self._nvml
        device, uuid = self._identities.get(index, ("", ""))
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if not device:
                device = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
                uuid = _text(nvml.nvmlDeviceGetUUID(handle))
                self._identities[index] = (device, uuid)
            values: dict[tuple[str, str], float] = {}
            for question, ask in self._questions(handle):
                if (index, question) in self._unasked:
                    continue
                try:
                    values |= {(name, label): float(value) for name, label, value in ask()}
                except (nvml.NVMLError, AttributeError, TypeError, ValueError) as error:
                    if _is_lost(nvml, error):
                        raise
                    self._unasked.add((index, question))
        except nvml.NVMLError as error:
            if _is_lost(nvml, error):
                return GpuReading(index, device or f"gpu {index}", uuid, lost=True)
            return GpuReading(index, device or f"gpu {index}", uuid)
        return GpuReading(index, device, uuid, values=values)

    def _questions(self, handle: Any) -> Iterable[tuple[str, Callable[[], Iterable[tuple[str, str, float]]]]]:
        """Yield the questions, each to be asked alone, so that one that this driver can't answer costs only itself."""
        nvml = self._nvml

        def memory() -> Iterable[tuple[str, str, float]]:
            info = nvml.nvmlDeviceGetMemoryInfo(handle)
            yield "memory_used_bytes", "", info.used
            yield "memory_total_bytes", "", info.total

        def ecc(label: str, kind: str) -> Iterable[tuple[str, str, float]]:
            yield (
                "ecc_errors_total",
                label,
                nvml.nvmlDeviceGetTotalEccErrors(handle, getattr(nvml, kind), nvml.NVML_AGGREGATE_ECC),
            )

        def remapped() -> Iterable[tuple[str, str, float]]:
            corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
            yield "remapped_rows", "corrected", corrected
            yield "remapped_rows", "uncorrected", uncorrected
            yield "row_remap_pending", "", pending
            yield "row_remap_failed", "", failed

        def retired() -> Iterable[tuple[str, str, float]]:
            single = nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS
            yield "retired_pages", "single_bit", len(nvml.nvmlDeviceGetRetiredPages(handle, single))
            double = nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
            yield "retired_pages", "double_bit", len(nvml.nvmlDeviceGetRetiredPages(handle, double))

        def throttled() -> Iterable[tuple[str, str, float]]:
            reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            for label, name in THROTTLES.items():
                yield "throttled", label, bool(reasons & getattr(nvml, name))

        def links() -> Iterable[tuple[str, str, float]]:
            totals = dict.fromkeys(LINK_ERRORS, 0)
            down = 0
            for link in range(LINKS_MAX):
                try:
                    active = nvml.nvmlDeviceGetNvLinkState(handle, link)
                except nvml.NVMLError as error:
                    if _is_lost(nvml, error) or link == 0:
                        raise
                    break
                down += not active
                for label, name in LINK_ERRORS.items() if active else ():
                    try:
                        totals[label] += nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, getattr(nvml, name))
                    except nvml.NVMLError as error:
                        if _is_lost(nvml, error):
                            raise
            yield "nvlinks_down", "", down
            for label, total in totals.items():
                yield "nvlink_errors_total", label, total

        def recovery() -> Iterable[tuple[str, str, float]]:
            (answer,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
            if answer.nvmlReturn != nvml.NVML_SUCCESS:
                raise ValueError("not supported")
            numbers = {getattr(nvml, f"NVML_GPU_RECOVERY_ACTION_{name}", None): name for name in RECOVERY_ACTIONS}
            yield "recovery_action", numbers.get(answer.value.uiVal, "UNKNOWN").lower(), 1

        yield "memory", memory
        yield "ecc corrected", lambda: ecc("corrected", "NVML_MEMORY_ERROR_TYPE_CORRECTED")
        yield "ecc uncorrected", lambda: ecc("uncorrected", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED")
        yield "remapped rows", remapped
        yield "retired pages", retired
        yield "throttling", throttled
        yield "power", lambda: [("power_watts", "", nvml.nvmlDeviceGetPowerUsage(handle) / 1000)]
        yield (
            "temperature",
            lambda: [("temperature_celsius", "", nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))],
        )
        yield "links", links
        yield "recovery", recovery


def judge(reading: GpuReading, now: Callable[[], float] = time.time) -> Iterable[Notice]:
    """Return the findings for one GPU's state."""
    if reading.lost:
        yield _fault(reading, Remedy.REBOOT, "the driver has lost it", now())
    if reading.values.get(("row_remap_failed", "")):
        yield _fault(reading, Remedy.EXCLUDE, "a row of its memory could not be remapped: it must be replaced", now())
    for name, label in reading.values:
        if name == "recovery_action" and (remedy := recovery_remedy(label.replace("_", " "))) is not Remedy.RECORD:
            yield _fault(reading, remedy, f"the driver asks for {label}", now())


def _fault(reading: GpuReading, remedy: Remedy, what: str, at: float) -> Notice:
    kind = SignalKind.NODE_DRAIN if remedy is Remedy.DRAIN else SignalKind.GPU_FAULT
    message = f"GPU {reading.index} ({reading.device}): {what}"
    return Notice(kind=kind, remedy=remedy, at=at, message=message, source="nvml", device=reading.device)


def _is_lost(nvml: Any, error: BaseException) -> bool:
    return getattr(error, "value", None) in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)


def _text(value: object) -> str:
    """Old versions of the library answer in bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
