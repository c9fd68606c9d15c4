"""`muster generate` and `muster chat` hand the trainer's tool what was chosen."""

from typing import Any

import pytest
from typer.testing import CliRunner

from muster.cli import generation
from muster.cli.errors import CliError
from muster.cli.main import app


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    made: list[tuple[str, ...]] = []
    monkeypatch.setattr(generation, "run_tool", lambda code, *arguments: made.append(arguments))
    monkeypatch.setattr(generation, "folder_of", lambda where, server, step="": f"s3://bucket/{where}")
    return made


def test_what_was_chosen_reaches_the_tool(calls: list[Any]) -> None:
    words = ["generate", "job", "--prompt", "-x", "--chat", "--top-p", "0.9", "--stop", "--", "--stop", "b"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    words = ["chat", "job", "--step", "40", "--system", "be short", "--temperature", "0"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    tool, where = "muster.trainer.convert.generate", ("--checkpoint=s3://bucket/job",)
    assert calls == [
        (tool, *where, "--step=best", "--prompt=-x", "--system=", "--chat", "--tokens=128", "--temperature=0.8",
         "--top-p=0.9", "--seed=0", "--stop=--", "--stop=b"),
        (tool, *where, "--step=40", "--system=be short", "--interactive", "--tokens=512", "--temperature=0.0",
         "--top-p=1.0", "--seed=0"),
    ]  # fmt: skip


def test_the_prompt_stands_after_the_job_or_behind_its_option(calls: list[Any]) -> None:
    assert CliRunner().invoke(app, ["generate", "job", "Once upon"], catch_exceptions=False).exit_code == 0
    assert "--prompt=Once upon" in calls[0]
    for wrong in (["generate", "job"], ["generate", "job", "a", "--prompt", "b"]):
        with pytest.raises(CliError) as raised:
            CliRunner().invoke(app, wrong, catch_exceptions=False)
        assert raised.value.next_step == 'muster generate job "Once upon a time"'
    assert len(calls) == 1


@pytest.mark.parametrize("wrong", [["--tokens", "0"], ["--top-p", "0"], ["--temperature", "-1"]])
def test_what_makes_no_sense_is_refused_before_anything_runs(calls: list[Any], wrong: list[str]) -> None:
    assert CliRunner().invoke(app, ["generate", "job", *wrong]).exit_code == 2
    assert calls == []
