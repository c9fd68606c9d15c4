"""A job that asks for GPUs never trains on a CPU: it ends, and by the evidence it is the job's fault or the node's."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.unit.trainer.test_trainer_orders import ranks

from muster.local import gpus as machine
from muster.trainer import gpus
from muster.trainer.errors import NodeUnfit, UserError, exit_code
from muster.trainer.gpus import GpuFacts, must_have_gpus
from muster.trainer.launch import preflight
from muster.trainer.models import sharding
from muster.words.names import Env, ExitCode

WELL = GpuFacts("2.11.0+cu130", "CUDA 13.0", count=8, driver="580.65.06", control_device=True)
CPU_BUILD = GpuFacts("2.13.0+cpu", "", count=0, driver="580.65.06", control_device=True)


def test_a_node_with_enough_is_well() -> None:
    must_have_gpus(WELL, 8)
    must_have_gpus(WELL, 1)


@pytest.mark.parametrize(
    ("facts", "error", "words"),
    [
        (CPU_BUILD, UserError, ["8 GPUs", "torch 2.13.0+cpu", "built without CUDA", "driver 580.65.06", "gpusPerNode"]),
        (replace(CPU_BUILD, driver="", control_device=False), UserError, ["no NVIDIA driver is loaded"]),
        (
            replace(WELL, count=0, driver="470.57.02", words="The NVIDIA driver on your system is too old"),
            NodeUnfit,
            ["preflight failed", "torch 2.11.0+cu130 for CUDA 13.0 sees none", "driver 470.57.02", "is too old"],
        ),
        (
            replace(WELL, count=0, control_device=False),
            NodeUnfit,
            ["/dev/nvidiactl is missing", "driver 580.65.06", "torch 2.11.0+cu130"],
        ),
        (replace(WELL, count=7), NodeUnfit, ["8 GPUs per node", "sees 7"]),
        (replace(WELL, count=7, visible="0,1,2,3,4,5,6,7"), NodeUnfit, ["sees 7"]),
        (replace(WELL, count=1, visible="0"), UserError, ["CUDA_VISIBLE_DEVICES=0 hides them", "runtime.env"]),
        (replace(WELL, count=0, visible=""), UserError, ["hides them"]),
    ],
)
def test_whose_fault_it_is(facts: GpuFacts, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        must_have_gpus(facts, 8)
    assert [word for word in words if word not in str(raised.value)] == []


def test_the_nodes_fault_leaves_the_node_at_once() -> None:
    assert exit_code(NodeUnfit("")) == ExitCode.PREFLIGHT_EXCLUDE


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_rank_of_a_gpu_job_takes_no_cpu() -> None:
    with pytest.raises((UserError, NodeUnfit), match=f"asks for 2 GPUs per node, and .*{re.escape(torch.__version__)}"):
        sharding.choose_device(ranks(2), {Env.DEVICE: "cuda"})


def test_the_preflight_stops_the_job_for_its_own_torch_and_leaves_the_node_for_its_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight, "CHECKS", {"gpus": preflight.gpus})
    monkeypatch.setattr(preflight, "GANG_CHECKS", {})
    monkeypatch.setenv(Env.TERMINATION_LOG, str(tmp_path / "end"))
    monkeypatch.setenv(Env.DEVICE, "cuda")

    def code(facts: GpuFacts, answers: str = "") -> int:
        monkeypatch.setenv(Env.PREFLIGHT, answers)
        monkeypatch.setattr(preflight, "read_facts", lambda: facts)
        return preflight.main()

    assert code(CPU_BUILD) == ExitCode.USER_ERROR
    assert "2.13.0+cpu" in (tmp_path / "end").read_text()
    assert code(replace(WELL, count=0, control_device=False)) == ExitCode.PREFLIGHT_EXCLUDE
    assert "/dev/nvidiactl is missing" in (tmp_path / "end").read_text()
    assert code(replace(WELL, count=0), "gpus=retry") == ExitCode.PREFLIGHT_FAILED
    assert code(CPU_BUILD, "gpus=retry") == ExitCode.USER_ERROR, "every node has the same image"
    assert code(CPU_BUILD, "gpus=warn") == ExitCode.DONE
    monkeypatch.setenv(Env.DEVICE, "cpu")
    assert code(CPU_BUILD) == ExitCode.DONE


def test_facts_come_from_torch_and_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n"
    )
    monkeypatch.setattr(machine, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    facts = gpus.read_facts({"CUDA_VISIBLE_DEVICES": "0"})
    assert (facts.torch, facts.driver, facts.control_device) == (torch.__version__, "580.65.06", False)
    assert facts.visible == "0"
    (tmp_path / "nvidiactl").touch()
    assert gpus.read_facts({}).control_device


def test_the_gpus_of_a_machine_are_counted_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.setattr(machine, "_nvml_count", lambda: 0)
    assert machine.gpu_count() == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    assert machine.gpu_count() == 2
    monkeypatch.setattr(machine, "_nvml_count", lambda: 4)
    assert machine.gpu_count() == 4


def test_gpus_that_have_no_numbers_in_dev_are_not_called_absent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "DEVICES", tmp_path)
    monkeypatch.setattr(machine, "_nvml_count", lambda: 0)
    (tmp_path / "dxg").touch()
    assert machine.gpu_count() is None
