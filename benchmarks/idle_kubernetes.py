"""What the operator of a cluster takes while nobody needs it: many suspended jobs, no worker, nothing happens.

    KUBEBUILDER_ASSETS=… python benchmarks/idle_kubernetes.py [--jobs 10000] [--seconds 120] [--check]

On a real API server. One job is submitted and suspended; etcd is then given as many like it, each of its own length,
and an operator starts over them. Its start, which reads them all, is told apart. --check: exit 1 if more than 1 % of a
core is taken afterwards.
"""

import argparse
import asyncio
import re
import sys
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path

import psutil
from operator_scale import NAMESPACE, job_document, on_a_fresh_plane, start_operator, stop, until
from tests.cluster.controlplane import ControlPlane

from muster.kube import paths
from muster.kube.client import ApiClient, Object

SHARE_MAX = 0.01
KEY = f"/registry/muster.dev/trainingjobs/{NAMESPACE}/"
PUTS = 100  # of one transaction; etcd takes 128 at most
QUIET_SECONDS, QUIET_SHARE = 3.0, 0.05  # the start is over once so little was taken for so long


async def measure(client: ApiClient, plane: ControlPlane, folder: Path, jobs: int, seconds: float) -> Object:
    operator, _ = await start_operator(plane, folder)
    document = job_document("template", 2)
    document["spec"]["suspend"] = True
    await client.create(paths.jobs(NAMESPACE), document)

    async def suspended() -> bool:
        return bool((await client.get(paths.job(NAMESPACE, "template"))).get("status", {}).get("phase") == "Suspended")

    await until(suspended, "the first job to be suspended", 60, operator)
    stop(operator, [])
    await asyncio.to_thread(clone, plane, jobs)

    operator, port = await start_operator(plane, folder)
    process, began = psutil.Process(operator.pid), time.monotonic()
    await until(lambda: known(port) > jobs, "the operator to know all jobs", 600, operator)
    while await share_of(process, QUIET_SECONDS) > QUIET_SHARE:
        pass
    start = {"start_seconds": time.monotonic() - began, "start_cpu_seconds": cpu(process)}
    share = await share_of(process, seconds)
    memory = process.memory_info().rss / 2**20
    stop(operator, [])
    return {name: round(value, 4) for name, value in (start | {"idle_share": share, "memory_mib": memory}).items()}


def clone(plane: ControlPlane, jobs: int) -> None:
    """As if so many had been submitted and suspended."""
    stored = plane.stored(f"{KEY}template")

    def copy(index: int) -> Object:
        training = stored["spec"]["training"] | {"length": {"steps": 100 + index}}
        return stored | {
            "metadata": stored["metadata"] | {"name": f"job-{index}", "uid": str(uuid.uuid4())},
            "spec": stored["spec"] | {"training": training},
        }

    for first in range(0, jobs, PUTS):
        plane.store({f"{KEY}job-{index}": copy(index) for index in range(first, min(jobs, first + PUTS))})


def known(port: int) -> int:
    """Jobs that the operator tells of."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
        text = reply.read().decode()
    return sum(int(float(count)) for count in re.findall(r"^muster_operator_jobs\{[^}]*\} (\S+)$", text, re.MULTILINE))


def cpu(process: psutil.Process) -> float:
    return float(sum(process.cpu_times()[:2]))


async def share_of(process: psutil.Process, seconds: float) -> float:
    """Of a core."""
    used, began = cpu(process), time.monotonic()
    await asyncio.sleep(seconds)
    return (cpu(process) - used) / (time.monotonic() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found = on_a_fresh_plane(
            folder / "plane", 4, lambda client, plane: measure(client, plane, folder, given.jobs, given.seconds)
        )
    return int(given.check and found["idle_share"] > SHARE_MAX)


if __name__ == "__main__":
    sys.exit(main())
