"""The starter of ranks: torchrun's variables, and what one rank's end means for the others."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.polling import eventually

from muster.worker.ranks import (
    AfterEnd,
    ProcessEnd,
    RankLayout,
    RankProcesses,
    after_end,
    rank_environment,
    read_layout,
)

FOR_EVER = "while :; do sleep 1000 & wait; done"


def layout(ranks: int = 2, nodes: int = 1, node: int = 0) -> RankLayout:
    return RankLayout(nodes, node, ranks, "127.0.0.1", 0)


def shell(script: str, folder: Path, ranks: int = 2, **more: Any) -> RankProcesses:
    return RankProcesses(layout(ranks), ["sh", "-c", script], os.environ, directory=str(folder), **more)


def test_a_rank_has_the_variables_that_torchrun_sets() -> None:
    """Those of LocalElasticAgent._start_workers and DefaultLogsSpecs.reify of torch 2.13, for rank 3 of two nodes."""
    two_nodes = read_layout(
        {
            "PET_NNODES": "2",
            "PET_NODE_RANK": "1",
            "PET_NPROC_PER_NODE": "2",
            "PET_MASTER_ADDR": "host-0",
            "PET_MASTER_PORT": "29500",
        }
    )
    mine = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_ERROR_FILE": "/an/outer/launcher's", "LANG": "C"}
    assert rank_environment(two_nodes, 3, mine, run_id="uid-1", error_file="/w/rank-3.error.json") == {
        "LANG": "C",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "host-0",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "uid-1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/w/rank-3.error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


@pytest.mark.parametrize(
    ("code", "stopping", "decision"),
    [
        (0, False, AfterEnd.LEAVE_OTHERS),
        (1, False, AfterEnd.STOP_OTHERS),
        (-signal.SIGKILL, False, AfterEnd.STOP_OTHERS),
        (86, True, AfterEnd.LEAVE_OTHERS),
    ],
)
def test_one_function_decides_what_follows_from_a_rank_s_end(code: int, stopping: bool, decision: AfterEnd) -> None:
    assert after_end(ProcessEnd(0, code, 1.0), stopping) is decision


def test_a_failed_rank_is_reported_at_once_and_ends_the_others_also_those_that_ignore_sigterm(tmp_path: Path) -> None:
    script = f"trap '' TERM; touch here-$RANK; [ $RANK = 0 ] && {FOR_EVER}; until [ -e here-0 ]; do :; done; exit 7"
    reports: list[tuple[int, int, bool, tuple[int, ...]]] = []

    def on_end(end: ProcessEnd, stopped_others: bool) -> None:
        reports.append((end.rank, end.exit_code, stopped_others, tuple(ranks.pids())))

    ranks = shell(script, tmp_path, shutdown_seconds=0.2)
    ranks.start()
    ends = ranks.wait(on_end)
    assert [(end.rank, end.exit_code) for end in ends] == [(1, 7), (0, -signal.SIGKILL)]
    assert [end.words for end in ends] == ["rank 1 ended with exit code 7", "rank 0 was killed by SIGKILL"]
    assert reports == [(1, 7, True, (0,)), (0, -signal.SIGKILL, False, ())]


def test_the_whole_process_group_of_a_rank_is_killed(tmp_path: Path) -> None:
    script = "trap '' TERM; [ $RANK = 0 ] || { until [ -e pid ]; do :; done; exit 1; }\n"
    script += "sleep 1000 &\necho $! > pid.new; mv pid.new pid; while :; do wait; done"
    ranks = shell(script, tmp_path, shutdown_seconds=0.2)
    ranks.start()
    assert len(ranks.wait()) == 2
    pid = (tmp_path / "pid").read_text().strip()
    eventually(lambda: _is_gone(pid), "the end of the rank's own child")


def test_a_rank_that_ends_well_leaves_the_others(tmp_path: Path) -> None:
    ranks = shell("[ $RANK = 0 ] && exit 0; until [ -e go ]; do :; done", tmp_path)
    ranks.start()
    ends = ranks.wait(lambda end, stopped_others: (tmp_path / "go").touch())
    assert [(end.rank, end.exit_code) for end in ends] == [(0, 0), (1, 0)]


def test_ranks_that_were_all_asked_to_stop_end_in_their_own_time(tmp_path: Path) -> None:
    ranks = shell("[ $RANK = 0 ] && exit 86; until [ -e go ]; do :; done; exit 85", tmp_path, shutdown_seconds=0.0)
    ranks.start()
    ends = ranks.wait(lambda end, stopped_others: (tmp_path / "go").touch(), stopping=lambda: True)
    assert [(end.rank, end.exit_code) for end in ends] == [(0, 86), (1, 85)]


def test_where_one_can_t_be_started_none_is_left(tmp_path: Path) -> None:
    """Rank 1's folder goes while rank 0 starts, which is how a machine runs out of what a process needs."""
    started: list[int] = []

    def error_file(rank: int) -> str:
        if rank == 1:
            started.extend(ranks.started().values())
            raise OSError("no more processes")
        return ""

    ranks = shell(FOR_EVER, tmp_path, error_file=error_file)
    with pytest.raises(OSError, match="no more processes"):
        ranks.start()
    eventually(lambda: all(_is_gone(str(pid)) for pid in started), "the end of rank 0")
    assert len(started) == 1


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_on_which_somebody_listens_is_refused_before_any_rank_starts(tmp_path: Path, family: int) -> None:
    with socket.socket(family) as taken:
        try:
            taken.bind(("::" if family == socket.AF_INET6 else "", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        taken.listen()
        port = taken.getsockname()[1]
        ranks = RankProcesses(RankLayout(2, 0, 1, "127.0.0.1", port), ["true"], os.environ)
        with pytest.raises(OSError, match=f"port {port} of the rendezvous"):
            ranks.start()
        assert ranks.started() == {}
        other = RankProcesses(RankLayout(2, 1, 1, "127.0.0.1", port), ["true"], os.environ)  # it hosts no store
        other.start()
        assert [end.exit_code for end in other.wait()] == [0]


@pytest.mark.parametrize(
    ("once", "expected"), [(True, lambda node: [node]), (False, lambda node: list(range(4 * node, 4 * node + 4)))]
)
def test_a_worker_numbers_its_processes_by_rank_or_by_worker(once: bool, expected: Callable[[int], list[int]]) -> None:
    for node in range(3):
        assert list(layout(4, nodes=3, node=node).processes(once)) == expected(node)


def _is_gone(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
