"""Whatever is sent, the API stays up: hostile bodies, slow clients and endless uploads, against a real process."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest
from tests.integration.api.hostile import KINDS, Body, bodies
from tests.integration.api.platform import document
from tests.integration.api.test_api_process import Process, api
from tests.polling import WAIT_SECONDS_MAX, eventually

from muster.words.state_folder import StateFolder

BODY_SECONDS_MAX = 3.0  # of the API's own processor time: what a loaded machine adds is no fault of the body
HEALTH_SECONDS_MAX = WAIT_SECONDS_MAX  # some 20 ms where nothing else runs; minutes when bodies were read in the loop


def cpu_seconds(process: Process) -> float:
    """User and system time of the process, from the kernel's books."""
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def send(url: str, body: Body) -> httpx2.Response:
    return httpx2.post(f"{url}/api/v1/jobs", content=body[1], headers={"content-type": body[0]})


def each_is_refused_in_time(process: Process, sent: list[Body]) -> None:
    for number, body in enumerate(sent):
        began = cpu_seconds(process)
        reply = send(process.url, body)
        spent = cpu_seconds(process) - began
        name = f"body {number} ({KINDS[number % len(KINDS)].__name__}, {len(body[1]):,} bytes)"
        assert reply.status_code in (400, 413, 422), f"{name}: {reply.status_code} {reply.text[:300]}"
        assert len(reply.json()["errors"]) <= 100, name
        assert len(reply.content) < 100_000, name
        assert spent < BODY_SECONDS_MAX, f"{name} took {spent:.2f} s"


@contextlib.contextmanager
def health_watched(url: str) -> Iterator[list[float]]:
    """How long each health check took meanwhile."""
    found: list[float] = []
    done = threading.Event()

    def watch() -> None:
        with httpx2.Client(timeout=2 * WAIT_SECONDS_MAX) as client:
            while not done.wait(0.02):
                began = time.monotonic()
                assert client.get(f"{url}/healthz").status_code == 200
                found.append(time.monotonic() - began)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()


def test_every_kind_of_hostile_body_is_refused_in_time(tmp_path: Path) -> None:
    with api(tmp_path) as process:
        each_is_refused_in_time(process, bodies(2 * len(KINDS)))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_sixty_hostile_bodies_are_refused_in_time(tmp_path: Path) -> None:
    with api(tmp_path) as process:
        each_is_refused_in_time(process, bodies(5 * len(KINDS), seed=1))


@pytest.mark.long
def test_health_is_told_while_hostile_bodies_are_read(tmp_path: Path) -> None:
    with api(tmp_path) as process, ThreadPoolExecutor(16) as clients, health_watched(process.url) as seconds:
        replies = list(clients.map(lambda body: send(process.url, body).status_code, bodies(2 * len(KINDS), seed=2)))
        assert set(replies) <= {400, 413, 422}
    assert seconds, "nobody asked"
    assert max(seconds) < HEALTH_SECONDS_MAX


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateFolder:
    """Of the impatient API."""
    return StateFolder(tmp_path_factory.mktemp("impatient"))


@pytest.fixture(scope="module")
def impatient(state: StateFolder) -> Iterator[Process]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUSTER_API_RECEIVE_SECONDS_MAX", "0.5")
        patch.setenv("MUSTER_API_SEND_SECONDS_MAX", "0.5")
        with api(state.root) as process:
            yield process


def connected(process: Process, receive_bytes: int | None = None) -> socket.socket:
    """receive_bytes: what the kernel takes of a reply before it is read; None: as it likes."""
    address = urlsplit(process.url)
    made = socket.socket()
    made.settimeout(WAIT_SECONDS_MAX)
    if receive_bytes is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.connect((address.hostname, address.port or 0))
    return made


