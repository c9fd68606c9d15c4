"""An API process that is killed around the writes of an evaluation makes one job for each checkpoint."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.integration.api.platform import document
from tests.integration.api.test_api_evaluations import evaluation
from tests.polling import eventually

from muster.words.checkpoint import Commit, DataCursor, FileEntry, commit_key, sealed
from muster.words.state_folder import StateFolder

# Each child serves until the controller of evaluations comes to a write, and dies before it, or after it is committed,
# or at none; its parent makes the next one. A child that does nothing else dies after some rounds in any case.
_NURSERY = """
import asyncio, contextlib, os, random, signal, socket, sys
from pathlib import Path
from muster.api import __main__ as main
from muster.api.app import create_app as create
from muster.api.core.database.db import Database
from muster.api.core.evaluations import controller

controller.EVALUATION_SECONDS = 0.02
real = Database.write

@contextlib.asynccontextmanager
async def write(self):
    ours = asyncio.current_task().get_name() == "evaluations"
    moment = random.choice(["before", "after", "not"]) if ours else "not"
    async with real(self) as session:
        yield session
        if moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
    if moment == "after":
        os.kill(os.getpid(), signal.SIGKILL)

Database.write = write
listener = socket.create_server(("127.0.0.1", 0), backlog=100)
print(listener.getsockname()[1], flush=True)
settings = main.ApiSettings(state=Path(sys.argv[1]), auth=False)
app = create(settings)
main.create_app = lambda settings: app
while True:
    child = os.fork()
    if child == 0:
        sys.stdout = open(os.devnull, "w")
        random.seed(os.getpid())
        os._exit(asyncio.run(main._serve(settings, listener, os.getppid())))
    os.waitpid(child, 0)
    with open(Path(sys.argv[1]).parent / "deaths", "a") as deaths:
        deaths.write(".")
"""
KILLS = int(os.environ.get("EVALUATION_KILLS", "12"))


@contextlib.contextmanager
def nursery(state: Path) -> Iterator[str]:
    """The address of its API."""
    with (state.parent / "nursery.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY, state], stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/api/v1"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def asked(url: str) -> Any:
    """The answer of whichever child lives long enough to give it."""
    while True:
        with contextlib.suppress(httpx2.TransportError):
            reply = httpx2.get(url, timeout=60)
            if reply.status_code == 200:
                return reply.json()


def posted(url: str, body: dict[str, Any]) -> str:
    while True:
        with contextlib.suppress(httpx2.TransportError):
            reply = httpx2.post(url, json=body, headers={"Idempotency-Key": body["metadata"]["name"]}, timeout=60)
            assert reply.status_code == 201, reply.text
            return str(reply.json()["id"])


def commit(state: StateFolder, uid: str, step: int) -> None:
    made = Commit(
        job="pretrain",
        job_uid=uid,
        attempt=1,
        step=step,
        committed_at=1_000.0 + step,
        world_size=1,
        files=(FileEntry(key="a", bytes=10, checksum="0" * 8),),
        tensors={},
        cursor=DataCursor(seed=0, epoch=0, sample=step),
        config={},
        architecture={},
    )
    path = state.checkpoints / uid / commit_key(step)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(sealed(made))
    partial.rename(path)


def evaluated(url: str, uid: str) -> int:
    """Return the number of checkpoints that have an evaluation."""
    return sum(bool(item["evaluations"]) for item in asked(f"{url}/jobs/{uid}/checkpoints")["items"])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_processes_leave_one_job_for_each_checkpoint(tmp_path: Path) -> None:
    deaths, steps = tmp_path / "deaths", 0
    with nursery(tmp_path / "state") as url:
        base = posted(f"{url}/jobs", document("pretrain"))
        posted(f"{url}/jobs", evaluation())
        while not deaths.exists() or len(deaths.read_text()) < KILLS:
            steps += 1
            commit(StateFolder(tmp_path / "state"), base, steps)

            eventually(lambda: evaluated(url, base) == steps, "the evaluation of each checkpoint", 300.0)  # noqa: B023
        jobs = asked(f"{url}/jobs?limit=500")["items"]
    names = Counter(job["name"] for job in jobs)
    assert names == Counter({"pretrain": 1, "arc": 1} | {f"arc-{step}": 1 for step in range(1, steps + 1)})
