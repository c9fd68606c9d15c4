"""Threads of a rank: as many as its control group and its peers leave, and waiting without keeping a core busy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.worker import cores

# Does what torch does between two parallel regions: one thread has work, the other waits for it.
WAITING = """
import os, time, torch
torch.set_num_threads(2)
a = torch.rand(4_000_000)
(a + a).sum()  # the threads are there, and have work no more
began, busy = time.perf_counter(), time.process_time()
for _ in range(200):
    (a[:200_000] * 2).sum()
    time.sleep(0.0005)
print(time.process_time() - busy)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", None), ("150000 100000", 1.5), ("50000 100000", 0.5), ("-1", None), ("200000", 2.0), ("", None)],
)
def test_a_control_group_s_quota(tmp_path: Path, text: str, expected: float | None) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert cores._quota(tmp_path / "cpu.max") == expected
    assert cores._quota(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("quota", "ranks", "threads"), [(None, 1, 8), (None, 3, 2), (None, 16, 1), (2.5, 1, 3), (0.5, 1, 1), (64.0, 2, 4)]
)
def test_threads_follow_the_cores_that_are_ours(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "_quota", lambda path: quota)
    environ: dict[str, str] = {}
    cores.share_cores(ranks, environ)
    assert environ == {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def test_what_the_job_sets_stays() -> None:
    asked = {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "ACTIVE", "KMP_BLOCKTIME": "20"}
    environ = dict(asked)
    cores.share_cores(2, environ)
    assert environ == asked


def test_threads_that_wait_use_no_core() -> None:
    """With the environment that a rank gets, torch's threads sleep between two parallel regions."""

    def cpu_seconds(environ: dict[str, str]) -> float:
        done = subprocess.run([sys.executable, "-c", WAITING], env=environ, capture_output=True, text=True, check=True)
        return float(done.stdout)

    bare = {name: value for name, value in os.environ.items() if name not in cores.PASSIVE_WAITING}
    ours: dict[str, str] = {**bare, "OMP_NUM_THREADS": "2"}
    cores.share_cores(1, ours)
    spinning = cpu_seconds({**bare, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE"})
    assert cpu_seconds(ours) < spinning
