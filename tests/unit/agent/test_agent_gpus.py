"""GPU health from a driver that answers, that is absent, that is old, and that loses a GPU."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pynvml
import pytest
from tests.unit.agent import fake_nvml
from tests.unit.agent.fake_nvml import FakeNvml

import muster.agent.gpus as module
from muster.agent.gpus import ABSENT_SECONDS, GpuSource
from muster.words.notices import Remedy
from muster.words.signals import SignalKind


def look(nvml: FakeNvml) -> tuple[GpuSource, list[tuple[SignalKind, Remedy, str]]]:
    gpus = GpuSource(nvml)
    return gpus, [(notice.kind, notice.remedy, notice.device) for notice in gpus.look()]


def test_the_stand_in_has_nothing_that_the_library_lacks() -> None:
    constants = {name for name in vars(fake_nvml) if name.startswith(("NVML", "nvml"))}
    functions = {name for name in vars(FakeNvml) if name.startswith("nvml")}
    assert len(functions) > 15
    assert {name for name in constants | functions if not hasattr(pynvml, name)} == set()
    for name in constants - {"NVMLError"}:
        assert getattr(pynvml, name) == getattr(fake_nvml, name), name
    for name in functions:
        ours = list(inspect.signature(getattr(FakeNvml, name)).parameters.values())[1:]  # without self
        inspect.signature(getattr(pynvml, name)).bind(*ours)


def test_the_agent_asks_for_nothing_that_the_library_lacks() -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    asked = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("nvml")}
    asked |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("NVML")}
    asked |= {*module.THROTTLES.values(), *module.LINK_ERRORS.values()}
    asked |= {f"NVML_GPU_RECOVERY_ACTION_{name}" for name in module.RECOVERY_ACTIONS}
    asked -= {"nvmlReturn"}  # a field of an answer
    assert len(asked) > 25
    assert {name for name in asked if not hasattr(pynvml, name)} == set()
    assert "nvmlReturn" in dict(pynvml.c_nvmlFieldValue_t._fields_)


def test_a_healthy_gpu_is_only_numbers() -> None:
    gpus, notices = look(FakeNvml(gpus=2))
    assert notices == []
    assert [(reading.index, reading.device, reading.uuid) for reading in gpus.readings] == [
        (0, "00000000:00:00.0", "GPU-0"),
        (1, "00000000:01:00.0", "GPU-1"),
    ]
    assert gpus.readings[0].values == {
        ("memory_used_bytes", ""): 10.0,
        ("memory_total_bytes", ""): 80.0,
        ("ecc_errors_total", "corrected"): 5.0,
        ("ecc_errors_total", "uncorrected"): 0.0,
        ("remapped_rows", "corrected"): 0.0,
        ("remapped_rows", "uncorrected"): 0.0,
        ("row_remap_pending", ""): 0.0,
        ("row_remap_failed", ""): 0.0,
        ("retired_pages", "single_bit"): 1.0,
        ("retired_pages", "double_bit"): 2.0,
        **{("throttled", reason): 0.0 for reason in module.THROTTLES},
        ("power_watts", ""): 250.0,
        ("temperature_celsius", ""): 61.0,
        ("nvlinks_down", ""): 0.0,
        **{("nvlink_errors_total", kind): 6.0 for kind in module.LINK_ERRORS},
        ("recovery_action", "none"): 1.0,
    }


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"lost": True}, [(SignalKind.GPU_FAULT, Remedy.REBOOT)]),
        ({"rows": (0, 2, 1, 0)}, []),
        ({"rows": (0, 2, 0, 1)}, [(SignalKind.GPU_FAULT, Remedy.EXCLUDE)]),
        ({"action": 1}, [(SignalKind.GPU_FAULT, Remedy.RESET)]),
        ({"action": 2}, [(SignalKind.GPU_FAULT, Remedy.REBOOT)]),
        ({"action": 3}, [(SignalKind.NODE_DRAIN, Remedy.DRAIN)]),
        ({"action": 4}, [(SignalKind.NODE_DRAIN, Remedy.DRAIN)]),
        ({"action": 99}, []),
        ({"throttle": 0x48}, []),
    ],
)
def test_what_a_gpus_state_asks_for(state: dict[str, object], found: list[tuple[SignalKind, Remedy]]) -> None:
    nvml = FakeNvml(gpus=2)
    gpus = GpuSource(nvml)
    gpus.look()
    nvml.gpus[1] |= state
    notices = gpus.look()
    assert [(notice.kind, notice.remedy) for notice in notices] == found
    assert {notice.device for notice in notices} <= {"00000000:01:00.0"}, "a lost GPU is named as it was known"


def test_a_question_without_an_answer_costs_only_itself() -> None:
    nvml = FakeNvml()
    nvml.unsupported = {"nvmlDeviceGetRetiredPages", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetFieldValues"}
    gpus, notices = look(nvml)
    names = {name for name, _ in gpus.readings[0].values}
    assert notices == []
    assert {"memory_used_bytes", "power_watts", "remapped_rows"} <= names
    assert names.isdisjoint({"retired_pages", "nvlinks_down", "recovery_action"})


def test_a_library_without_a_function_costs_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.delattr(fake_nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
    gpus, _ = look(FakeNvml())
    assert {name for name, _ in gpus.readings[0].values} >= {"power_watts", "temperature_celsius", "nvlinks_down"}


def test_a_driver_that_is_not_there_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml()
    nvml.broken = "no driver"
    gpus = GpuSource(nvml)
    assert (gpus.look(), gpus.look()) == ((), ())
    assert gpus.pause_seconds == ABSENT_SECONDS
    assert len(caplog.messages) == 1
    nvml.broken = None
    assert gpus.look() == ()
    assert (len(gpus.readings), gpus.pause_seconds) == (1, module.PAUSE_SECONDS)


def test_a_driver_that_is_replaced_under_us_is_found_again(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeNvml()
    gpus, _ = look(nvml)
    nvml.broken = "version mismatch"
    assert (gpus.look(), gpus.readings) == ((), ())
    nvml.broken = None
    gpus.look()
    assert len(gpus.readings) == 1


def test_this_machine_is_asked_without_harm() -> None:
    gpus = GpuSource()
    gpus.look()
    assert gpus.pause_seconds in (module.PAUSE_SECONDS, ABSENT_SECONDS)
