"""How fast the API takes jobs and shows them: 10,000 submissions over HTTP, then pages of the list.

    python benchmarks/api.py [--jobs 10000] [--clients 8] [--database postgresql://…] [--json FILE]

The API runs as a process of its own, as `muster up` starts it, and hands every job over to the local cluster meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2

from muster.contract.layout import State
from muster.local.cluster import LocalCluster

PAGES = 300
HAND_OVER_SECONDS_MAX = 600.0


@dataclass
class Result:
    """Seconds, unless the name says otherwise.

    cpu_per_submission: of the API's process, relay and mirror included; unlike the rest it bears a busy machine.
    handed_over: from the last reply until the cluster had every job.
    """

    jobs: int
    clients: int
    database: str
    start: float
    submissions_per_second: float
    cpu_per_submission: float
    submit_p50: float
    submit_p99: float
    submit_max: float
    handed_over: float
    page_p50: float
    page_p99: float
    filtered_page_p99: float
    deep_page_p99: float
    rss_megabytes: float


def main() -> None:
    given = _arguments()
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        result = asyncio.run(measure(Path(folder), given.jobs, given.clients, given.database))
    for name, value in asdict(result).items():
        print(f"{name:>24} {value:.4f}" if isinstance(value, float) else f"{name:>24} {value}")
    if given.json:
        Path(given.json).write_text(json.dumps(asdict(result), indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--database", help="a PostgreSQL address; left out: SQLite")
    parser.add_argument("--json", help="also write the numbers to this file")
    return parser.parse_args()


async def measure(folder: Path, jobs: int, clients: int, database: str | None) -> Result:
    began = time.perf_counter()
    process, url = _start(folder, database)
    try:
        async with httpx2.AsyncClient(base_url=f"{url}/api/v1", timeout=60) as client:
            (await client.get(f"{url}/readyz")).raise_for_status()
            start = time.perf_counter() - began
            cpu = _cpu(process.pid)
            submit = await _submit(client, jobs, clients)
            seconds, submit = submit[0], submit[1:]
            handed_over = await _handed_over(folder, jobs)
            cpu = _cpu(process.pid) - cpu
            newest = await _pages(client, {})
            filtered = await _pages(client, {"label": "team=3", "phase": "Queued"})
            deep = await _walk(client)
            return Result(
                jobs,
                clients,
                "postgresql" if database else "sqlite",
                start,
                jobs / seconds,
                cpu / jobs,
                _share(submit, 0.5),
                _share(submit, 0.99),
                max(submit),
                handed_over,
                _share(newest, 0.5),
                _share(newest, 0.99),
                _share(filtered, 0.99),
                _share(deep, 0.99),
                _rss(process.pid),
            )
    finally:
        process.terminate()
        process.wait(30)


def _start(folder: Path, database: str | None) -> tuple[subprocess.Popen[str], str]:
    environment = {**os.environ, **({"MUSTER_API_DATABASE_URL": database} if database else {})}
    process = subprocess.Popen(
        [sys.executable, "-m", "muster.api", "--state", str(folder), "--port", "0", "--no-auth"],
        stdout=subprocess.PIPE,
        stderr=(folder / "api.log").open("w"),
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    match = re.search(r"http://[^/]+", process.stdout.readline())
    if match is None:
        raise SystemExit((folder / "api.log").read_text())
    return process, match[0]


async def _submit(client: httpx2.AsyncClient, jobs: int, clients: int) -> list[float]:
    """The seconds for all of them, then the seconds of each."""
    numbers = iter(range(jobs))
    took: list[float] = []

    async def one() -> None:
        for number in numbers:
            began = time.perf_counter()
            reply = await client.post("/jobs", json=_document(number), headers={"Idempotency-Key": f"bench-{number}"})
            took.append(time.perf_counter() - began)
            assert reply.status_code == 201, reply.text

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(clients)))
    return [time.perf_counter() - began, *took]


def _document(number: int) -> dict[str, Any]:
    return {
        "metadata": {"name": f"job-{number}", "labels": {"team": str(number % 10), "n": str(number)}},
        "spec": {
            "training": {
                "model": {"preset": "muster-1m"},
                "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 256},
                "batch": {"tokensPerStep": 16_384, "microBatch": 8},
                "length": {"steps": 200},
            },
            "gang": {"nodes": 2},
        },
    }


async def _handed_over(folder: Path, jobs: int) -> float:
    cluster, began = LocalCluster(State(folder).cluster), time.perf_counter()
    while time.perf_counter() - began < HAND_OVER_SECONDS_MAX:
        if len(await asyncio.to_thread(cluster.jobs)) == jobs:
            return time.perf_counter() - began
        await asyncio.sleep(0.5)
    raise SystemExit("not every job was handed over in time")


async def _pages(client: httpx2.AsyncClient, parameters: dict[str, str]) -> list[float]:
    took = []
    for _ in range(PAGES):
        began = time.perf_counter()
        reply = await client.get("/jobs", params={"limit": "50", **parameters})
        took.append(time.perf_counter() - began)
        assert len(reply.json()["items"]) == 50
    return took


async def _walk(client: httpx2.AsyncClient) -> list[float]:
    """From the newest job to the oldest, by cursor."""
    took, cursor = [], ""
    while True:
        began = time.perf_counter()
        page = (await client.get("/jobs", params={"limit": "50", **({"cursor": cursor} if cursor else {})})).json()
        took.append(time.perf_counter() - began)
        cursor = page["nextCursor"]
        if not cursor:
            return took


def _share(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
