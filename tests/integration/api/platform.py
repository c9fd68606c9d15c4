"""The API in the test's own process, and a stand-in for the operator that writes statuses as the real one does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import uvicorn
from fastapi import FastAPI
from tests.polling import INTERVAL_SECONDS, WAIT_SECONDS_MAX

from muster.api.__main__ import ApiServer
from muster.api.app import create_app
from muster.api.core.cluster.cluster import JobCluster
from muster.api.core.database.db import Database
from muster.api.core.database.migrate import migrate
from muster.api.core.services import Services
from muster.api.core.settings import ApiSettings
from muster.local.cluster import LocalCluster, VersionConflict
from muster.words.checkpoint import Commit, DataCursor, FileEntry, commit_key, sealed
from muster.words.state_folder import StateFolder
from muster.words.status import JobStatus, Phase

Answer = TypeVar("Answer")
MakeApp = Callable[[ApiSettings, JobCluster | None], FastAPI]
BASE = "http://127.0.0.1:8642"


def document(name: str = "demo", **spec: Any) -> dict[str, Any]:
    """A small valid job; keyword arguments replace parts of its spec."""
    training = {
        "model": {"preset": "muster-1m"},
        "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 256},
        "batch": {"tokensPerStep": 16_384, "microBatch": 8},
        "length": {"steps": 200},
    }
    return {"metadata": {"name": name}, "spec": {"training": training, "gang": {"nodes": 2}, **spec}}


async def until(
    question: Callable[[], Awaitable[Answer]],
    what: str,
    seconds: float = WAIT_SECONDS_MAX,
    every: float = INTERVAL_SECONDS,
) -> Answer:
    """The first truthy answer. The time-out bounds broken code and decides no passing test."""
    deadline = time.monotonic() + seconds
    while True:
        answer = await question()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s for {what}; the last answer was {answer!r}")
        await asyncio.sleep(every)


@dataclass
class Platform:
    settings: ApiSettings
    app: FastAPI
    client: httpx2.AsyncClient
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def services(self) -> Services:
        services: Services = self.app.state.services
        return services

    @property
    def state(self) -> StateFolder:
        return self.settings.layout

    @property
    def cluster(self) -> LocalCluster:
        return LocalCluster(self.state.cluster)

    async def get(self, path: str, **parameters: Any) -> Any:
        reply = await self.client.get(f"/api/v1{path}", params=parameters)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def ready(self) -> dict[str, Any]:
        """The answer of /readyz once all is well: at first the mirror reads the cluster."""

        async def ask() -> Any:
            reply = await self.client.get("/readyz")
            return reply.json() if reply.status_code == 200 else None

        found: dict[str, Any] = await until(ask, "the API to be ready")
        return found

    async def submit(self, name: str = "demo", **spec: Any) -> dict[str, Any]:
        reply = await self.client.post("/api/v1/jobs", json=document(name, **spec))
        assert reply.status_code == 201, reply.text
        made: dict[str, Any] = reply.json()
        return made

    async def handed_over(self, uid: str) -> dict[str, Any]:
        async def ask() -> Any:
            job = await self.get(f"/jobs/{uid}")
            return job if job["handedOver"] else None

        return await until(ask, "the hand-over")

    async def phase(self, uid: str, phase: str) -> dict[str, Any]:
        async def ask() -> Any:
            job = await self.get(f"/jobs/{uid}")
            return job if job["status"]["phase"] == phase else None

        return await until(ask, f"phase {phase}")

    async def events(self, uid: str) -> list[str]:
        return [event["type"] for event in (await self.get(f"/jobs/{uid}/events"))["items"]]

    async def no_more_housekeeping(self) -> None:
        """Wait for the round with which it begins, and let no other do anything: what a test does of its work itself,
        a round at the same moment would have done already."""
        work = next(work for work in self.services.background.works if work.name == "housekeeping")

        async def begun() -> bool:
            return work.rounds > 0

        await until(begun, "the first round of housekeeping")

        async def idle() -> bool:
            return False

        work.step = idle

    def operate(self, uid: str, **changes: Any) -> JobStatus:
        """Write a status, as the operator would: once more where the relay has written the spec meanwhile."""
        while True:
            job = self.cluster.get(uid)
            status = job.status.model_copy(update=changes)
            with contextlib.suppress(VersionConflict):
                self.cluster.write_status(uid, status, job.metadata.resource_version)
                return status

    async def finish(self, uid: str, phase: Phase = Phase.SUCCEEDED) -> None:
        await self.handed_over(uid)
        self.operate(uid, phase=phase, code="Done", because="done", finished_at=time.time(), since=time.time())
        await self.phase(uid, phase)

    def commit(self, uid: str, step: int, attempt: int = 1, **more: Any) -> Path:
        """Write a COMMIT file, as the trainer would."""
        files = tuple(FileEntry(key=key, bytes=size, checksum="0" * 8) for key, size in (("a", 10), ("b", 20)))
        commit = Commit(
            job="demo",
            job_uid=uid,
            attempt=attempt,
            step=step,
            committed_at=1_000.0 + step,
            world_size=2,
            files=more.pop("files", files),
            tensors={},
            cursor=DataCursor(seed=0, epoch=0, sample=step),
            config={},
            architecture={},
            **more,
        )
        path = self.state.checkpoints / uid / commit_key(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sealed(commit))
        return path


@functools.cache
def sqlite_tables() -> bytes:
    """An SQLite file with today's tables, to write where one is needed: to make them takes longer than most tests."""

    async def make(folder: str) -> bytes:
        database = Database(ApiSettings(state=Path(folder)).database, WAIT_SECONDS_MAX)
        await migrate(database)
        await database.close()
        assert database.file is not None
        return database.file.read_bytes()

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, make(folder)).result()


