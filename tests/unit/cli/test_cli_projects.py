"""Projects by the command line, against a server of recorded answers."""

import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from muster.api.core.limits import ProjectLimits
from muster.cli import projects
from muster.client.address import Server
from muster.client.connection import Connection
from muster.words.base import parse

QUOTA = {"gpus": 64, "gangs": 8, "person": {"gpus": 16}}
NLP = {"name": "nlp", "namespace": "nlp", "role": "admin", "limits": {"gangSizes": [1, 2], "quota": QUOTA}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The bodies of what was put."""
    bodies: list[Any] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.method == "PUT":
            bodies.append(httpx2.Response(200, content=request.content).json())
        return httpx2.Response(200, json={"items": []} if request.url.path.endswith("/members") else NLP)

    def connect(_: str | None) -> Connection:
        return Connection(Server("http://127.0.0.1:1", "test"), transport=httpx2.MockTransport(answer))

    monkeypatch.setattr(projects, "connect", connect)
    return bodies


def test_one_limit_of_a_quota_is_changed_and_the_others_stay(asked: list[Any]) -> None:
    projects.set_project("nlp", settings=["quota.gpus=32", "quota.person.gangs=1", "gangSizes="])
    changed = {"gpus": 32, "gangs": 8, "person": {"gpus": 16, "gangs": 1}}
    assert asked == [{"limits": {"quota": changed}}]


def test_each_limit_is_shown_by_the_path_that_sets_it(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    projects.get("nlp")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["quota.gangs", "8"] in lines
    assert ["quota.person.gpus", "16"] in lines
    assert ["gangSizes", "1,", "2"] in lines
    assert asked == []


@pytest.mark.parametrize("page", ["sharing", "install"])
def test_the_limits_that_the_documents_set_can_be_set(asked: list[Any], page: str) -> None:
    """`[*]` is none: in YAML the star alone begins the name of something said before."""
    text = (Path(__file__).parents[3] / "docs" / f"{page}.md").read_text()
    commands = [line for line in re.findall(r"muster projects set [^`\n]*", text) if "LIMIT=VALUE" not in line]
    assert commands
    for command in commands:
        settings = [quoted or plain for quoted, plain in re.findall(r"--set (?:'([^']*)'|(\S+))", command)]
        projects.set_project("nlp", settings=settings)
        parse(ProjectLimits, asked[-1]["limits"], "limits")
