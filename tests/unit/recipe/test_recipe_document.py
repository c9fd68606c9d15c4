"""What a person writes is refused early, with the path of every fault; what passes is filled in with every default."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.plan.oddities import oddities_of
from muster.recipe.document import JobSpec, WorkerConfig, parse_job
from muster.words import job as words
from muster.words.base import InvalidDocument, dump, dump_json
from muster.words.job import DEFAULT_BUDGETS, duration_seconds
from muster.words.signals import Cause
from muster.words.status import JobStatus

DOCUMENT: dict[str, Any] = {
    "apiVersion": "muster.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "demo"},
    "spec": {
        "training": {
            "model": {"preset": "muster-1m"},
            "data": {"train": [{"source": "builtin://python-stdlib"}], "sequenceLength": 256},
            "optimizer": {"lr": 1e-3},
            "batch": {"tokensPerStep": 8192, "microBatch": 4},
            "length": {"steps": 200},
        },
        "gang": {"nodes": 2},
        "checkpoint": {"every": 20},
    },
}


def edited(*edits: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    for edit in edits:
        edit(document)
    return document


def put(path: str, value: object) -> Callable[[dict[str, Any]], object]:
    def edit(document: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for key in parents:
            document = document.setdefault(key, {}) if isinstance(document, dict) else document[int(key)]
        document[last] = value

    return edit


def test_defaults_are_filled_in() -> None:
    resolved = dump(parse_job(DOCUMENT).spec)
    assert resolved["training"]["optimizer"]["betas"] == [0.9, 0.95]
    assert resolved["gang"]["nodes"] == {"min": 2, "max": 2}
    assert resolved["checkpoint"] == {"every": 20, "keep": {"last": 3, "best": 1}}


def test_a_resolved_spec_parses_to_itself() -> None:
    spec = parse_job(DOCUMENT).spec
    again = parse_job({**DOCUMENT, "spec": dump(spec)}).spec
    assert again == spec
    assert JobSpec.model_validate_json(dump_json(spec)) == spec


REFUSED = [
    ("spec.training.optimizer.lrr", put("spec.training.optimizer.lrr", 1), "lr"),
    ("spec.training.batch.tokens_per_step", put("spec.training.batch.tokens_per_step", 1), "tokensPerStep"),
    ("spec.gang.scheduler.kindd", put("spec.gang.scheduler.kindd", "kueue"), "kind"),
    ("spec.trainning", put("spec.trainning", {}), "training"),
    ("specs", put("specs", {}), None),
    ("spec.training.batch.tokensPerStep", put("spec.training.batch.tokensPerStep", "8192"), None),
    ("spec.training.batch.microBatch", put("spec.training.batch.microBatch", True), None),
    ("spec.training.batch.microBatch", put("spec.training.batch.microBatch", -1), None),
    ("spec.training.optimizer.lr", put("spec.training.optimizer.lr", float("nan")), None),
    ("spec.training.task", put("spec.training.task", "pretran"), "pretrain"),
    ("spec.training.adapter.kind", put("spec.training.adapter.kind", "lorra"), "lora"),
    ("spec.training.adapter.rnk", put("spec.training.adapter.rnk", 4), "rank"),
    ("spec.training.adapter.rank", put("spec.training.adapter.rank", 0), None),
    ("spec.training.adapter.targets", put("spec.training.adapter.targets", ["all-linear", "q_proj"]), None),
    ("spec.training.adapter", put("spec.training.adapter.targets", []), None),
    ("spec.training.adapter", put("spec.training.adapter", {"kind": "dora", "targetParameters": ["down_proj"]}), None),
    ("spec.training.adapter", put("spec.training.adapter", {"dropout": 0.1, "targetParameters": ["down_proj"]}), None),
    (
        "spec.training.adapter.targetParameters",
        put("spec.training.adapter.targetParameters", ["down_proj", "down_proj"]),
        None,
    ),
    ("spec.training.adapter.targets", put("spec.training.adapter.targets", ["q_proj", "q_proj"]), None),
    ("spec.training.adapter.dropout", put("spec.training.adapter.dropout", 1.0), None),
    ("spec.training", put("spec.training.adapter", {}), None),
    ("spec.training.model", put("spec.training.model", {"preset": "muster-9z"}), None),
    ("spec.training.model", put("spec.training.model", {}), None),
    ("spec.training.model", put("spec.training.model.from", {"job": "base"}), None),
    ("spec.training.length", put("spec.training.length", {"steps": 1, "epochs": 1}), None),
    ("spec.training.data.train", put("spec.training.data.train", []), None),
    ("spec.training", put("spec.training.data.sequenceLength", 8192), None),
    ("spec.training", put("spec.training.batch.tokensPerStep", 8191), None),
    ("spec.training", put("spec.training.data.train.0.format", "openai-chat"), None),
    ("spec", put("spec.gang.nodes", 3), None),
    ("spec.gang.nodes", put("spec.gang.nodes", {"min": 3, "max": 2}), None),
    ("spec.gang.nodes.max", put("spec.gang.nodes", {"min": 3}), None),
    ("spec.gang.resources.memory", put("spec.gang.resources.memory", "lots"), None),
    ("spec.checkpoint.every", put("spec.checkpoint.every", "10 minutes"), None),
    ("spec.checkpoint.every", put("spec.checkpoint.every", 0), None),
    ("spec.recovery", put("spec.recovery.budgets", {"preemption": 3}), None),
    ("spec.recovery", put("spec.recovery.budgets", {"bad_luck": 3}), None),
    ("spec.recovery.budgets.hang", put("spec.recovery.budgets", {"hang": -1}), None),
    ("spec.runtime.env[0]", put("spec.runtime.env", [{"name": "MUSTER_ATTEMPT", "value": "9"}]), None),
    ("metadata.name", put("metadata.name", "Llama 8B"), None),
    ("metadata.name", put("metadata.name", "x" * 49), None),
    ("metadata.namespace", put("metadata.namespace", "Team NLP"), None),
    ("metadata.labels", put("metadata.labels", {"a": 1}), None),
    ("apiVersion", put("apiVersion", "muster.dev/v2"), None),
    ("kind", put("kind", "TrainJob"), None),
    ("spec", put("spec", []), None),
]


@pytest.mark.parametrize(("path", "edit", "hint"), REFUSED, ids=[f"{i}-{row[0]}" for i, row in enumerate(REFUSED)])
def test_refused_with_its_path(path: str, edit: Callable[[dict[str, Any]], object], hint: str | None) -> None:
    with pytest.raises(InvalidDocument) as refused:
        parse_job(edited(edit))
    found = {problem.path: problem for problem in refused.value.problems}
    assert path in found, refused.value
    assert found[path].did_you_mean == hint
    assert found[path].message


def test_qlora_begins_with_a_folder() -> None:
    begun = edited(put("spec.training.adapter", {"kind": "qlora"}))
    put("spec.training.model", {"from": {"job": "base"}})(begun)
    with pytest.raises(InvalidDocument, match=r"give model\.source"):
        parse_job(begun)
    put("spec.training.model", {"source": "s3://models/base"})(begun)
    assert parse_job(begun).spec.training.adapter is not None


def test_an_adapter_on_a_new_model_says_what_to_start_from() -> None:
    with pytest.raises(InvalidDocument) as refused:
        parse_job(edited(put("spec.training.adapter", {"rank": 4})))
    assert "start from another job's checkpoint (model.from)" in str(refused.value)
    begun = edited(put("spec.training.adapter", {"rank": 4}))
    put("spec.training.model", {"from": {"job": "base"}})(begun)
    adapter = parse_job(begun).spec.training.adapter
    assert adapter is not None
    assert dump(adapter) == {
        "kind": "lora", "rank": 4, "alpha": 32.0, "targets": ["q_proj", "v_proj"],
        "targetParameters": [], "dropout": 0.0, "modulesToSave": [],
    }  # fmt: skip
    assert adapter.scale == 8.0


def test_every_fault_is_named_at_once() -> None:
    document = edited(put("spec.training.optimizer.lrr", 1))
    put("spec.gang.nodez", 2)(document)
    put("metadata.name", "")(document)
    with pytest.raises(InvalidDocument) as refused:
        parse_job(document)
    assert {p.path for p in refused.value.problems} == {
        "metadata.name",
        "spec.gang.nodez",
        "spec.training.optimizer.lrr",
    }


def test_a_list_whose_only_item_is_refused_is_not_called_too_short() -> None:
    with pytest.raises(InvalidDocument) as refused:
        parse_job(edited(put("spec.training.data.train", [{"source": "ftp://host/texts"}])))
    assert [p.path for p in refused.value.problems] == ["spec.training.data.train[0].source"]
    assert refused.value.count == 1


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)
    )
)
def test_any_document_parses_or_is_refused(document: object) -> None:
    with pytest.raises(InvalidDocument):
        parse_job({"spec": document, "metadata": {"name": "x"}})


def test_gang_sizes_keep_the_batch_whole() -> None:
    spec = parse_job(edited(put("spec.gang.nodes", {"min": 1, "max": 6}))).spec
    assert spec.gang_sizes() == (1, 2, 4)


@pytest.mark.parametrize("weight", [1e-300, 1e-9])
def test_a_weight_that_no_epoch_could_follow_is_refused(weight: float) -> None:
    data = [{"source": "/a", "format": "jsonl"}, {"source": "/b", "format": "jsonl", "weight": weight}]
    with pytest.raises(InvalidDocument, match=r"train\[1\].weight 1e-\d+ is 1e-\d+ of all weights"):
        parse_job(edited(put("spec.training.task", "pretrain"), put("spec.training.data.train", data)))


@pytest.mark.parametrize(
    ("parallel", "nodes", "words"),
    [
        ({"shard": "hsdp", "replicas": 3}, 2, "parallel.replicas 3 does not divide the"),
        ({"shard": "hsdp"}, 1, "there is one node: set parallel.replicas, or choose fsdp"),
    ],
)
def test_copies_that_do_not_divide_the_ranks_are_refused_at_submission(
    parallel: dict[str, object], nodes: int, words: str
) -> None:
    with pytest.raises(InvalidDocument, match=words):
        parse_job(edited(put("spec.training.parallel", parallel), put("spec.gang", {"nodes": nodes, "gpusPerNode": 4})))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"parallel": {"context": 3}},
            "parallel.context 3 does not divide the 256 tokens of data.sequenceLength; 2 and 4 do",
        ),
        ({"parallel": {"context": 16384}}, "data.sequenceLength; 256 does"),
        (
            {"parallel": {"context": 16}},
            "parallel.context 16 does not divide the 8 ranks; 8 does, or run a multiple of 16",
        ),
        ({"parallel": {"context": 2, "compile": True}}, "parallel.context 2 is not for parallel.compile"),
        (
            {"parallel": {"context": 2}, "distillation": {"teacher": {"source": "s3://models/t"}}},
            "parallel.context 2 is not for distillation, whose teacher reads whole rows",
        ),
        (
            {"parallel": {"context": 128}, "precision": "fp8"},
            "sequenceLength × microBatch / parallel.context 128 = 8 must be a multiple of 16",
        ),
    ],
)
def test_ranks_that_can_not_divide_the_tokens_of_rows_are_refused_at_submission(
    changes: dict[str, object], words: str
) -> None:
    gang = put("spec.gang", {"nodes": 1, "gpusPerNode": 8})
    with pytest.raises(InvalidDocument, match=re.escape(words)):
        parse_job(edited(gang, *(put(f"spec.training.{name}", value) for name, value in changes.items())))


def test_ranks_that_divide_the_tokens_of_rows_compute_one_share_together() -> None:
    """An elastic gang shrinks along data alone: to sizes that hold whole shares."""
    nodes = put("spec.gang", {"nodes": {"min": 2, "max": 8}, "gpusPerNode": 2})
    spec = parse_job(edited(nodes, put("spec.training.parallel", {"context": 4}))).spec
    assert spec.gang_sizes() == (2, 4, 8)
    assert [spec.training.data_parallel_size(ranks) for ranks in (4, 8, 16)] == [1, 2, 4]
    assert [spec.accumulation(nodes) for nodes in (2, 4, 8)] == [8, 4, 2]


@pytest.mark.parametrize(
    ("length", "schedule", "path", "words"),
    [
        ({"steps": 10}, {"warmupSteps": 10}, "optimizer.schedule.warmupSteps", "all of the 10 steps of the run"),
        ({"steps": 1}, {}, "length", "the run has one step"),
        ({"steps": 10}, {"warmupSteps": 2}, None, ""),
    ],
)
def test_what_is_odd_is_told(length: dict[str, int], schedule: dict[str, int], path: str | None, words: str) -> None:
    document = edited(put("spec.training.length", length), put("spec.training.optimizer", {"schedule": schedule}))
    found = oddities_of(parse_job(document).spec.training)
    assert [each[0] for each in found] == ([path] if path else [])
    assert all(words in each[1] for each in found)


def test_accumulation_is_derived() -> None:
    training = parse_job(DOCUMENT).spec.training
    assert [training.accumulation(ranks) for ranks in (1, 2, 4, 8)] == [8, 4, 2, 1]
    with pytest.raises(ValueError, match="can't be divided over 16 ranks"):
        training.accumulation(16)


def test_each_budget_has_a_default_but_the_free_causes() -> None:
    recovery = parse_job(edited(put("spec.recovery.budgets", {"hang": 1}))).spec.recovery
    assert recovery.budget(Cause.HANG) == 1
    assert recovery.budget(Cause.NUMERIC) == DEFAULT_BUDGETS[Cause.NUMERIC]
    assert {cause for cause in Cause if recovery.budget(cause) is None} == {Cause.PREEMPTION, Cause.EVICTION}


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200)])
def test_durations(text: str, seconds: int) -> None:
    assert duration_seconds(text) == seconds


def test_dump_is_canonical() -> None:
    shuffled = json.loads(json.dumps(DOCUMENT, sort_keys=True))
    assert dump_json(parse_job(shuffled).spec) == dump_json(parse_job(DOCUMENT).spec)


@pytest.mark.parametrize(
    "value", ["http://169.254.169.254", "http://u:p@[fe80::1]:80/x", "HTTPS://metadata.google.internal/"]
)
def test_no_endpoint_of_a_job_is_a_metadata_service(value: str) -> None:
    env = [{"name": "AWS_ENDPOINT_URL_S3", "value": value}]
    with pytest.raises(InvalidDocument, match=r"spec\.runtime\.env\[0\]: is the address of a machine's own metadata"):
        parse_job(edited(put("spec.runtime", {"env": env})))
    env[0]["value"] = "http://169.254.169.254.example.com"
    assert parse_job(edited(put("spec.runtime", {"env": env}))).spec.runtime.env[0].value == env[0]["value"]


def test_who_carries_a_job_hands_its_training_on_as_it_was_written() -> None:
    """The operator's own class reads no word of a training; what its workers get is the same to the byte."""
    spec = parse_job(
        edited(put("spec.training.adapter", {"rank": 4}), put("spec.training.model", {"from": {"job": "a"}}))
    )
    carried = words.JobSpec.model_validate(dump(spec.spec))
    assert dump_json(carried) == dump_json(spec.spec)
    status = JobStatus()
    configs = {dump_json(words.worker_config(each, status)) for each in (carried, spec.spec)}
    assert len(configs) == 1
    assert WorkerConfig.model_validate_json(configs.pop()).training == spec.spec.training
    job = words.TrainingJob(metadata=words.Metadata(name="demo"), spec=spec.spec)
    assert dump(job)["spec"] == dump(spec.spec)


def test_only_who_understands_a_training_knows_its_sizes_and_inputs() -> None:
    document = edited(put("spec.gang.nodes", {"min": 1, "max": 6}), put("spec.training.model", {"from": {"job": "a"}}))
    spec = parse_job(document).spec
    carried = words.JobSpec.model_validate(document["spec"], by_alias=True, by_name=False)
    assert (spec.gang_sizes(), carried.gang_sizes()) == ((1, 2, 4), (1, 2, 3, 4, 5, 6))
    assert {path: commit.job for path, commit in spec.input_commits().items()} == {"training.model.from": "a"}
    assert carried.input_commits() == {}
