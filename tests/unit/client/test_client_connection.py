"""A connection: one submission however often it is sent again, and the server's problems as errors."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from muster.api.core.errors import invalid_parameter, problem_body
from muster.cli.errors import ExitStatus, cli_error
from muster.client import exchange as module
from muster.client.address import Server
from muster.client.connection import Connection
from muster.client.errors import Busy, MusterError, NotFound, Unreachable, refusal
from muster.words.base import DocumentProblem
from muster.words.status import Phase
from muster.words.text import nearest

JOB_ID = "6f1f7a0e-8f0a-4c6e-9a55-0d0f3c1c3a11"


def client(answer: Callable[[httpx2.Request], httpx2.Response], token: str | None = None, **more: Any) -> Connection:
    return Connection(Server("http://127.0.0.1:1", "test", token), transport=httpx2.MockTransport(answer), **more)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(module, "PAUSE_SECONDS_MAX", 0.001)


def test_a_lost_answer_is_asked_for_again_with_the_same_key() -> None:
    seen: list[tuple[str, bytes]] = []
    waits: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append((request.headers["idempotency-key"], request.content))
        if len(seen) == 1:
            raise httpx2.ReadError("the connection broke")
        if len(seen) == 2:
            return httpx2.Response(503, headers={"retry-after": "0"})
        return httpx2.Response(201, json={"id": JOB_ID})

    assert client(answer, waiting=waits.append).submit({"spec": 1}) == {"id": JOB_ID}
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert waits == ["the connection broke"]


def test_two_submissions_have_two_keys() -> None:
    keys = set()

    def answer(request: httpx2.Request) -> httpx2.Response:
        keys.add(request.headers["idempotency-key"])
        return httpx2.Response(201, json={})

    one = client(answer)
    one.submit({})
    one.submit({})
    assert len(keys) == 2


def test_no_server_is_said_at_once() -> None:
    calls = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        calls.append(1)
        raise httpx2.ConnectError("[Errno 111] Connection refused")

    with pytest.raises(Unreachable, match=r"no Muster answers at http://127.0.0.1:1: connection refused") as raised:
        client(answer).get("jobs")
    assert (cli_error(raised.value).exit_code, len(calls)) == (ExitStatus.UNREACHABLE, 1)


def test_a_server_that_was_there_is_waited_for_as_long_as_patience_lasts() -> None:
    calls: list[int] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        calls.append(1)
        if 1 < len(calls) < 5:
            raise httpx2.ConnectError("refused")
        return httpx2.Response(200, json={"n": len(calls)})

    patient = client(answer)
    assert [patient.get("x")["n"], patient.get("x")["n"]] == [1, 5]
    impatient = client(lambda _: httpx2.Response(503, json={"detail": "the database is away"}), patience_seconds=0)
    with pytest.raises(Busy, match="the database is away"):
        impatient.get("x")


def test_an_action_is_asked_for_at_its_own_address() -> None:
    """`jobs:estimate` was read as an address of the scheme `jobs`: `muster estimate` asked for /api/v1/estimate."""
    asked = client(lambda request: httpx2.Response(200, json=str(request.url)))
    assert asked.post("jobs:estimate") == "http://127.0.0.1:1/api/v1/jobs:estimate"


def test_a_token_is_sent_and_nothing_where_there_is_none() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json=request.headers.get("authorization"))

    assert client(answer, "abc").get("x") == "Bearer abc"
    assert client(answer).get("x") is None


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [
        (400, ExitStatus.USAGE),
        (413, ExitStatus.USAGE),
        (415, ExitStatus.USAGE),
        (422, ExitStatus.USAGE),
        (401, ExitStatus.FAILED),
        (403, ExitStatus.FAILED),
        (404, ExitStatus.FAILED),
        (409, ExitStatus.FAILED),
        (500, ExitStatus.FAILED),
        (503, ExitStatus.UNREACHABLE),
    ],
)
def test_every_refusal_has_an_exit_code(status: int, exit_code: ExitStatus) -> None:
    assert cli_error(refusal(status, {}, "http://x")).exit_code == exit_code


def test_a_problem_keeps_all_that_the_server_said() -> None:
    body = {
        "code": "invalid_job",
        "detail": "the job is invalid",
        "requestId": "r-1",
        "errors": [{"path": "spec.x", "message": "unknown key", "didYouMean": "y"}, {"path": "", "message": "z"}],
    }
    error = cli_error(refusal(422, body, "http://x"))
    assert (error.what, error.code) == ("the job is not valid: 2 problems", "invalid_job")
    assert [fault.problem for fault in error.faults] == [
        DocumentProblem("spec.x", "unknown key", "y"),
        DocumentProblem("", "z"),
    ]
    assert error.document()["error"]["requestId"] == "r-1"


@pytest.mark.parametrize("body", [b"", b"<html>gateway</html>", b"[1]", b'"text"'])
def test_an_answer_that_is_no_problem_document_is_still_an_error(body: bytes) -> None:
    with pytest.raises(MusterError, match=r"http://127.0.0.1:1 answered with status 500"):
        client(lambda _: httpx2.Response(500, content=body)).get("x")


def test_jobs_are_found_by_name_or_id() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.url.params["limit"] == "1"
        items = [{"id": JOB_ID}] if request.url.params["name"] == "mine" else []
        return httpx2.Response(200, json={"items": items, "nextCursor": None})

    one = client(answer)
    assert one.job_id("mine") == JOB_ID
    assert one.job_id(JOB_ID.upper()) == JOB_ID
    with pytest.raises(NotFound, match="there is no job 'other'"):
        one.job_id("other")


def test_lists_follow_their_cursor_up_to_the_limit() -> None:
    asked: list[tuple[str | None, str]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        cursor, limit = request.url.params.get("cursor"), request.url.params["limit"]
        asked.append((cursor, limit))
        start = int(cursor or 0)
        end = min(start + int(limit), 1_050)
        return httpx2.Response(
            200, json={"items": [{"n": n} for n in range(start, end)], "nextCursor": str(end) if end < 1_050 else None}
        )

    def listed(limit: int) -> list[int]:
        asked.clear()
        return [job["n"] for page in one.job_pages(limit) for job in page]

    one = client(answer)
    assert listed(2_000) == list(range(1_050))
    assert asked == [(None, "500"), ("500", "500"), ("1000", "500")], "as few requests as the API allows"
    assert listed(3) == [0, 1, 2]
    assert asked == [(None, "3")]


def events(*parts: str) -> httpx2.Response:
    return httpx2.Response(200, content="".join(parts).encode(), headers={"content-type": "text/event-stream"})


def test_a_broken_stream_goes_on_after_the_last_event() -> None:
    asked: list[str | None] = []
    waits: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.headers.get("last-event-id"))
        if len(asked) == 1:
            return events("id: 1\nevent: log\ndata: {}\n\n", ": ping\n\n", "id: 2\nevent: log\ndata: {}\n\n")
        if len(asked) == 2:
            raise httpx2.ReadTimeout("silence")
        if len(asked) == 3:
            return httpx2.Response(503)
        return events("id: 3\nevent: log\ndata: {}\n\n", 'event: end\ndata: {"phase": "Failed"}\n\n', "data: no\n\n")

    found = list(client(answer, waiting=waits.append).stream("jobs/x/logs"))
    assert [(event.event, event.id) for event in found] == [("log", "1"), ("log", "2"), ("log", "3"), ("end", "3")]
    assert asked == [None, "2", "2", "2"]
    assert waits == ["the server closed the stream"]


def test_a_stream_with_nothing_left_ends() -> None:
    assert list(client(lambda _: httpx2.Response(204)).stream("jobs/x/events", last_id="9")) == []


def test_a_refused_stream_is_an_error() -> None:
    problem = json.dumps({"code": "job_not_found", "detail": "no such job"}).encode()
    with pytest.raises(NotFound, match="no such job") as raised:
        list(client(lambda _: httpx2.Response(404, content=problem)).stream("jobs/x/events"))
    assert cli_error(raised.value).next_step == "`muster ls` lists the jobs"


def test_a_stream_of_nobody_is_unreachable() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused")

    with pytest.raises(Unreachable):
        list(client(answer).stream("jobs/x/events"))


@contextlib.contextmanager
def silent_server(drip: bytes) -> Iterator[str]:
    """A server that accepts every connection and sends `drip`, byte by byte, for ever, or nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    closing = threading.Event()

    def serve() -> None:
        connections = []
        while not closing.is_set():
            connections.append(listener.accept()[0])
            for byte in drip:
                if closing.wait(0.05):
                    break
                connections[-1].send(bytes([byte]))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    closing.set()
    socket.create_connection(listener.getsockname()).close()
    thread.join()
    listener.close()


