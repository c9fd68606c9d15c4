"""The queue, the nodes and usage as the command line shows them, against a server of recorded answers: the examples of
the API's own description."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from muster.api.core.fleet.routes import _NODES, _QUEUES
from muster.api.tenants.usage.routes import _EXAMPLE
from muster.cli import fleet, usage
from muster.client.address import Server
from muster.client.connection import Connection

ANSWERS: dict[str, Any] = {
    "/api/v1/queues": _QUEUES,
    "/api/v1/nodes": _NODES,
    "/api/v1/projects/nlp/usage": _EXAMPLE,
    "/api/v1/me": {"project": None, "admin": False, "roles": {"nlp": "member"}},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    paths: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        paths.append(str(request.url).removeprefix("http://127.0.0.1:1/api/v1/"))
        return httpx2.Response(200, json=ANSWERS[request.url.path])

    for module in (fleet, usage):
        client = lambda _: Connection(Server("http://127.0.0.1:1", "t"), transport=httpx2.MockTransport(answer))  # noqa: E731
        monkeypatch.setattr(module, "connect", client)
    return paths


def test_the_queue_says_who_waits_why_and_who_holds(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    fleet.queue()
    told = capsys.readouterr()
    assert "chat-sft  ann" in told.out
    assert "8 of the 64 that project nlp may hold are left" in told.out
    assert "base  bob" in told.out
    assert "nlp: holds 56 of 64 GPUs in 1 gang; 1 waiting" in told.err
    fleet.queue(project="cv")
    assert "chat-sft" not in capsys.readouterr().out


def test_nodes_say_who_holds_them_and_what_is_wrong(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    fleet.nodes()
    (_, line) = capsys.readouterr().out.splitlines()
    assert line.split() == [
        "ip-10-0-3-7", "spot-a", "spot", "p5.48xlarge", "8", "0", *["another", "project"],
        *["EC2", "takes", "this", "node", "back"],
    ]  # fmt: skip


def test_usage_of_one_s_own_project_as_table_and_csv(asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    usage.usage(month="2026-11")
    assert asked == ["me", "projects/nlp/usage?month=2026-11"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1][:6] == ["ann", "chat-sft", "32.0", "0.0", "0.0", "220.16"]
    assert lines[-1][:3] == ["nlp", "all", "32.0"]
    usage.usage(project="nlp", csv=True)
    head, line = capsys.readouterr().out.splitlines()
    assert head.startswith("month,project,person,job,name,gpuHours,cpuHours,nodeHours,cost,")
    assert line.startswith("2026-11,nlp,ann,6d4b4c1e-5b6e-4a0e-9a3e-0c8f7c1f2a11,chat-sft,32.0,0.0,4.0,220.16,")
