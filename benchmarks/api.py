"""How fast the API takes jobs and shows them, on PostgreSQL, beside Prefect's server.

    python benchmarks/api.py [--rate 200] [--seconds 60] [--rows 1000000] [--streams 1000] [--processes 1]
        [--peer FOLDER] [--postgres FOLDER] [--json FILE]

Each part is on its own, against API processes as `python -m muster.api` starts them and a PostgreSQL of its own that
keeps what it commits:

- submissions at a rate, whether or not the ones before are answered: the time of each is from when it was due, so that
  a server which falls behind is seen to. Afterwards every name is there once, in the table and in the cluster.
- event streams, all open at once: what they add to the API's memory.
- a table of so many jobs: the newest page, a filtered one, a deep one and single jobs, by one client.

`--peer` is a folder with a virtual environment that holds Prefect (`python -m venv FOLDER && FOLDER/bin/pip install
prefect`); it is made where it is missing. Its server, on the same PostgreSQL, creates flow runs at the same rate, and
lists and reads them. It needs PostgreSQL's extension pg_trgm, which the server of the tests does not have: `--postgres`
names the folder of another's programs, such as /usr/lib/postgresql/15/bin of Debian's postgresql and
postgresql-contrib.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import ClientSession, ClientTimeout, TCPConnector

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import api_peer  # noqa: E402
from tests.integration.api.postgres import PostgresServer, postgres_server  # noqa: E402

from muster.local.cluster import LocalCluster  # noqa: E402
from muster.words.state_folder import StateFolder  # noqa: E402

READS = 300
AT_ONCE_MAX = 64  # connections of the one who submits
SECONDS_MAX = 600.0


@dataclass(frozen=True)
class Times:
    """Seconds, of so many requests."""

    count: int
    p50: float
    p99: float
    longest: float

    @staticmethod
    def of(took: list[float]) -> Times:
        ordered = sorted(took)
        return Times(len(ordered), _share(ordered, 0.5), _share(ordered, 0.99), ordered[-1])

    def __str__(self) -> str:
        return f"p50 {self.p50 * 1e3:,.1f} ms, p99 {self.p99 * 1e3:,.1f} ms, longest {self.longest * 1e3:,.0f} ms"


def main() -> None:
    given = _arguments()
    found: dict[str, Any] = {"load": os.getloadavg(), "processors": os.cpu_count(), "arguments": vars(given)}
    programs = Path(given.postgres) if given.postgres else None
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder, postgres_server(True, programs) as postgres:
        if given.peer:
            api_peer.refuse_without_extension(postgres)
        url = postgres.url(database := postgres.new_database())
        with api_processes(Path(folder), url, given.processes) as processes:
            uvloop.run(measure(given, processes, postgres, database, Path(folder), found))
        if given.peer:
            peer = api_peer.prefect(Path(given.peer), Path(folder), postgres.url(postgres.new_database()))
            with peer as peer_url:
                uvloop.run(_peer(given, peer_url, found))
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=2, default=asdict) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0, help="submissions a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=int, default=1_000_000, help="jobs in the table; 0: not measured")
    parser.add_argument("--streams", type=int, default=1_000, help="open streams; 0: not measured")
    parser.add_argument("--processes", type=int, default=1, help="API processes, asked in turn")
    parser.add_argument("--peer", help="the folder of an environment with Prefect; left out: not measured")
    parser.add_argument("--postgres", help="the folder of PostgreSQL's programs; left out: the one that the tests use")
    parser.add_argument("--json", help="also write what was found to this file")
    return parser.parse_args()


async def measure(
    given: argparse.Namespace,
    processes: list[tuple[subprocess.Popen[str], str]],
    postgres: PostgresServer,
    database: str,
    folder: Path,
    found: dict[str, Any],
) -> None:
    urls = [url for _, url in processes]
    async with AsyncExitStack() as stack:
        # As many connections each as there are requests at once.
        clients = [await stack.enter_async_context(_client(url, AT_ONCE_MAX)) for url in urls]
        count = int(given.rate * given.seconds)
        cpu = sum(_cpu(process.pid) for process, _ in processes)

        async def submit(number: int) -> None:
            headers = {"Idempotency-Key": f"bench-{number}"}
            client = clients[number % len(clients)]
            async with client.post("/api/v1/jobs", json=_document(number), headers=headers) as reply:
                assert reply.status == 201, await reply.text()
                await reply.read()

        took, seconds = await at_rate(submit, given.rate, count)
        cpu = (sum(_cpu(process.pid) for process, _ in processes) - cpu) / count
        tell(found, "submissions", Times.of(took), f"{count / seconds:,.0f}/s of {given.rate:,.0f}/s asked for")
        tell(found, "cpu seconds a submission", cpu)
        counted = postgres.sql("SELECT count(*), count(DISTINCT name) FROM jobs", database)
        assert counted == f"{count}|{count}", f"{counted} rows and names of {count} submissions"
        tell(found, "handed over after", await _handed_over(folder, count), "s; none lost or doubled")
        if given.streams:
            await _streams(given.streams, clients[0], processes, found)
        if given.rows:
            await _large_table(given.rows, clients[0], postgres, database, found)


@contextmanager
def api_processes(folder: Path, database: str, count: int) -> Iterator[list[tuple[subprocess.Popen[str], str]]]:
    rates = {"MUSTER_API_REQUESTS_PER_SECOND": "100000", "MUSTER_API_STREAMS_PER_PERSON_MAX": "100000"}
    environment = {**os.environ, "MUSTER_API_DATABASE_URL": database, **rates}
    started = []
    try:
        for number in range(count):
            with (folder / f"api-{number}.log").open("w") as log:
                command = [sys.executable, "-m", "muster.api", "--state", str(folder), "--port", "0", "--no-auth"]
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
            assert process.stdout is not None
            match = re.search(r"http://[^/\s]+", process.stdout.readline())
            if match is None:
                raise SystemExit((folder / f"api-{number}.log").read_text())
            started.append((process, match[0]))
        yield started
    finally:
        for process, _ in started:
            process.terminate()
            process.wait(60)


async def at_rate(act: Callable[[int], Awaitable[None]], rate: float, count: int) -> tuple[list[float], float]:
    """The seconds of each from when it was due, and of all together. More than AT_ONCE_MAX wait for a place, which
    counts for them."""
    places, took, began = asyncio.Semaphore(AT_ONCE_MAX), [0.0] * count, time.perf_counter()

    async def one(number: int) -> None:
        async with places:
            await act(number)
        took[number] = time.perf_counter() - began - number / rate

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            group.create_task(one(number))
    return took, time.perf_counter() - began


async def in_turn(ask: Callable[[int], Awaitable[Any]], count: int = READS) -> Times:
    took = []
    for number in range(count):
        began = time.perf_counter()
        await ask(number)
        took.append(time.perf_counter() - began)
    return Times.of(took)


async def _streams(
    count: int, client: ClientSession, processes: list[tuple[subprocess.Popen[str], str]], found: dict[str, Any]
) -> None:
    """Of events, to jobs that wait; each has sent its first event."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count + 500)), hard))
    items = (await _got(client, "/api/v1/jobs", limit=100))["items"]
    before = _rss(processes[0][0].pid)
    opened, done = asyncio.Semaphore(0), asyncio.Event()
    async with _client(processes[0][1], count + 10) as many:

        async def follow(number: int) -> None:
            path = f"/api/v1/jobs/{items[number % len(items)]['id']}/events"
            async with many.get(path, params={"follow": "true"}) as reply:
                async for line in reply.content:
                    if line.startswith(b"event:"):
                        break
                opened.release()
                await done.wait()

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(follow(number))
            for _ in range(count):
                await opened.acquire()
            after = _rss(processes[0][0].pid)
            tell(found, f"megabytes with {count:,} streams", after, f"MB, {after - before:.0f} of them the streams'")
            done.set()


