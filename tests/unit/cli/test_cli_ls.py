"""The list of jobs hides none that runs, however many newer ones there are."""

from typing import Any

import httpx2
import pytest

from muster.cli import jobs
from muster.client.address import Server
from muster.client.connection import Connection


def job(name: str, phase: str) -> dict[str, Any]:
    return {
        "id": name, "name": name, "phase": phase, "step": 3, "steps": 10, "loss": 2.5, "tokensPerSecond": 7.0,
        "etaSeconds": 4.0, "attempt": 1, "restarts": 0, "createdAt": "2026-11-28T10:00:00Z", "because": "",
        "project": "default", "owner": "ann",
    }  # fmt: skip


THERE = [*(job(f"queued-{number}", "Queued") for number in range(5)), job("long", "Running"), job("done", "Succeeded")]


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    """An API with these jobs, the newest first."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked = request.url.params
        found = [each for each in THERE if not asked.get("phase") or each["phase"] == asked["phase"]]
        return httpx2.Response(200, json={"items": found[: int(asked["limit"])], "nextCursor": None})

    def connect(_: str | None) -> Connection:
        return Connection(Server("http://127.0.0.1:1", "test"), transport=httpx2.MockTransport(answer))

    monkeypatch.setattr(jobs, "connect", connect)


@pytest.mark.parametrize(
    ("limit", "names"),
    [
        (2, ["queued-0", "queued-1", "long"]),
        (6, ["queued-0", "queued-1", "queued-2", "queued-3", "queued-4", "long"]),
        (30, [each["name"] for each in THERE]),
    ],
)
def test_a_job_that_runs_is_listed_once(limit: int, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    jobs.ls(limit=limit)
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines()[1:]] == names
    assert (f"more than {limit}" in shown.err) is (limit < len(THERE))
