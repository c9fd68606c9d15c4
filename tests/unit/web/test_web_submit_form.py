"""The document that the form stands for."""

from __future__ import annotations

import pytest
import yaml

from muster.documents.yaml_text import read_yaml
from muster.plan.proposal import ProposalFacts, propose
from muster.recipe.document import parse_job
from muster.web.submit_form import FIELDS, METHODS, MODELS, read_fields, wishes_of
from muster.web.submit_form import written as written_job

TUNED = {**FIELDS, "name": "mine", "model": "hf://org/name@main", "data": "s3://bucket/chat.jsonl"}


def written(fields: dict[str, str]) -> str:
    """The text of a form whose model and data nobody could look at."""
    return written_job(propose(wishes_of(fields), ProposalFacts()))


@pytest.mark.parametrize(
    "changes",
    [
        *({"method": method} for method, _ in METHODS),
        {"gpus": "8", "nodes": "4"},
        {"gpus": "3", "nodes": "7"},
        {"project": "nlp", "lr": "3e-5", "epochs": "1"},
        {"kind": "pretrain", "data": "/data/*.txt", "steps": "20"},
    ],
)
def test_what_is_filled_in_can_be_submitted(changes: dict[str, str]) -> None:
    """Whatever the number of ranks, the batch divides over them."""
    job = parse_job(yaml.safe_load(written(TUNED | changes)))
    assert job.name == "mine"
    assert job.labels == ({"muster.dev/project": "nlp"} if "project" in changes else {})
    assert job.spec.training.optimizer.lr == float(changes.get("lr", job.spec.training.optimizer.lr))


def test_a_name_that_reads_as_a_number_stays_text() -> None:
    """`1e5` is text in YAML 1.1, which PyYAML writes, and a number in 1.2, which the API reads."""
    assert read_yaml(written(TUNED | {"name": "1e5"})).data["metadata"]["name"] == "1e5"


def test_every_shape_can_be_pretrained() -> None:
    for preset in MODELS:
        fields = TUNED | {"kind": "pretrain", "preset": preset, "tokenizer": "s3://models/tokenizer.json"}
        assert parse_job(yaml.safe_load(written(fields))).spec.training.model.preset == preset


def test_a_model_is_a_job_by_its_name_or_a_folder() -> None:
    def model(text: str) -> object:
        return yaml.safe_load(written(TUNED | {"model": text}))["spec"]["training"]["model"]

    assert model("base-run") == {"from": {"job": "base-run", "step": "best"}}
    assert model("s3://models/llama") == {"source": "s3://models/llama"}


def test_what_is_no_number_is_left_for_the_dry_run_to_refuse() -> None:
    training = yaml.safe_load(written(TUNED | {"sequence": "many", "lr": "fast", "nodes": "-1"}))["spec"]["training"]
    assert (training["data"]["sequenceLength"], training["optimizer"]["lr"]) == ("many", "fast")
    assert training["batch"]["tokensPerStep"] == "many"


def test_fields_that_were_not_sent_have_their_first_value() -> None:
    assert read_fields({"name": ["  mine "], "foreign": ["x"]}) == FIELDS | {"name": "mine"}