async def _large_table(
    rows: int, client: ClientSession, postgres: PostgresServer, database: str, found: dict[str, Any]
) -> None:
    """Copies of a job that was submitted: ended ones, of ten projects and 1,000 names."""
    columns = postgres.sql(
        "SELECT string_agg(column_name, ',') FROM information_schema.columns WHERE table_name = 'jobs'", database
    ).split(",")
    changed = {
        "id": "gen_random_uuid()::text",
        "name": "'many-' || (n % 1000)",
        "project": "CASE WHEN n % 10 = 0 THEN 'default' ELSE 'project-' || n % 10 END",
        "live": "false",
        "phase": "CASE WHEN n % 20 = 0 THEN 'Failed' ELSE 'Succeeded' END",
        "relayed_version": "spec_version",
    }
    kept = [name for name in columns if name != "seq"]
    values = ", ".join(changed.get(name, name) for name in kept)
    missing = rows - int(postgres.sql("SELECT count(*) FROM jobs", database))
    postgres.sql(
        f"INSERT INTO jobs ({', '.join(kept)}) SELECT {values} FROM generate_series(1, {missing}) AS n, "
        "(SELECT * FROM jobs ORDER BY seq LIMIT 1) AS one",
        database,
    )
    postgres.sql("VACUUM ANALYZE jobs", database)
    ids = postgres.sql(f"SELECT id FROM jobs TABLESAMPLE SYSTEM (1) LIMIT {READS}", database).split()

    async def page(**params: Any) -> dict[str, Any]:
        found = await _got(client, "/api/v1/jobs", limit=50, **params)
        assert found["items"], params
        return found

    deep = ""
    for _ in range(20):
        deep = await _walked(client, deep)
    tell(found, f"newest page of {rows:,}", await in_turn(lambda _: page()))
    tell(found, "filtered by phase and project", await in_turn(lambda _: page(phase="Failed", project="default")))
    tell(found, "filtered by name", await in_turn(lambda n: page(name=f"many-{n}")))
    tell(found, "a page 10,000 jobs deep", await in_turn(lambda _: page(cursor=deep)))
    tell(found, "one job", await in_turn(lambda n: _got(client, f"/api/v1/jobs/{ids[n % len(ids)]}")))


