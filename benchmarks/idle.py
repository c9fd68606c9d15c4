"""What the operator takes while nobody needs it: many suspended jobs, no worker, nothing happens.

    python benchmarks/idle.py [--jobs 10000] [--seconds 120] [--resync-seconds 300] [--check]

In the local world, whose operator runs in this process as `muster up` runs it. The first look at every job is the price
of a start and is told apart. --check: exit 1 if more than 1 % of a core is taken afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from muster.operator import runner as running
from muster.operator.local.nodes import VirtualNodes
from muster.operator.local.world import LocalWorld
from muster.operator.runner import JobRunner, serve
from muster.recipe.document import JobSpec, parse_job
from muster.words.status import JobStatus, Phase

SHARE_MAX = 0.01
QUIET_SECONDS = 3.0  # without a turn: the first look at everything is over


def suspended(folder: Path, jobs: int) -> None:
    """A state folder with so many suspended jobs that have trained once."""
    world = LocalWorld(folder, VirtualNodes(4), (), JobSpec)
    now = time.time()
    for index in range(jobs):
        training = {
            "model": {"preset": "muster-1m"},
            "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 64},
            "batch": {"tokensPerStep": 64 * 8},
            "length": {"steps": 100 + index},
        }
        job = parse_job({"metadata": {"name": f"job-{index}"}, "spec": {"training": training, "suspend": True}})
        stored = world.cluster.create(f"job-{index}", "default", job.spec, {})
        status = JobStatus(
            phase=Phase.SUSPENDED, code="Suspended", because="the user suspended the job", since=now, reservation=2,
            queued_at=now, observed_generation=1,
        )  # fmt: skip
        world.cluster.write_status(stored.metadata.uid, status, stored.metadata.resource_version)


class Turns(JobRunner):
    """Counts, and says when the last one was."""

    count, at = 0, 0.0

    async def turn(self, ticks: float) -> bool:
        self.count, self.at = self.count + 1, time.monotonic()
        return await super().turn(ticks)


async def measure(folder: Path, jobs: int, seconds: float) -> dict[str, float]:
    world = LocalWorld(folder, VirtualNodes(4), (), JobSpec)
    runner = Turns(world)
    began, used = time.monotonic(), time.process_time()
    serving = asyncio.create_task(serve(runner))
    while runner.count < jobs or time.monotonic() - runner.at < QUIET_SECONDS:  # noqa: ASYNC110 - no event
        await asyncio.sleep(QUIET_SECONDS / 10)
    start = {"start_seconds": time.monotonic() - began, "start_cpu_seconds": time.process_time() - used}
    began, used, turns = time.monotonic(), time.process_time(), runner.count
    await asyncio.sleep(seconds)
    share = (time.process_time() - used) / (time.monotonic() - began)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return start | {"idle_share": share, "idle_turns": runner.count - turns, "memory_mib": memory}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--resync-seconds", type=float, default=running.RESYNC_SECONDS)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    running.RESYNC_SECONDS = given.resync_seconds
    with tempfile.TemporaryDirectory() as folder:
        if os.fork() == 0:  # so that what it takes to make them is not counted
            try:
                suspended(Path(folder), given.jobs)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if os.wait()[1]:
            return 1
        found = asyncio.run(measure(Path(folder), given.jobs, given.seconds))
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))
    return int(given.check and found["idle_share"] > SHARE_MAX)


if __name__ == "__main__":
    sys.exit(main())