@pytest.mark.parametrize("drip", [b"", b"HTTP/1.1 200 OK\r\nx-slow: " + b"a" * 400], ids=["silent", "dripping"])
def test_a_server_that_accepts_and_never_answers_is_said(drip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The silent one was waited for without a word, the dripping one without end."""
    monkeypatch.setattr(module, "ANSWER_SECONDS_MAX", 1.5)
    monkeypatch.setattr(module, "SILENCE_SECONDS", 0.3)
    waits: list[str] = []
    with (
        silent_server(drip) as url,
        Connection(Server(url, "test"), waiting=waits.append) as asking,
        pytest.raises(Unreachable, match=r"no answer within 1\.5 s") as raised,
    ):
        asking.get("jobs")
    assert waits == ["no answer for 0.3 s"]
    assert raised.value.next_step.startswith(f"`curl -m 5 {url}/healthz`")


def test_a_stream_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STREAM_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(module, "STREAM_SILENCE_SECONDS", 0.05)
    with pytest.raises(Unreachable, match="the server closed the stream"):
        list(client(lambda _: httpx2.Response(503)).stream("jobs/x/events"))


def test_a_wrong_option_is_told_once_in_the_words_of_the_option() -> None:
    """It came as `query.phase`, twice, with the near word as Python shows a constant."""
    fault = invalid_parameter("query.phase", "'Runing' is not one of Queued, Running", nearest("Runing", Phase))
    error = cli_error(refusal(422, problem_body(fault, "/api/v1/jobs", "x"), "http://127.0.0.1:1"))
    assert error.what == "--phase: 'Runing' is not one of Queued, Running. Did you mean 'Running'?"
    assert (error.faults, error.exit_code) == ((), ExitStatus.USAGE)