@pytest.mark.parametrize("begun", [b"", b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "])
def test_headers_that_do_not_arrive_are_not_waited_for(impatient: Process, begun: bytes) -> None:
    with connected(impatient) as slow:
        slow.sendall(begun)
        assert slow.recv(1_000) == b""


def test_headers_that_trickle_are_not_waited_for_on_an_old_connection_either(impatient: Process) -> None:
    with connected(impatient) as slow:
        slow.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert slow.recv(10_000).startswith(b"HTTP/1.1 200")
        slow.sendall(b"GET /healthz HTTP/1.1\r\n")
        rest = b"".join(iter(lambda: slow.recv(10_000), b""))
        assert b"HTTP/1.1 200" not in rest


def test_a_body_that_does_not_arrive_is_not_waited_for(impatient: Process) -> None:
    with connected(impatient) as slow:
        head = b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        slow.sendall(head + b'Content-Length: 100\r\n\r\n{"a"')
        reply = b"".join(iter(lambda: slow.recv(10_000), b""))
    assert reply.startswith(b"HTTP/1.1 408")
    assert b'"code": "body_too_slow"' in reply or b'"code":"body_too_slow"' in reply


def test_an_event_stream_outlives_the_time_for_bodies(impatient: Process) -> None:
    uid = httpx2.post(f"{impatient.url}/api/v1/jobs", json=document()).json()["id"]
    began = time.monotonic()
    with httpx2.stream("GET", f"{impatient.url}/api/v1/jobs/{uid}/events?follow=true") as reply:
        lines = reply.iter_lines()
        next(lines)
        httpx2.post(f"{impatient.url}/api/v1/jobs/{uid}:suspend")
        while time.monotonic() - began < 1.5:
            threading.Event().wait(0.1)
        httpx2.post(f"{impatient.url}/api/v1/jobs/{uid}:cancel")
        assert any("job.cancel_requested" in line for line in lines)


@pytest.mark.parametrize("trickles", [False, True])
def test_a_reader_that_takes_nothing_is_given_up(impatient: Process, state: StateFolder, trickles: bool) -> None:
    """Each holds a connection and what is on its way to it, never a thread or a connection of the database."""
    name = f"trickles-{trickles}".lower()
    uid = httpx2.post(f"{impatient.url}/api/v1/jobs", json=document(name)).json()["id"]
    worker = state.worker(uid, 1, 0)
    worker.mkdir(parents=True)
    with (worker / "log").open("w") as log:
        log.writelines(f"{n} {'x' * 50_000}\n" for n in range(600))  # more than all buffers of the kernel take
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(connected(impatient, receive_bytes=4_096)) for _ in range(20)]
        for reader in readers:
            reader.sendall(f"GET /api/v1/jobs/{uid}/logs?follow=true HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())

        def streams() -> float:
            for reader in readers if trickles else ():
                with contextlib.suppress(ConnectionError):
                    reader.recv(10)
            text = httpx2.get(f"{impatient.url}/metrics").text
            return float(text.partition("\nmuster_api_streams ")[2].split()[0])

        # Each is served, but perhaps not all at one moment: the first may be given up by then.
        assert all(map(is_served, readers))
        assert httpx2.get(f"{impatient.url}/api/v1/jobs").status_code == 200
        eventually(lambda: streams() == 0, "all to be given up")


def is_served(reader: socket.socket) -> bool:
    try:
        return reader.recv(12) == b"HTTP/1.1 200"
    except ConnectionError:  # it was, and it is given up already
        return True


@pytest.mark.parametrize("chunked", [False, True])
def test_nobody_uploads_without_a_token(tmp_path: Path, chunked: bool) -> None:
    """The refusal comes, and the connection ends instead of taking gigabytes."""
    with api(tmp_path, auth=True) as process, connected(process) as sender:
        length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 900000"
        head = b"POST /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        sender.sendall(head + length + b"\r\n\r\n")
        chunk = b"f4240\r\n" + b" " * 1_000_000 + b"\r\n" if chunked else b" " * 1_000_000
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 1_000_000_000:
                sender.sendall(chunk)
                sent += len(chunk)
        assert sent < 200_000_000, "the API took it all"
