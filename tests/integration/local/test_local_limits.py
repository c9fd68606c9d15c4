"""What the code of a job takes of a shared machine beyond what it may: the real launcher ends it, and says why."""

from __future__ import annotations

import json
import mmap
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.integration.local.house import House
from tests.integration.local.test_local_trainer import submit
from tests.polling import WAIT_SECONDS_MAX

from muster.operator.local import processes
from muster.plan.advice import advice
from muster.trainer.launch import limits
from muster.words.base import dump
from muster.words.signals import Cause, WorkerExit
from muster.words.status import Phase

# Python runs it in each rank before anything else, from a folder that the job names in its PYTHONPATH.
GREEDY = """
import os, subprocess, time
if "LOCAL_RANK" in os.environ:
    if os.environ["TAKES"] == "memory":
        held = bytearray(1 << 30)
        for page in range(0, len(held), 4096):
            held[page] = 1
    else:
        for _ in range(700):
            subprocess.Popen(["sleep", "600"])
    time.sleep(600)
"""


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "state", worker_command=None)
    yield house
    house.close()


@pytest.mark.long
def test_a_worker_that_takes_too_much_ends_and_its_job_says_of_what(house: House) -> None:
    modules = house.state.root.parent / "modules"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(GREEDY)
    house.environment["MUSTER_OPERATOR_WORKER_PATHS"] = json.dumps([str(modules)])
    house.start()

    def submitted(takes: str, **gang: Any) -> str:
        variables = {"PYTHONPATH": str(modules), "TAKES": takes}
        return submit(house, name=f"takes-{takes}", env=variables, gang={"nodes": 1, **gang})

    of_memory, of_processes = submitted("memory", resources={"memory": "900Mi"}), submitted("processes")

    failed = house.becomes(of_memory, Phase.FAILED)
    failure = failed.last_failure
    assert failure is not None
    assert (failure.cause, failure.exit_code) == (Cause.OUT_OF_MEMORY, 137), "as of a pod that was killed for it"
    held = r"worker 0 on local-\d: OOMKilled: its \d processes held (9\d\d|1,\d{3}) MiB of memory, .*"
    assert re.fullmatch(held + "gang.resources.memory lets them hold 900 MiB", failure.message), failure.message
    spec = dump(house.cluster.get(of_memory).spec)
    assert advice(failed, suspend=False, cancel=False, handed_over=True, ahead=0, spec=spec) == [
        "Clone the job with a larger gang.resources.memory: the worker was killed at its limit of 900Mi."
    ]

    failure = house.becomes(of_processes, Phase.FAILED).last_failure
    assert failure is not None
    assert (failure.cause, failure.exit_code) == (Cause.USER_ERROR, 80)
    assert re.fullmatch(r"the worker ran \d{3} processes, and may run 576 on a shared machine: .*", failure.message)
    assert not processes.scan(house.state), "all that they started is gone with them"


def test_memory_that_processes_share_counts_once() -> None:
    """A child that was forked has its parent's pages, and one buffer may be mapped by all ranks: either counts once."""
    # In a process of its own: a look takes in all that a process started, and what serves other tests is our child too.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        within, looks_twice, over, few = pool.submit(looks).result(WAIT_SECONDS_MAX)
    assert within is None
    assert looks_twice
    assert over is not None
    assert over.oom_killed
    assert few is not None


def looks() -> tuple[WorkerExit | None, bool, WorkerExit | None, WorkerExit | None]:
    """What is seen of four processes that share 128 MiB: with room for these once, whether their RSS is beyond that
    room, with too little room, and with three processes allowed."""
    size, before = 64 << 20, limits.held_bytes(os.getpid())
    private = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    shared = mmap.mmap(-1, size)
    for page in range(0, size, mmap.PAGESIZE):
        private[page] = shared[page] = 1
    children, (ready, told_ready) = [], os.pipe()
    for _ in range(3):
        if (child := os.fork()) == 0:
            sum(shared[page] for page in range(0, size, mmap.PAGESIZE))
            os.write(told_ready, b"x")
            signal.pause()
        children.append(child)
    try:
        for _ in children:
            os.read(ready, 1)
        room = before + 2 * size + (48 << 20)
        within = limits.ProcessLimits(room, 10).look()
        looks_twice = sum(limits.held_bytes_at_most(pid) for pid in (os.getpid(), *children)) > room
        return within, looks_twice, limits.ProcessLimits(before + size, 10).look(), limits.ProcessLimits(None, 3).look()
    finally:
        limits.kill_tree()
        for child in children:
            os.waitpid(child, 0)
        os.close(ready)
        os.close(told_ready)


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user, whom the kernel holds to the limit")
def test_more_tasks_than_there_is_room_for_do_not_start() -> None:
    """As another user, of whom no other test has processes, with room for five; threads count as processes do."""
    code = """
import os, psutil, resource, threading, time
from muster.trainer.launch import limits
os.setuid(54322)
limits.TASKS, limits.TASKS_PER_CORE = 5, 0
limits.limit_tasks()
try:
    for number in range(10):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError as error:
    print(number, error, resource.getrlimit(resource.RLIMIT_NPROC), flush=True)
os._exit(0)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout == "5 can't start new thread (6, 6)\n", ended.stderr
    assert resource.getrlimit(resource.RLIMIT_NPROC)[0] != 6, "only that process"
