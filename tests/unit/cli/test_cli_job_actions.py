"""Suspend, resume, tag and delete: the sentence that each ends with, and what it refuses without a terminal."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from muster.cli import jobs, tagging
from muster.cli.errors import CliError, ExitStatus
from muster.client.address import Server
from muster.client.connection import Connection

UID = "029a3a4e-0f6c-4d1c-8f0e-6f9619ff8b86"


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests that reach a server whose one job is `Suspended`."""
    sent: list[str] = []
    job: dict[str, Any] = {
        "id": UID,
        "metadata": {"name": "mine", "tags": ["baseline", "paper"], "note": "table 2 \x07"},
        "status": {"phase": "Suspended", "because": "suspended by ann"},
    }

    def answer(request: httpx2.Request) -> httpx2.Response:
        sent.append(f"{request.method} {request.url.path.removeprefix('/api/v1/')}")
        return httpx2.Response(200, json=job)

    def connect(_: str | None) -> Connection:
        return Connection(Server("http://127.0.0.1:1", "t"), transport=httpx2.MockTransport(answer))

    monkeypatch.setattr(jobs, "connect", connect)
    return sent


def test_a_resumed_job_is_not_said_to_be_suspended(requests: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    jobs.resume([UID])
    assert capsys.readouterr().err == "mine is being resumed (now Suspended: suspended by ann)\n"
    jobs.suspend([UID])
    assert capsys.readouterr().err == "mine is Suspended\n"
    assert requests == [f"POST jobs/{UID}:resume", f"POST jobs/{UID}:suspend"]


def test_tags_and_the_note_are_written_in_one_request(
    requests: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tagging, "connect", jobs.connect)
    tagging.tag(UID, ["paper"], remove=["old"], note="")
    tagging.tag(UID)
    assert requests == [f"PATCH jobs/{UID}", f"GET jobs/{UID}"]
    assert capsys.readouterr().err == "mine: baseline paper\nnote: table 2 ·\n" * 2


@pytest.mark.parametrize("json", [False, True])
def test_checkpoints_are_deleted_only_by_somebody_who_confirms(requests: list[str], json: bool) -> None:
    """Neither a script nor `--json` is a person: both must say --yes."""
    with pytest.raises(CliError, match="nothing was deleted") as raised:
        jobs.rm([UID], checkpoints=True, json=json)
    assert raised.value.exit_code == ExitStatus.USAGE
    assert raised.value.next_step == "add --yes, or leave out --checkpoints to keep them"
    assert requests == []
    jobs.rm([UID], checkpoints=True, yes=True)
    assert requests == [f"DELETE jobs/{UID}"]


def test_a_terminal_is_asked_before_records_are_deleted(
    requests: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return "\n"

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with pytest.raises(jobs.typer.Exit):
        jobs.rm(["mine"])
    assert "Delete mine: records and logs?" in capsys.readouterr().err
    assert requests == []
