"""What a token costs a request: the same question with and without authentication, to two processes in turns.

    python benchmarks/api_auth.py [--requests 1000]

Each person is a member of `--projects` projects, which is what the look-up reads. Milliseconds of the median, and of
the 99th percentile. The issue asks for at most 1 ms more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2

PATH = "/api/v1/jobs?limit=1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--projects", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        asyncio.run(measure(Path(folder), given.requests, given.projects))


async def measure(folder: Path, requests: int, projects: int) -> None:
    open_process, open_url = start(folder / "open", "--no-auth")
    kept_process, kept_url = start(folder / "kept")
    try:
        async with httpx2.AsyncClient(timeout=30) as client:
            admin = {"authorization": f"Bearer {(folder / 'kept' / 'admin-token').read_text().strip()}"}
            token = await make_member(client, kept_url, admin, projects)
            took: dict[str, list[float]] = {"anonymous": [], "with a token": []}
            for _ in range(requests):  # in turns, so that a busy machine is as busy for both
                took["anonymous"].append(await ask(client, open_url, {}))
                took["with a token"].append(await ask(client, kept_url, {"authorization": f"Bearer {token}"}))
    finally:
        for process in (open_process, kept_process):
            process.terminate()
            process.wait(30)
    for name, seconds in took.items():
        p99 = sorted(seconds)[int(0.99 * len(seconds))]
        print(f"{name:>14}: p50 {statistics.median(seconds) * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms")
    more = statistics.median(took["with a token"]) - statistics.median(took["anonymous"])
    print(f"{'more':>14}: {more * 1e3:.2f} ms at the median")


def start(folder: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "muster.api", "--state", str(folder), "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=(folder / "api.log").open("w"),
        text=True,
        env={**os.environ, "MUSTER_API_REQUESTS_PER_SECOND": "1000000"},
    )
    assert process.stdout is not None
    match = re.search(r"http://[^/]+", process.stdout.readline())
    if match is None:
        raise SystemExit((folder / "api.log").read_text())
    return process, match[0]


async def make_member(client: httpx2.AsyncClient, url: str, admin: dict[str, str], projects: int) -> str:
    for number in range(projects):
        place = f"{url}/api/v1/projects/team-{number}"
        (await client.put(place, json={}, headers=admin)).raise_for_status()
        (await client.put(f"{place}/members/ann", json={"role": "member"}, headers=admin)).raise_for_status()
    wanted = {"name": "ann", "person": "ann", "allProjects": True}
    made = await client.post(f"{url}/api/v1/tokens", json=wanted, headers=admin)
    return str(made.raise_for_status().json()["token"])


async def ask(client: httpx2.AsyncClient, url: str, headers: dict[str, str]) -> float:
    began = time.perf_counter()
    (await client.get(f"{url}{PATH}", headers=headers)).raise_for_status()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
