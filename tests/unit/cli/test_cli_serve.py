"""`muster serve` prints commands that fit what the job trained."""

from __future__ import annotations

from typing import Any

import pytest

from muster.cli.errors import CliError
from muster.cli.serve import ServeCommands, commands_for
from muster.recipe.document import JobSpec, parse_job


def spec(**changes: Any) -> JobSpec:
    training = {
        "task": "sft",
        "model": {"source": "hf://org/base@abc"},
        "data": {"train": [{"source": "s3://data/chat.jsonl"}], "sequenceLength": 64},
        "batch": {"tokensPerStep": 64},
        "length": {"steps": 2},
        **changes,
    }
    return parse_job({"metadata": {"name": "my-sft"}, "spec": {"training": training}}).spec


def commands(**changes: Any) -> ServeCommands:
    return commands_for("my-sft", spec(**changes), "my-sft", "best", "./my-sft")


def test_a_whole_model_is_served_by_its_name() -> None:
    found = commands()
    assert found.export == "muster export my-sft --step best --to ./my-sft --format transformers"
    assert found.vllm == "vllm serve ./my-sft --served-model-name my-sft"
    assert found.sglang == "python -m sglang.launch_server --model-path ./my-sft --served-model-name my-sft"


def test_an_adapter_is_served_beside_its_base() -> None:
    found = commands(adapter={"kind": "lora", "rank": 20})
    assert found.export == "muster export my-sft --step best --to ./my-sft --format peft"
    assert found.vllm == (
        "vllm serve org/base --revision abc --enable-lora --max-lora-rank 32 --lora-modules my-sft=./my-sft"
    )
    assert found.sglang == (
        "python -m sglang.launch_server --model-path org/base --revision abc --enable-lora --max-lora-rank 20 "
        "--lora-paths my-sft=./my-sft"
    )
    assert (
        "vllm serve '/models/the base' --enable-lora"
        in commands(adapter={"kind": "rslora"}, model={"source": "file:///models/the%20base"}).vllm
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": {"kind": "dora"}},
        {"adapter": {"modulesToSave": ["lm_head"]}},
        {"adapter": {}, "model": {"source": "s3://models/base"}},
        {"adapter": {}, "model": {"from": {"job": "base", "step": "best"}}},
    ],
)
def test_what_servers_can_not_load_as_an_adapter_is_merged(changes: dict[str, Any]) -> None:
    found = commands(**changes)
    assert found.export.endswith("--format transformers")
    assert found.vllm == "vllm serve ./my-sft --served-model-name my-sft"
    assert "merged in" in found.note


def test_a_model_that_scores_is_not_served() -> None:
    with pytest.raises(CliError, match="scores texts"):
        commands(
            task="reward",
            data={"train": [{"source": "s3://data/p.jsonl", "format": "preference"}], "sequenceLength": 64},
        )
