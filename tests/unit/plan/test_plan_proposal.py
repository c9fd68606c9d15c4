"""The job that is proposed for a model and its data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.documents.yaml_text import read_yaml, write_yaml
from muster.plan.proposal import TASKS, JobWishes, ProposalFacts, preliminary, propose
from muster.plan.warnings import DataShape, warnings_of
from muster.recipe.document import parse_job
from muster.recipe.training import TrainingConfig

WISHES = JobWishes(name="mine", model={"source": "hf://org/name"}, data="s3://bucket/chat.jsonl")
CHATS = DataShape(documents=200, tokens=8_000, lengths=(38, 50, 60), formats=("openai-chat",))
FORMATS = ("openai-chat", "prompt-completion", "preference", "unpaired-preference", "text", "jsonl")


def training(wishes: JobWishes, facts: ProposalFacts) -> TrainingConfig:
    return parse_job(propose(wishes, facts).document).spec.training_config


@given(
    documents=st.integers(1, 10**7),
    each=st.integers(1, 100_000),
    format=st.sampled_from(FORMATS),
    parameters=st.none() | st.integers(10**5, 10**12),
    limit=st.none() | st.integers(16, 10**6),
    gpus=st.integers(0, 9),
    wishes=st.fixed_dictionaries(
        {},
        optional={
            "task": st.sampled_from(TASKS),
            "nodes": st.integers(1, 7),
            "gpus": st.integers(0, 9),
            "epochs": st.integers(1, 50),
            "steps": st.integers(1, 10**6),
            "model": st.sampled_from([{"preset": "muster-1m"}, {"from": {"job": "a", "step": "best"}}]),
        },
    ),
)
def test_every_proposal_is_a_job_whose_warm_up_ends(
    documents: int,
    each: int,
    format: str,
    parameters: int | None,
    limit: int | None,
    gpus: int,
    wishes: dict[str, Any],
) -> None:
    shape = DataShape(documents, documents * each, lengths=(each, each, each), formats=(format,))
    if "preset" in wishes.get("model", {}):
        wishes, limit = {**wishes, "task": "sft"}, 4096  # a new model has no earlier self to be held against
    if "task" in wishes:
        shape = replace(shape, formats=())
    facts = ProposalFacts(data=shape, parameters=parameters, position_limit=limit, gpus=gpus)
    asked = replace(WISHES, **wishes)
    proposed = propose(asked, facts)
    text = write_yaml(proposed.document, proposed.comments)
    assert read_yaml(text).data == proposed.document
    config = parse_job(proposed.document).spec.training_config
    assert config.data.sequence_length <= (limit or 4096)
    rows = propose(asked, facts).document["spec"]["training"]["batch"]["tokensPerStep"] / config.data.sequence_length
    ranks = asked.nodes * max(1, proposed.document["spec"]["gang"]["gpusPerNode"])
    assert rows % (ranks * config.batch.micro_batch) == 0
    steps = asked.steps or 10**9
    assert config.optimizer.schedule.warmup_steps < steps


def test_two_hundred_short_chats_are_learnt_from() -> None:
    """The form once made one step of them, within a warm-up of ten."""
    job = training(WISHES, ProposalFacts(data=CHATS, parameters=10**6))
    assert CHATS.tokens is not None
    steps = 3 * CHATS.tokens * 0.9 / job.batch.tokens_per_step
    assert 40 <= steps <= 300
    assert 1 <= job.optimizer.schedule.warmup_steps <= 0.1 * steps
    assert job.evaluation is not None
    assert steps / 20 <= job.evaluation.every <= steps / 5
    from muster.plan.model_size import decoder_size
    from muster.recipe.architecture import PRESETS

    tokens = int(steps) * job.batch.tokens_per_step
    assert warnings_of(job, decoder_size(PRESETS["muster-1m"], None), CHATS, tokens, int(steps)) == ()


def test_large_data_gets_the_batch_of_recipes_and_all_gpus() -> None:
    shape = DataShape(2_000_000, 10**9, lengths=(400, 900, 1_800), formats=("sharegpt",))
    proposed = propose(WISHES, ProposalFacts(data=shape, parameters=8 * 10**9, gpus=8))
    job = parse_job(proposed.document).spec
    config = job.training_config
    assert (config.batch.tokens_per_step, config.data.sequence_length) == (65_536, 4_096)
    assert (job.gang.gpus_per_node, config.precision, config.adapter is not None) == (8, "bf16", True)
    assert config.evaluation is not None
    assert config.evaluation.holdout == 0.001


def test_a_gang_is_no_larger_than_the_data() -> None:
    few = replace(CHATS, documents=100, tokens=4_000)
    assert propose(WISHES, ProposalFacts(data=few, gpus=8)).document["spec"]["gang"]["gpusPerNode"] == 4
    asked = replace(WISHES, gpus=8)
    assert propose(asked, ProposalFacts(data=few, gpus=8)).document["spec"]["gang"]["gpusPerNode"] == 8


@pytest.mark.parametrize(
    ("parameters", "gpu_bytes", "kind"),
    [
        (10**8, None, None),
        (10**9, None, "lora"),
        (None, None, "lora"),
        (8 * 10**9, 80 << 30, "lora"),
        (8 * 10**9, 16 << 30, "qlora"),
    ],
)
def test_what_learns_follows_from_the_models_size(
    parameters: int | None, gpu_bytes: int | None, kind: str | None
) -> None:
    adapter = training(WISHES, ProposalFacts(CHATS, parameters=parameters, gpu_bytes=gpu_bytes)).adapter
    assert (adapter.kind if adapter is not None else None) == kind


def test_the_task_follows_from_the_data() -> None:
    def task(format: str) -> str:
        return training(WISHES, ProposalFacts(replace(CHATS, formats=(format,)))).task

    assert [task(format) for format in FORMATS] == ["sft", "sft", "dpo", "kto", "pretrain", "pretrain"]
    assert training(replace(WISHES, model={"preset": "muster-1m"}), ProposalFacts()).task == "pretrain"


def test_few_documents_are_all_trained_on() -> None:
    job = training(WISHES, ProposalFacts(replace(CHATS, documents=5)))
    assert job.evaluation is None
    held_out = training(replace(WISHES, evaluation="s3://bucket/held-out.jsonl"), ProposalFacts(CHATS)).evaluation
    assert held_out is not None
    assert (held_out.holdout, held_out.data[0].source) == (0.0, "s3://bucket/held-out.jsonl")


def test_what_is_no_number_is_left_for_the_dry_run_to_refuse() -> None:
    wishes = replace(WISHES, sequence_length="many", lr="fast", nodes="-1", epochs="x", gpus="y")
    document = propose(wishes, ProposalFacts(CHATS)).document["spec"]
    written = document["training"]
    assert (written["data"]["sequenceLength"], written["optimizer"]["lr"]) == ("many", "fast")
    assert (document["gang"], written["length"]) == ({"nodes": "-1", "gpusPerNode": "y"}, {"epochs": "x"})


def test_the_preliminary_document_names_model_and_data() -> None:
    job = parse_job(preliminary(WISHES)).spec.training_config
    assert (job.model.source, job.data.train[0].source) == ("hf://org/name", "s3://bucket/chat.jsonl")
