"""Prefect's server, started from an environment of its own, and what benchmarks/api.py asks of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from aiohttp import ClientSession
from tests.integration.api.postgres import PostgresServer
from tests.ports import free_port

START_SECONDS_MAX = 180.0


def refuse_without_extension(postgres: PostgresServer) -> None:
    """Before anything is measured: Prefect makes indexes that need pg_trgm."""
    if not postgres.sql("SELECT 1 FROM pg_available_extensions WHERE name = 'pg_trgm'"):
        raise SystemExit(f"Prefect needs pg_trgm, which {postgres.bin} has not; name another server by --postgres")


@contextmanager
def prefect(environment: Path, folder: Path, database: str) -> Iterator[str]:
    """The address of its API, on that database. The environment is made where it is missing."""
    program = environment / "bin" / "prefect"
    if not program.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        subprocess.run([environment / "bin" / "pip", "install", "-q", "prefect"], check=True)
    port = free_port()
    settings = {
        "PREFECT_API_DATABASE_CONNECTION_URL": database.replace("postgresql://", "postgresql+asyncpg://"),
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_ENABLED": "false",
        "PREFECT_LOGGING_SERVER_LEVEL": "WARNING",
    }
    command = [program, "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "prefect.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **settings})
    url = f"http://127.0.0.1:{port}/api"
    try:
        deadline = time.monotonic() + START_SECONDS_MAX
        while not _answers(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"Prefect's server did not start:\n{(folder / 'prefect.log').read_text()[-2000:]}")
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


@dataclass
class Prefect:
    """A flow, and its runs: scheduled ones, as a job that waits is."""

    client: ClientSession
    flow_id: str
    ids: list[str] = field(default_factory=list)

    @classmethod
    async def ready(cls, client: ClientSession) -> Prefect:
        async with client.post("flows/", json={"name": "bench"}, raise_for_status=True) as reply:
            return cls(client, (await reply.json())["id"])

    async def create(self, number: int) -> None:
        run = {
            "name": f"run-{number}",
            "flow_id": self.flow_id,
            "idempotency_key": f"bench-{number}",
            "parameters": {"steps": 200, "nodes": 2},
            "tags": [f"team-{number % 10}"],
            "state": {"type": "SCHEDULED"},
        }
        async with self.client.post("flow_runs/", json=run, raise_for_status=True) as reply:
            self.ids.append((await reply.json())["id"])

    async def page(self, _: int) -> None:
        wanted: dict[str, Any] = {"limit": 50, "sort": "START_TIME_DESC"}
        async with self.client.post("flow_runs/filter", json=wanted, raise_for_status=True) as reply:
            assert len(await reply.json()) == 50, await reply.text()

    async def get(self, number: int) -> None:
        path = f"flow_runs/{self.ids[number % len(self.ids)]}"
        async with self.client.get(path, raise_for_status=True) as reply:
            await reply.read()
