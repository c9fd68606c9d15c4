"""The preflight's all-reduce over a gang of two nodes, each with two ranks, over gloo."""

import os
import subprocess
import sys

import pytest
from tests.ports import free_port

from muster.trainer.launch import all_reduce_check


def begin(node: int, nodes: int, port: int, **more: str) -> "subprocess.Popen[str]":
    settings = {
        "PET_NNODES": str(nodes), "PET_NODE_RANK": str(node), "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port - all_reduce_check.PORT_OFFSET), "MUSTER_DEVICE": "cpu", "OMP_NUM_THREADS": "1",
        "MUSTER_PREFLIGHT": "disk=warn",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "muster.trainer.launch.preflight"], env=os.environ | settings | more, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_gang_adds_up_before_it_trains() -> None:
    port = free_port()
    nodes = [begin(index, 2, port) for index in range(2)]
    said = [process.communicate(timeout=800) for process in nodes]
    assert [process.returncode for process in nodes] == [0, 0], said
    assert "4 ranks added up over gloo" in said[0][0]


def test_one_node_has_nobody_to_add_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "1")
    assert all_reduce_check.check_all_reduce() is None


def test_others_that_do_not_come_are_no_fault_of_this_node(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its node is not charged: the launcher's own rendezvous will say who is missing."""
    port = free_port()
    for name, value in {
        "PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port - all_reduce_check.PORT_OFFSET), "MUSTER_DEVICE": "cpu",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(all_reduce_check, "MEETING_SECONDS", 2.0)
    assert all_reduce_check.check_all_reduce() is None
    assert "not all of the gang came in time" in capfd.readouterr().err
