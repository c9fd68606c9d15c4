"""The reference of the job's document against the models: every key, its example, and the names of other tools."""

from typing import Annotated, Any

import pytest
from pydantic import ConfigDict, TypeAdapter

from muster.documents.reader import read
from muster.recipe.document import JobSpec, parse_job
from muster.recipe.foreign_names import FOREIGN_NAMES, in_muster
from muster.recipe.reference import example_lines, flow, job_reference, look_up
from muster.words.base import InvalidDocument, fields_within, fold

KEYS = job_reference()
FIELDS = dict(fields_within(JobSpec))

JOB: dict[str, Any] = {
    "metadata": {"name": "a-job"},
    "spec": {
        "training": {
            "model": {"preset": "muster-1m"},
            "data": {"train": [{"source": "texts"}]},
            "batch": {"tokensPerStep": 512},
            "length": {"steps": 1},
        }
    },
}


def data_of(text: str) -> Any:
    return read(text.encode(), "yaml").data


def test_every_field_of_the_models_is_a_key_and_nothing_else_is() -> None:
    assert {path for path in KEYS if not path.endswith(("[]", "*"))} == set(FIELDS)


def test_every_key_has_a_type_a_meaning_and_what_it_is_by_default() -> None:
    for path, key in KEYS.items():
        assert key.kind, path
        assert key.meaning, path
    for path, field in FIELDS.items():
        assert KEYS[path].required == field.is_required(), path
    assert KEYS["training.optimizer.lr"].facts == "number, more than 0, less than 10, default `0.0003`"
    assert KEYS["training.batch.tokensPerStep"].facts == "whole number, at least 1, in tokens, required"
    assert KEYS["training.data.curation.quality.minAlphabeticWords"].unit == "", "a share, not a number of words"


def test_every_example_is_taken_by_its_field() -> None:
    for path, field in FIELDS.items():
        is_taken_by: TypeAdapter[Any] = TypeAdapter(
            Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation,
            config=None if hasattr(field.annotation, "model_fields") else ConfigDict(strict=True),
        )
        written = data_of(f"key: {flow(KEYS[path].example)}")["key"]
        assert written == KEYS[path].example, path
        is_taken_by.validate_python(written)


def test_an_example_stands_where_it_belongs_in_a_document() -> None:
    for path, key in KEYS.items():
        here = data_of("\n".join(example_lines(key)))["spec"]
        for part in path.split("."):
            here = here["NAME" if part == "*" else part.removesuffix("[]")]
            here = here[0] if part.endswith("[]") else here
        assert here == key.example, path


@pytest.mark.parametrize(
    ("words", "paths"),
    [
        ("training.batch", ["training.batch"]),
        ("spec.training.data.train[0].format", ["training.data.train[].format"]),
        ("training.data.train.format", ["training.data.train[].format"]),
        ("warmup_steps", ["training.optimizer.schedule.warmupSteps"]),
        ("schedule.warmupSteps", ["training.optimizer.schedule.warmupSteps"]),
        ("program.inputs.base.job", ["program.inputs.*.job"]),
        ("recovery.budgets.hang", ["recovery.budgets"]),
        ("keep", ["checkpoint.keep"]),
        ("training.seeed", []),
        ("training.seed.more", []),
        ("", []),
    ],
)
def test_keys_are_looked_up_by_path_or_end(words: str, paths: list[str]) -> None:
    assert [key.path for key in look_up(words)] == paths


def test_names_of_other_tools_lead_to_keys_of_the_contract() -> None:
    names = [fold(name) for setting in FOREIGN_NAMES for name in setting.names]
    assert len(set(names)) == len(names), "a name leads to one key"
    own = {fold(path.rpartition(".")[2]) for path in FIELDS}
    assert own & set(names) == {"gpus"}, "a key of the contract is found by its own path"
    for setting in FOREIGN_NAMES:
        assert setting.path in FIELDS or (setting.path == "" and setting.note), setting.names
        assert not setting.note.endswith("."), setting.note


def test_a_name_is_found_in_any_spelling() -> None:
    for name in ("learning_rate", "learningRate", "learning-rate"):
        setting = in_muster(name)
        assert setting is not None
        assert setting.path == "training.optimizer.lr"
    assert in_muster("no_such_setting") is None


HINTS: list[tuple[str, str, str | None]] = [
    # (path of the unknown key, the message's end, the hint)
    ("spec.training.learning_rate", "unknown key", "spec.training.optimizer.lr"),
    ("spec.training.optimizer.learning_rate", "unknown key", "lr"),
    ("spec.training.adapter.lora_alpha", "unknown key", "alpha"),
    ("spec.training.num_train_epochs", "unknown key", "spec.training.length.epochs"),
    ("spec.training.optimizer.weight_decay", "unknown key", "weightDecay"),
    ("spec.training.weight_decay", "unknown key", "spec.training.optimizer.weightDecay"),
    ("spec.training.warmupSteps", "unknown key", "spec.training.optimizer.schedule.warmupSteps"),
    ("spec.gang.gpus", "unknown key: GPUs of each node", "gpusPerNode"),
    ("spec.gang.replicas", "unknown key", None),  # a key of training.parallel, which means something else
    ("spec.learning_rate", "unknown key", "spec.training.optimizer.lr"),
    ("spec.training.data.train[0].text_column", "unknown key", "field"),
    ("spec.training.logging_steps", "unknown key: every step is recorded; leave it out", None),
    ("spec.training.beta", "unknown key", None),  # there are five
]


@pytest.mark.parametrize(("path", "message", "hint"), HINTS, ids=[path for path, _, _ in HINTS])
def test_an_unknown_key_is_answered_by_the_one_that_was_meant(path: str, message: str, hint: str | None) -> None:
    job = {**JOB, "spec": data_of(repr(JOB["spec"]))}
    here: Any = job
    *above, key = path.replace("[0]", ".0").split(".")
    for part in above:
        here = here[int(part)] if part.isdigit() else here.setdefault(part, {})
    here[key] = 1
    if "adapter" in path:
        job["spec"]["training"]["model"] = {"source": "s3://models/base"}
    with pytest.raises(InvalidDocument) as refused:
        parse_job(job)
    (problem,) = refused.value.problems
    assert (problem.path, problem.message, problem.did_you_mean) == (path, message, hint)