async def _walked(client: ClientSession, cursor: str) -> str:
    """The cursor 500 jobs further on."""
    params: dict[str, Any] = {"limit": 500, **({"cursor": cursor} if cursor else {})}
    return str((await _got(client, "/api/v1/jobs", **params))["nextCursor"])


async def _peer(given: argparse.Namespace, url: str, found: dict[str, Any]) -> None:
    async with _client(f"{url}/", AT_ONCE_MAX) as client:
        peer = await api_peer.Prefect.ready(client)
        count = int(given.rate * given.seconds)
        took, seconds = await at_rate(peer.create, given.rate, count)
        tell(found, "Prefect: flow runs", Times.of(took), f"{count / seconds:,.0f}/s of {given.rate:,.0f}/s asked for")
    async with _client(f"{url}/", 1) as client:  # the server closes the many connections, which nobody uses any more
        peer.client = client
        tell(found, f"Prefect: newest page of {count:,}", await in_turn(peer.page))
        tell(found, "Prefect: one flow run", await in_turn(peer.get))


def tell(found: dict[str, Any], what: str, value: Any, words: str = "") -> None:
    found[what] = value
    shown = f"{value:.4g}" if isinstance(value, float) else str(value)
    print(f"{what:>34}  {shown} {words}".rstrip(), flush=True)


def _client(url: str, connections: int) -> ClientSession:
    """aiohttp's, which takes a third of httpx2's time: what the client takes of two cores, the server has not."""
    return ClientSession(url, connector=TCPConnector(limit=connections), timeout=ClientTimeout(120))


async def _got(client: ClientSession, path: str, **params: Any) -> dict[str, Any]:
    async with client.get(path, params=params) as reply:
        assert reply.status == 200, await reply.text()
        return dict(await reply.json())


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
    cluster, began = LocalCluster(StateFolder(folder).cluster), time.perf_counter()
    while time.perf_counter() - began < SECONDS_MAX:
        if len(await asyncio.to_thread(cluster.jobs)) == jobs:
            return time.perf_counter() - began
        await asyncio.sleep(0.5)
    raise SystemExit("not every job was handed over in time")


def _share(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
