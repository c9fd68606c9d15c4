"""Sizes from a folder's headers, and a look at data: what an estimate knows without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.model_families import FAMILIES, config_of, write_model
from tests.s3_servers import silent_server

from muster.plan.model_size import position_limit
from muster.recipe.training import TrainingConfig
from muster.storage.data_shape import examine, look_at
from muster.storage.errors import StorageError
from muster.storage.model_source import model_facts
from muster.words.base import UserError, parse


def training(folder: Path, **changes: Any) -> TrainingConfig:
    document: dict[str, Any] = {
        "model": {"source": folder.as_uri()},
        "data": {"train": [{"source": "x"}], "sequenceLength": 32},
        "batch": {"tokensPerStep": 64},
        "length": {"steps": 1},
    }
    return parse(TrainingConfig, document | changes)


@pytest.mark.parametrize("family", FAMILIES)
def test_headers_tell_what_the_trainer_counts(family: str, tmp_path: Path) -> None:
    from muster.trainer.models.self_test import PackingFindings
    from muster.trainer.models.transformers_model import TransformersModel

    model = write_model(tmp_path, family)
    facts = model_facts(training(tmp_path))
    assert facts.size.parameters == sum(parameter.numel() for parameter in model.parameters())
    counted = TransformersModel(config_of(family), {}, PackingFindings(True))
    assert facts.size == counted.size()
    assert not facts.casts_itself
    assert facts.position_limit == counted.position_limit


@pytest.mark.parametrize(("kind", "targets"), [("lora", ["q_proj", "v_proj"]), ("dora", ["all-linear"])])
def test_headers_tell_an_adapters_weights(kind: str, targets: list[str], tmp_path: Path) -> None:
    from muster.trainer.models.self_test import PackingFindings
    from muster.trainer.models.transformers_model import TransformersModel

    write_model(tmp_path, "qwen3")
    config = training(tmp_path, adapter={"kind": kind, "rank": 4, "targets": targets})
    size = model_facts(config).size
    import torch

    module = TransformersModel(config_of("qwen3"), {}, PackingFindings(True), config.adapter).build(
        torch.float32, "none"
    )
    assert size.learning == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert size.parameters == sum(p.numel() for p in module.parameters())


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        model_facts(training(tmp_path))


def test_a_mirror_of_the_hub_is_asked_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "org" / "tiny" / "resolve" / "v1", "llama-3.1")
    monkeypatch.setenv("HF_ENDPOINT", tmp_path.as_uri())
    facts = model_facts(training(tmp_path, model={"source": "hf://org/tiny@v1"}))
    assert facts.size.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.timeout(20)  # a rank would bear it for a minute and a half
@pytest.mark.parametrize("place", ["source", "from"])
def test_storage_that_never_answers_is_soon_given_up(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.storage.settings.LOOK_READ_SECONDS", 0.5)
    monkeypatch.setattr("muster.storage.settings.LOOK_RETRY_SECONDS", 0.5)
    with silent_server() as url:
        for name, value in {"MUSTER_S3_ENDPOINT": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
            monkeypatch.setenv(name, value)
        model = {"source": "s3://models/x"} if place == "source" else {"from": {"uri": "s3://models/x"}}
        with pytest.raises(StorageError, match="s3://models/x"):
            model_facts(training(Path("/"), model=model))


def test_targets_that_match_nothing_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3")
    with pytest.raises(UserError, match="match no layer"):
        model_facts(training(tmp_path, adapter={"targets": ["nothing"]}))


def test_a_look_at_the_data(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "a" * (100 if n % 10 else 1000)}) for n in range(1000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    data = {"train": [{"source": str(tmp_path / "*.jsonl"), "format": "jsonl"}], "sequenceLength": 32}
    shape = look_at(training(tmp_path, model={"preset": "muster-1m"}, data=data))
    assert shape is not None
    assert shape.tokens == pytest.approx(1000 * 190, rel=0.01)
    assert shape.documents == pytest.approx(1000, rel=0.01)
    assert shape.lengths == (100, 1000, 1000)


def test_data_that_no_worker_could_read_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "qa.csv").write_text("question,answer\nwhat,that\n")
    sources = [{"source": str(tmp_path / "nosuch.jsonl")}, {"source": str(tmp_path / "qa.csv")}]
    job = training(tmp_path, data={"train": sources, "sequenceLength": 32})
    look = examine(job)
    assert look.shape is None
    assert [path for path, _ in look.faults] == ["data.train[0].source", "data.train[1]"]
    assert "does not exist" in look.faults[0][1]
    assert "columns that no format has" in look.faults[1][1]
    told = training(tmp_path, task="sft", data={"train": sources[1:], "sequenceLength": 32})
    ((_, words),) = examine(told).faults
    columns = "columns: {prompt: question, completion: answer}"
    assert words.endswith(
        f"Write the source as {{source: {sources[1]['source']}, format: prompt-completion, {columns}}}"
    )
    elsewhere = examine(job, same_disk=False)
    assert elsewhere.faults == ()
    assert "lies on the workers' disks" in elsewhere.gap


def test_the_evaluations_data_is_looked_at_as_the_trainings_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    missing, chats = [{"source": str(tmp_path / "nosuch.jsonl")}], [{"source": str(tmp_path / "chat.jsonl")}]
    evaluation = {"every": 1, "data": missing, "sets": {"chats": {"data": chats}}}
    data = {"train": [{"source": str(tmp_path / "a.txt")}], "sequenceLength": 32}
    look = examine(training(tmp_path, data=data, evaluation=evaluation))
    assert look.shape is not None
    assert [path for path, _ in look.faults] == ["evaluation.data[0].source", "evaluation.sets.chats.data[0].format"]
    assert "nosuch.jsonl" in look.evaluation_gap
    assert examine(training(tmp_path, data=data)).faults == ()


def test_data_that_is_elsewhere_is_not_guessed(tmp_path: Path) -> None:
    for source in ("builtin://python-stdlib", str(tmp_path / "nothing"), "https://example.org/a.txt"):
        assert look_at(training(tmp_path, data={"train": [{"source": source}], "sequenceLength": 32})) is None


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 4096),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}}, 16_384),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1024}}, 4096),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1024}}, 4096),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_positions_with_and_without_rope_scaling(rope: dict[str, Any], expected: int | None) -> None:
    assert position_limit({"max_position_embeddings": 4096, **rope}) == expected


def test_bytes_that_are_tokens_are_counted_as_such() -> None:
    """The tutorial's job has 182 steps; an estimate by the tokens of usual vocabularies said 33."""
    from muster.documents.prices import load_prices
    from muster.recipe.document import parse_job
    from muster.storage.estimating import estimate_with_storage

    examples = Path(__file__).parents[3] / "examples"
    job = {
        "task": "sft",
        "model": {"source": str(examples / "tiny-model")},
        "data": {"train": [{"source": str(examples / "chat.jsonl")}], "sequenceLength": 256},
        "batch": {"tokensPerStep": 2048},
        "length": {"epochs": 8},
        "evaluation": {"every": 50, "holdout": 0.1},
    }
    spec = parse_job({"metadata": {"name": "first"}, "spec": {"training": job, "gang": {"nodes": 1}}}).spec
    assert estimate_with_storage(spec, load_prices(), machine_bytes=1 << 34).steps == pytest.approx(182, rel=0.15)
