"""`python -m muster.api` as a process: clear refusals, quick start, and an end by every signal that loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil
import pytest
from tests.forked import ForkedProgram
from tests.integration.api.platform import document
from tests.polling import WAIT_SECONDS_MAX, eventually

from muster.local.cluster import LocalCluster
from muster.words.state_folder import StateFolder

API = "muster.api"


@dataclass
class Process:
    process: ForkedProgram
    url: str
    log: Path

    def end(self, sign: int) -> int:
        self.process.send_signal(sign)
        return self.process.wait(WAIT_SECONDS_MAX)


@contextlib.contextmanager
def api(state: Path, *options: str, port: int = 0, auth: bool = False) -> Iterator[Process]:
    state.mkdir(parents=True, exist_ok=True)
    log = state / "api.log"
    words: list[str | Path] = ["--state", state, "--port", str(port), *([] if auth else ["--no-auth"]), *options]
    process = ForkedProgram(API, words, log, read_stdout=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"http://\S+", line)
        assert match, f"{line!r}; {log.read_text()}"
        url = match[0].removesuffix("/api/v1")
        yield Process(process, url, log)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def refused(*options: str, **environment: str) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = ForkedProgram(API, options, log, {**os.environ, **environment}, read_stdout=True)
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.read() == ""
        return process.wait(WAIT_SECONDS_MAX), log.read_text()


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = refused("--state", str(tmp_path), "--port", str(port))
    assert code == 2
    cause = f"port {port} of 127.0.0.1 is in use by another process"
    assert text == f"muster api: {cause}; end that one, or choose another port with --port\n"
    assert not (tmp_path / "muster.db").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_tokens_only_this_machine_is_served(tmp_path: Path, host: str) -> None:
    code, text = refused("--state", str(tmp_path), "--host", host, "--no-auth")
    assert (code, len(text.splitlines())) == (2, 1)
    assert "authentication is off" in text


def test_a_database_that_is_away_is_one_clear_line_without_the_password(tmp_path: Path) -> None:
    url = "postgresql://me:hunter2@127.0.0.1:1/nothing"
    code, text = refused("--state", str(tmp_path), "--port", "0", MUSTER_API_DATABASE_URL=url)
    assert (code, len(text.splitlines())) == (3, 1), text
    assert "MUSTER_API_DATABASE_URL" in text
    assert "hunter2" not in text


def test_a_state_folder_that_is_a_file_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, text = refused("--state", str(tmp_path / "file"), "--port", "0")
    assert (code, len(text.splitlines())) == (3, 1), text


@pytest.mark.parametrize(("options", "word"), [(["--port", "99999"], "port"), (["--log-format", "xml"], "log-format")])
def test_a_bad_option_is_named(tmp_path: Path, options: list[str], word: str) -> None:
    code, text = refused("--state", str(tmp_path), *options)
    assert code == 2
    assert word in text


def test_it_answers_and_its_log_is_json_with_request_ids(tmp_path: Path) -> None:
    with api(tmp_path) as process:
        refused = httpx2.post(
            f"{process.url}/api/v1/jobs", json=document(checkpoint={"uri": "s3://me:hunter2@bucket/x"})
        )
        assert refused.status_code == 422
        assert "hunter" not in refused.text
        reply = httpx2.post(
            f"{process.url}/api/v1/jobs",
            json=document(runtime={"env": [{"name": "HF_TOKEN", "value": "hunter3"}]}),
            headers={"x-request-id": "mine"},
        )
        assert reply.status_code == 201
        httpx2.get(f"{process.url}/api/v1/jobs", params={"name": "http://me:hunter4@x"})
        assert process.end(signal.SIGTERM) == 0
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    (line,) = [line for line in lines if line.get("request_id") == "mine"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/api/v1/jobs", 201)
    assert "hunter" not in process.log.read_text()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_at_once_and_cleanly_with_a_stream_open(tmp_path: Path, sign: signal.Signals) -> None:
    with api(tmp_path) as process:
        uid = httpx2.post(f"{process.url}/api/v1/jobs", json=document()).json()["id"]
        with httpx2.stream("GET", f"{process.url}/api/v1/jobs/{uid}/events?follow=true") as reply:
            lines = reply.iter_lines()
            while "event: job.created" not in next(lines):
                pass
            assert process.end(sign) == 0
            rest = list(lines)
    assert "event: end" not in rest
    assert "Traceback" not in process.log.read_text()


def test_a_request_whose_body_still_comes_is_answered_by_a_process_that_is_ending(tmp_path: Path) -> None:
    body = json.dumps(document()).encode()
    with api(tmp_path / "state") as process:
        host, port = process.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT_SECONDS_MAX) as begun:
            head = f"POST /api/v1/jobs HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            begun.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:50])
            httpx2.get(f"{process.url}/healthz")  # whoever asks after it is answered after it was heard
            process.process.send_signal(signal.SIGTERM)

            def takes_no_more() -> bool:
                with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port))):
                    return False
                return True

            eventually(takes_no_more, "a process that is ending")
            begun.sendall(body[50:])
            answer = begun.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 201 "), answer
        assert process.process.wait(WAIT_SECONDS_MAX) == 0

    with api(tmp_path / "state") as process:
        assert [job["name"] for job in httpx2.get(f"{process.url}/api/v1/jobs").json()["items"]] == ["demo"]


@pytest.mark.slow
def test_an_upload_at_once_comes_to_its_end_while_the_process_waits_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pod of the chart that is replaced: uvicorn was given five seconds, and what took longer was cut."""
    monkeypatch.setenv("MUSTER_API_SHUTDOWN_SECONDS", "45")
    line = b'{"text": "a few words"}\n'
    told = threading.Event()

    def slow() -> Iterator[bytes]:
        yield line * 10
        told.set()
        ends = time.monotonic() + 6
        while time.monotonic() < ends:
            yield line
            time.sleep(0.1)

    with api(tmp_path / "state") as process, ThreadPoolExecutor(1) as pool:
        place = f"{process.url}/api/v1/files?name=words.jsonl&purpose=fine-tune"
        sending = pool.submit(lambda: httpx2.post(place, content=slow()))
        assert told.wait(WAIT_SECONDS_MAX)
        httpx2.get(f"{process.url}/healthz")
        assert process.end(signal.SIGTERM) == 0
        answer = sending.result(WAIT_SECONDS_MAX)
    assert answer.status_code == 201, answer.text
    with api(tmp_path / "state") as process:
        (file,) = httpx2.get(f"{process.url}/api/v1/files").json()["items"]
        assert file["id"] == answer.json()["id"]
        assert file["bytes"] >= 10 * len(line)


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        with api(tmp_path, "--parent-pid", str(parent.pid)) as process:
            assert httpx2.get(f"{process.url}/healthz").status_code == 200
            parent.kill()
            parent.wait()
            assert process.process.wait(WAIT_SECONDS_MAX) == 0
    finally:
        parent.kill()
        parent.wait()
        if parent.stdin:
            parent.stdin.close()


