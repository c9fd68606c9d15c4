"""`muster init` and `muster finetune` on a machine without a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from muster.cli.errors import CliError
from muster.cli.main import app
from muster.cli.proposing import job_name, model_setting
from muster.client.errors import Unavailable

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("MUSTER_SERVER", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").symlink_to(EXAMPLES / "chat.jsonl")
    (tmp_path / "tiny").symlink_to(EXAMPLES / "tiny-model")


def test_init_writes_a_job_that_can_be_submitted(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["init", "tiny", "chats.jsonl", "--yes"])
    assert result.exit_code == 0, result.output
    document = yaml.safe_load((tmp_path / "job.yaml").read_text())
    training = document["spec"]["training"]
    assert (document["metadata"], training["model"]) == ({"name": "chats"}, {"source": "tiny"})
    assert training["data"]["train"] == [{"source": "chats.jsonl"}]
    assert "# All of its 821k weights are trained" in (tmp_path / "job.yaml").read_text()
    assert "muster submit job.yaml --follow" in result.output
    assert "no server runs here; start one with `muster up`" in result.output
    with pytest.raises(CliError, match=r"job\.yaml is there already"):
        CliRunner().invoke(app, ["init", "tiny", "chats.jsonl", "--yes"], catch_exceptions=False)


def test_options_stand_in_the_document(tmp_path: Path) -> None:
    options = ["--epochs", "7", "--lr", "0.003", "--gpus", "2", "--name", "other", "--sequence-length", "64"]
    words = ["init", "muster-1m", "chats.jsonl", "-o", "sub/a.yaml", "--method", "whole", "--json", *options]
    (tmp_path / "sub").mkdir()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    spec = json.loads(result.stdout)["document"]["spec"]
    training = spec["training"]
    assert (training["length"], training["optimizer"]["lr"], spec["gang"]["gpusPerNode"]) == ({"epochs": 7}, 0.003, 2)
    assert training["data"]["sequenceLength"] == 64
    assert training["data"]["train"][0]["source"] == str(tmp_path / "chats.jsonl")  # the file lies elsewhere


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "MODEL is missing, and nobody can be asked"),
        (["tiny"], "DATA is missing"),
        (["tiny", "nosuch.jsonl"], "the data can't be used: .*does not exist"),
        (["state", "chats.jsonl"], "there is no job|the model can't be used|not known"),
        (["tiny", "chats.jsonl", "--method", "lorra"], "--method is one of whole, lora, qlora"),
        (["tiny", "chats.jsonl", "--task", "chat"], "--task is one of sft, pretrain"),
    ],
)
def test_what_can_t_be_used_is_refused_before_a_file_is_written(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "state").mkdir()
    with pytest.raises(CliError, match=message):
        CliRunner().invoke(app, ["init", *words], catch_exceptions=False)
    assert not (tmp_path / "job.yaml").exists()


def test_finetune_needs_a_server() -> None:
    with pytest.raises(Unavailable, match="none runs on this machine"):
        CliRunner().invoke(app, ["finetune", "tiny", "chats.jsonl"], catch_exceptions=False)


def test_a_model_is_what_its_name_looks_like(tmp_path: Path) -> None:
    assert model_setting("tiny", tmp_path) == {"source": "tiny"}
    assert model_setting("Qwen/Qwen3-8B", tmp_path) == {"source": "hf://Qwen/Qwen3-8B"}
    assert model_setting("s3://models/llama", tmp_path) == {"source": "s3://models/llama"}
    assert model_setting("muster-1m", tmp_path) == {"preset": "muster-1m"}
    assert model_setting("my-job", tmp_path) == {"from": {"job": "my-job", "step": "best"}}
    assert model_setting("./Nowhere", tmp_path) == {"source": "./Nowhere"}


def test_a_job_is_named_after_its_data() -> None:
    names = [job_name(data) for data in ("My Chats.jsonl.gz", "s3://b/folder/", "/data/*.parquet", "2024_logs.csv")]
    assert names == ["my-chats", "folder", "job", "job-2024-logs"]
