"""An API process that is killed after each commit of a job and before its reply."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tests.integration.api.openai_house import chat_file, models_file, without_pauses
from tests.integration.api.platform import document
from tests.polling import eventually

from muster.local.cluster import LocalCluster
from muster.words.state_folder import StateFolder

__all__ = ["without_pauses"]

# Each child serves until it would answer a job that it has just committed, and is killed there; its parent makes the
# next one. They share the socket, so a client only sees its connection end. OpenAI's client numbers its tries, and a
# retry is answered as its first try would be.
_NURSERY = """
import asyncio, contextlib, os, signal, socket, sys
from pathlib import Path
from muster.api import __main__ as main
from muster.api.app import create_app as create

def dying(settings):
    app = create(settings)  # once: each child begins with what its parent has made

    class Failpoint:
        def __init__(self, inner):
            self.inner = inner

        async def __call__(self, scope, receive, send):
            async def watched(message):
                made = scope["type"] == "http" and scope["method"] == "POST" and message.get("status") in (200, 201)
                retried = dict(scope.get("headers", ())).get(b"x-stainless-retry-count", b"0") != b"0"
                if made and not retried and b"idempotency-replayed" not in dict(message["headers"]):
                    os.kill(os.getpid(), signal.SIGKILL)
                await send(message)
            await self.inner(scope, receive, watched)

    app.add_middleware(lambda app: Failpoint(app))
    return app

listener = socket.create_server(("127.0.0.1", 0), backlog=100)
print(listener.getsockname()[1], flush=True)
settings = main.ApiSettings(state=Path(sys.argv[1]), auth=False)
app = dying(settings)
main.create_app = lambda settings: app
while True:
    child = os.fork()
    if child == 0:
        sys.stdout = open(os.devnull, "w")
        os._exit(asyncio.run(main._serve(settings, listener, os.getppid())))
    os.waitpid(child, 0)
    with open(Path(sys.argv[1]).parent / "deaths", "a") as deaths:
        deaths.write(".")
"""


KILLS, OPENAI_KILLS = 12, 3


@contextlib.contextmanager
def nursery(state: Path) -> Iterator[int]:
    """The port."""
    with (state.parent / "nursery.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY, state], stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_twelve_kills_between_commit_and_reply_make_one_job_each(tmp_path: Path) -> None:
    ids, lost = {}, 0
    with nursery(tmp_path / "state") as port:
        url = f"http://127.0.0.1:{port}/api/v1"
        for number in range(KILLS):
            name = f"job-{number}"
            while name not in ids:
                try:
                    reply = httpx2.post(
                        f"{url}/jobs", json=document(name), headers={"Idempotency-Key": name}, timeout=60
                    )
                except httpx2.TransportError:
                    lost += 1
                    continue
                assert (reply.status_code, reply.headers.get("idempotency-replayed")) == (201, "true"), reply.text
                ids[name] = reply.json()["id"]
        listed = [job for page in _pages(url) for job in page]
        assert {job["name"]: job["id"] for job in listed} == ids
        assert (len(listed), lost) == (KILLS, KILLS), "each was committed by a process that did not answer"
        cluster = LocalCluster(StateFolder(tmp_path / "state").cluster)
        eventually(lambda: len(cluster.jobs()) == KILLS, "the hand-over")
        assert {job.metadata.name: job.metadata.uid for job in cluster.jobs()} == ids
        for uid in list(ids.values())[::4]:
            events = httpx2.get(f"{url}/jobs/{uid}/events").json()["items"]
            assert [event["type"] for event in events].count("job.created") == 1


def test_kills_between_commit_and_reply_leave_openais_client_with_one_job_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_pauses: None
) -> None:
    """It sends no Idempotency-Key, and repeats by itself what was cut."""
    monkeypatch.setenv("MUSTER_API_BASE_MODELS_FILE", str(models_file(tmp_path)))
    training_file = chat_file(tmp_path)
    with nursery(tmp_path / "state") as port:
        url = f"http://127.0.0.1:{port}"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=5, timeout=60) as client:
            made = [
                client.fine_tuning.jobs.create(model="tiny", training_file=training_file) for _ in range(OPENAI_KILLS)
            ]
            listed = [job.id for job in client.fine_tuning.jobs.list()]
        assert listed == [job.id for job in reversed(made)], "equal requests that are no retries make a job each"
        assert len(set(listed)) == OPENAI_KILLS
        cluster = LocalCluster(StateFolder(tmp_path / "state").cluster)
        eventually(lambda: len(cluster.jobs()) == OPENAI_KILLS, "the hand-over")
        for job in listed:
            events = httpx2.get(f"{url}/api/v1/jobs/{job.removeprefix('ftjob-')}/events").json()["items"]
            assert [event["type"] for event in events].count("job.created") == 1
    assert (tmp_path / "deaths").read_text() == "." * OPENAI_KILLS


def _pages(url: str) -> Iterator[list[dict[str, Any]]]:
    cursor: dict[str, str] = {}
    while True:
        page = httpx2.get(f"{url}/jobs", params={"limit": 500, **cursor}, timeout=60).json()
        yield page["items"]
        if page["nextCursor"] is None:
            return
        cursor = {"cursor": page["nextCursor"]}