def test_kill_dash_nine_in_the_middle_loses_and_doubles_nothing(tmp_path: Path) -> None:
    """Submissions are repeated with their keys until they are answered, while the API is killed again and again."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answered: dict[str, str] = {}
    stop = threading.Event()

    def submit() -> None:
        number = 0
        while not stop.is_set() or number < 25:
            name = f"job-{number}"
            try:
                reply = httpx2.post(
                    f"http://127.0.0.1:{port}/api/v1/jobs",
                    json=document(name),
                    headers={"Idempotency-Key": name},
                )
            except httpx2.TransportError:
                stop.wait(0.01)
                continue
            if reply.status_code == 201:
                answered[name] = reply.json()["id"]
                number += 1

    client = threading.Thread(target=submit)
    client.start()
    try:
        for kill in range(3):
            with api(tmp_path, port=port) as process:
                before = len(answered)
                eventually(lambda before=before: len(answered) >= before + 5, "five more submissions")
                if kill == 2:
                    stop.set()
                    client.join(WAIT_SECONDS_MAX)
                    check(process.url, answered, tmp_path)
                else:
                    process.end(signal.SIGKILL)
    finally:
        stop.set()
        client.join(WAIT_SECONDS_MAX)


def check(url: str, answered: dict[str, str], state: Path) -> None:
    listed: dict[str, str] = {}
    cursor: dict[str, str] = {}
    while True:
        page = httpx2.get(f"{url}/api/v1/jobs", params={"limit": 500, **cursor}).json()
        for item in page["items"]:
            assert item["name"] not in listed, "two jobs of one request"
            listed[item["name"]] = item["id"]
        if page["nextCursor"] is None:
            break
        cursor = {"cursor": page["nextCursor"]}
    assert listed == answered
    cluster = LocalCluster(StateFolder(state).cluster)
    in_cluster = eventually(
        lambda: (found := cluster.jobs()) and len(found) == len(answered) and found, "the hand-over"
    )
    assert {job.metadata.name: job.metadata.uid for job in in_cluster} == answered
    for uid in list(answered.values())[:10]:
        events = httpx2.get(f"{url}/api/v1/jobs/{uid}/events").json()["items"]
        assert [event["type"] for event in events] == ["job.created"]


def test_a_body_of_fifty_megabytes_is_never_held(tmp_path: Path) -> None:
    with api(tmp_path) as process:
        url, headers = f"{process.url}/api/v1/jobs", {"content-type": "application/json"}
        httpx2.post(url, content=b"{}", headers=headers)
        before = psutil.Process(process.process.pid).memory_info().rss
        peak, done = [before], threading.Event()

        def watch() -> None:
            while not done.wait(0.005):
                peak.append(psutil.Process(process.process.pid).memory_info().rss)

        watcher = threading.Thread(target=watch)
        watcher.start()
        for chunked in (False, True):
            content = iter([b" " * 500_000] * 100) if chunked else b" " * 50_000_000
            assert httpx2.post(url, content=content, headers=headers).status_code == 413
        done.set()
        watcher.join()
    assert max(peak) - before < 25_000_000


def test_the_command_starts_from_nothing_and_ends(tmp_path: Path) -> None:
    """A bound for broken code, of its own processor time; the number that was measured is in the benchmark."""
    command = [sys.executable, "-m", API, "--state", str(tmp_path), "--port", "0", "--no-auth"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("muster api: ").strip().removesuffix("/api/v1")
            eventually(lambda: httpx2.get(f"{url}/readyz").status_code == 200, "it to be ready")
            spent = psutil.Process(process.pid).cpu_times()
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_SECONDS_MAX) == 0
        finally:
            process.kill()
    assert spent.user + spent.system < 60