def _settings(state: Path, **options: Any) -> ApiSettings:
    # An outage is what a test makes, and not a busy machine.
    ours = {"state": state, "auth": False, "mirror_seconds": 0.02, "database_timeout_seconds": WAIT_SECONDS_MAX}
    settings = ApiSettings(**{**ours, **options})
    if not state.exists() and settings.database_url is None:
        state.mkdir(parents=True, mode=0o700)
        settings.layout.database.write_bytes(sqlite_tables())
        settings.layout.database.chmod(0o600)
    return settings


@contextlib.asynccontextmanager
async def platform(
    state: Path, cluster: JobCluster | None = None, make: MakeApp = create_app, **options: Any
) -> AsyncIterator[Platform]:
    """The whole API with its background work, reached without a socket; with pages by another `make`."""
    settings = _settings(state, **{"relay_seconds": 0.1, **options})
    app = make(settings, cluster)
    async with app.router.lifespan_context(app):
        app.state.services.relay.seconds_min = 0.0  # a test waits for its job, and submits no bursts
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url=BASE, timeout=WAIT_SECONDS_MAX) as client:
            yield Platform(settings, app, client)


@contextlib.asynccontextmanager
async def served(
    state: Path, grace_seconds: int = 5, make: MakeApp = create_app, port: int = 0, **options: Any
) -> AsyncIterator[tuple[Platform, ApiServer]]:
    """The same over a real socket, for what only a socket shows: streams, large bodies, cut connections; at a port that
    is named for one that is started again."""
    settings = _settings(state, **{"stream_poll_seconds": 0.02, **options})
    app = make(settings, None)
    with contextlib.closing(socket.create_server(("127.0.0.1", port))) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=grace_seconds)
        server = ApiServer(config, app.state.hub)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(base_url=url, timeout=WAIT_SECONDS_MAX) as client,
        ):
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                yield Platform(settings, app, client), server
            finally:
                server.end()
                await serving


@dataclass
class Frame:
    """One server-sent event."""

    event: str
    data: Any
    id: str


async def frames(reply: httpx2.Response) -> AsyncIterator[Frame]:
    fields: dict[str, str] = {}
    async for line in reply.aiter_lines():
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            yield Frame(fields["event"], json.loads(fields["data"]), fields.get("id", ""))
            fields = {}
