"""`muster data` tells data, a job's file and a job apart, and hands the trainer's tool what it needs."""

import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from typer.testing import CliRunner

from muster.cli import data
from muster.cli.errors import CliError
from muster.client.address import Server
from muster.client.connection import Connection

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], str | None]]:
    made: list[tuple[tuple[str, ...], str | None]] = []

    def run_tool(code: str, module: str, *arguments: str, given: str | None = None) -> None:
        made.append((arguments, given))

    monkeypatch.setattr(data, "run_tool", run_tool)
    return made


def test_a_jobs_file_is_given_as_the_trainer_reads_it(calls: list[Any], tmp_path: Path) -> None:
    command = ["inspect", str(EXAMPLES / "sft-chat.yaml"), "--set", "training.data.sequenceLength=128", "-n", "1"]
    assert CliRunner().invoke(data.app, command, catch_exceptions=False).exit_code == 0
    ((arguments, given),) = calls
    assert arguments == ("--job", "--samples", "1")
    training = json.loads(given)
    assert training["data"]["sequenceLength"] == 128
    assert training["data"]["train"][0]["source"] == str(EXAMPLES / "chat.jsonl"), "relative to the file"


def test_data_are_given_with_what_is_known_of_them(calls: list[Any], tmp_path: Path) -> None:
    for target in ("chat.jsonl", "s3://data/*.parquet", str(tmp_path)):
        command = ["validate", target, "--tokenizer", "t.json", "--sequence-length", "64"]
        assert CliRunner().invoke(data.app, command, catch_exceptions=False).exit_code == 0
    assert [arguments for arguments, _ in calls] == [
        (target, "--tokenizer", "t.json", "--sequence-length", "64", "--format", "auto", "--field", "text")
        for target in ("chat.jsonl", "s3://data/*.parquet", str(tmp_path))
    ]
    command = ["inspect", "a.jsonl", "--evaluation", "held.jsonl", "--evaluation", "s3://b/c", "--samples", "0"]
    assert CliRunner().invoke(data.app, command, catch_exceptions=False).exit_code == 0
    assert calls[-1][0][:5] == ("a.jsonl", "--evaluation", "held.jsonl", "--evaluation", "s3://b/c")
    for named in ("my-run", str(EXAMPLES / "sft-chat.yaml")):
        with pytest.raises(CliError, match="--evaluation stands beside data"):
            CliRunner().invoke(data.app, ["inspect", named, "--evaluation", "a.jsonl"], catch_exceptions=False)
    with pytest.raises(CliError, match="--set changes a job's file"):
        CliRunner().invoke(data.app, ["inspect", "a.jsonl", "--set", "seed=1"], catch_exceptions=False)


def test_columns_and_a_model_of_this_folder_are_given_as_the_tool_takes_them(calls: list[Any]) -> None:
    columns = "prompt=question,completion=answer"
    command = ["inspect", "qa.csv", "--model", "tiny", "--format", "prompt-completion", "--columns", columns]
    assert CliRunner().invoke(data.app, command, catch_exceptions=False).exit_code == 0
    ((arguments, _),) = calls
    assert arguments[arguments.index("--columns") + 1] == columns
    assert arguments[arguments.index("--model") + 1] == str(Path.cwd() / "tiny")
    with pytest.raises(CliError, match="--columns is made of pairs"):
        CliRunner().invoke(data.app, ["inspect", "qa.csv", "--columns", "question"], catch_exceptions=False)


def test_a_json_file_is_a_job_where_it_says_so(tmp_path: Path) -> None:
    job, rows = tmp_path / "job.json", tmp_path / "rows.json"
    job.write_text('{"kind": "TrainingJob"}')
    rows.write_text('[{"text": "a"}]')
    assert data._is_job_file(str(job))
    assert not data._is_job_file(str(rows))
    assert not data._is_job_file(str(tmp_path / "none.json"))
    assert data._is_job("my-run-2")
    assert not any(map(data._is_job, ["./x", "a.jsonl", "builtin://python-stdlib", "~/x", "-", "*"]))


def test_a_job_that_is_not_valid_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text((EXAMPLES / "sft-chat.yaml").read_text().replace("sequenceLength", "sequencelength"))
    with pytest.raises(CliError) as caught:
        CliRunner().invoke(data.app, ["validate", str(file)], catch_exceptions=False)
    assert caught.value.faults[0].line


def test_a_jobs_samples_are_shown_with_what_is_learnt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [
        {"document": 0, "text": "user: hi\n\x1b[2J\x9b\u202e", "tokens": 9, "learnt": False},
        {"document": 0, "text": "hello", "tokens": 5, "learnt": True},
    ]
    sample = {"stretches": said, "padding": 2, "compares": [], "cut": 7}
    report = {"sequenceLength": 16, "samplesPerEpoch": 4, "samplesPerStep": 2, "sources": [], "warnings": []}

    def answer(request: httpx2.Request) -> httpx2.Response:
        jobs = {"items": [{"id": "uid-1", "name": "my-run"}]}
        return httpx2.Response(
            200, json=report | {"shown": [sample] * 3} if request.url.path.endswith("/data") else jobs
        )

    def connect(_: str | None) -> Connection:
        return Connection(Server("http://127.0.0.1:1", "test"), transport=httpx2.MockTransport(answer))

    monkeypatch.setattr(data, "connect", connect)
    data.inspect("my-run", samples=1, no_color=True)
    told = capsys.readouterr().out
    assert "4 samples of 16 tokens in an epoch, 2 in a step" in told
    assert "sample 0: the first 14 of 21 tokens, 5 of them in the loss\n── document 0\n" in told
    assert "user: hi\n\\x1b[2J\\x9b\\u202e⟦hello⟧\n── 2 tokens of padding" in told, "nothing speaks to the terminal"
    assert "sample 1" not in told


def test_a_job_file_of_uploaded_data_is_the_servers_to_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = {"sequenceLength": 16, "samplesPerEpoch": 4, "samplesPerStep": 2, "sources": [], "warnings": []}
    sent: list[Any] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == "/api/v1/jobs:inspect"
        sent.append(json.loads(request.content)["spec"]["training"]["data"]["train"][0]["source"])
        return httpx2.Response(202, json={"state": "reading"}) if len(sent) == 1 else httpx2.Response(200, json=done)

    done = {"state": "ready", "report": report}
    server = Server("http://127.0.0.1:1", "test")
    monkeypatch.setattr(data, "connect", lambda _: Connection(server, transport=httpx2.MockTransport(answer)))
    monkeypatch.setattr(data, "READING_SECONDS", 0.0)
    job = tmp_path / "job.yaml"
    uploaded = "file-qf4ta3xvg2reekjd5awevr6g"
    job.write_text((EXAMPLES / "sft-chat.yaml").read_text().replace("source: chat.jsonl", f"source: {uploaded}"))
    assert CliRunner().invoke(data.app, ["inspect", str(job)], catch_exceptions=False).exit_code == 0
    data.inspect(str(job), no_color=True)
    assert sent == [uploaded] * 3
    assert "4 samples of 16 tokens in an epoch, 2 in a step" in capsys.readouterr().out
