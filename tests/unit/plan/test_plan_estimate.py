"""What an estimate says: memory that adds up, gangs that fit, changes that help, times and their basis, warnings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.documents.prices import load_prices
from muster.plan.checkpoint_interval import INTERVAL_SECONDS_MAX, assumed_interval_seconds
from muster.plan.estimate import Estimate, EstimateInputs, estimate_job
from muster.plan.fitting import RankHost, changes_that_fit, lowest_that_fits, need_of
from muster.plan.layouts import ModelLayout
from muster.plan.memory import Device, MemoryNeed, estimate, gib
from muster.plan.model_size import decoder_size
from muster.plan.throughput import MeasuredSpeed, setup_of
from muster.plan.warnings import DataShape
from muster.recipe.adapter_config import Adapter
from muster.recipe.architecture import PRESETS
from muster.recipe.document import JobSpec
from muster.recipe.training import TrainingConfig
from muster.words.base import parse

GIB = 2**30
EIGHT_B = decoder_size(PRESETS["llama-8b"], None)
LORA = Adapter(kind="lora", rank=16, targets=("q_proj", "v_proj"))


def spec(gang: dict[str, Any] | None = None, **training: Any) -> JobSpec:
    document: dict[str, Any] = {
        "model": {"preset": "llama-8b"},
        "data": {"train": [{"source": "file:///x"}], "sequenceLength": 4096},
        "batch": {"tokensPerStep": 2**20, "microBatch": 2},
        "precision": "bf16",
        "length": {"tokens": 2**30},
    }
    return parse(JobSpec, {"training": document | training, "gang": gang or {}})


def known(**changes: Any) -> EstimateInputs:
    return replace(EstimateInputs(EIGHT_B, True, load_prices()), **changes)


def test_parts_add_up_and_sharding_lowers_them() -> None:
    found = estimate_job(spec({"nodes": 2, "gpusPerNode": 8, "instanceTypes": ["p5.48xlarge"]}), known())
    assert [memory.shard for memory in found.memory] == ["ddp", "zero2", "fsdp", "hsdp"]
    assert all(memory.total == sum(memory.parts.values()) for memory in found.memory)
    ddp, zero2, fsdp, hsdp = (memory.total for memory in found.memory)
    assert ddp > zero2 > fsdp
    assert fsdp < hsdp < ddp
    assert found.memory[0].fits is False  # 16 bytes of each of 8 G weights
    assert found.fits is True
    assert found.shard == "fsdp"


def test_the_cheapest_gang_is_the_cheapest_of_those_that_fit() -> None:
    found = estimate_job(spec({"gpusPerNode": 1}), known())
    assert found.cheapest is not None
    assert found.cheapest == found.options[0]
    prices = [option.price for option in found.options]
    assert None not in prices
    assert prices == sorted(prices)  # type: ignore[type-var]
    for option in found.options:
        assert option.memory.fits
        assert option.speed is not None
        assert option.speed.basis == "published"
        assert option.price == pytest.approx(option.hourly * option.speed.hours)
    smaller = next(option for option in found.options if option.instance_type == "p5.48xlarge")
    ranks = smaller.nodes * smaller.gpus_per_node // 2
    host = RankHost(load_prices().types["p5.48xlarge"].gpu_bytes or 0, "cuda", True)
    assert lowest_that_fits(EIGHT_B, spec().training, ranks, 1, host) is None


def test_what_a_job_of_this_server_did_comes_before_what_others_published() -> None:
    job = spec({"gpusPerNode": 8, "instanceTypes": ["p5.48xlarge"]})
    ours = MeasuredSpeed("base", setup_of(job.training), 40_000.0, 4, "p5.48xlarge", 4)
    elsewhere = replace(ours, instance_type="p4d.24xlarge", tokens_per_second=1.0)
    other = replace(ours, setup="another", tokens_per_second=1.0)
    found = estimate_job(job, known(records=(elsewhere, other, ours)))
    assert found.speed is not None
    assert (found.speed.basis, found.speed.tokens_per_second) == ("measured", 80_000.0)
    assert "base" in found.speed.source
    assert "scaled to 8" in found.speed.source
    assert found.steps == 1024
    assert found.speed.hours == pytest.approx(2**30 / 80_000 / 3600)
    assert found.price == pytest.approx(55.04 * found.speed.hours)
    without = estimate_job(job, known())
    assert without.speed is not None
    assert without.speed.basis == "published"


def test_a_speed_counts_on_the_devices_that_it_was_measured_on() -> None:
    on_cpus, on_gpus = spec({"nodes": 2}), spec({"nodes": 1, "gpusPerNode": 2})
    of_cpus = MeasuredSpeed("slow", setup_of(on_cpus.training), 100.0, 2, "", 0)
    of_gpus = replace(of_cpus, job="fast", tokens_per_second=9_000.0, gpus=2)
    for job, name in ((on_cpus, "slow"), (on_gpus, "fast")):
        speed = estimate_job(job, known(records=(of_cpus, of_gpus))).speed
        assert speed is not None
        assert f"job {name} " in speed.source
    # CPUs of a machine that has GPUs, too, do not compute as fast as those.
    beside = estimate_job(spec({"nodes": 1, "instanceTypes": ["p5.48xlarge"]}), known())
    assert beside.speed is None
    assert any(gap.startswith("time and price") for gap in beside.gaps)


def test_adapters_beside_other_layers_are_another_setup() -> None:
    few, many = (spec(model={"source": "s3://models/x"}, adapter={"targets": t}) for t in (["q_proj"], ["all-linear"]))
    record = MeasuredSpeed("few", setup_of(few.training), 100.0, 1, "", 0)
    size = decoder_size(PRESETS["llama-8b"], LORA)
    assert estimate_job(few, known(size=size, records=(record,))).speed is not None
    assert estimate_job(many, known(size=size, records=(record,))).speed is None


def test_what_fits_nowhere_says_why_and_the_least_that_would_have_to_change() -> None:
    job = spec({"gpusPerNode": 1, "instanceTypes": ["p4d.24xlarge"]}, parallel={"shard": "ddp"})
    found = estimate_job(job, known())
    assert found.fits is False
    assert "a rank needs about" in found.advice
    assert "has 39.40 GiB" in found.advice
    assert "8030.3 M parameters" in found.advice
    assert len(found.changes) == 1
    assert "ranks in place of 1" in found.changes[0]


def test_an_adapter_says_what_it_learns_and_what_it_commits() -> None:
    size = replace(decoder_size(PRESETS["llama-8b"], LORA), frozen_bytes=2)
    job = spec({"gpusPerNode": 1, "instanceTypes": ["p5.48xlarge"]}, precision="bf16")
    found = estimate_job(job, known(size=size, casts_itself=False))
    own = 32 * 16 * (2 * 4096 + 4096 + 1024)
    assert found.trained_parameters == own
    assert found.memory[0].parts["adapters"] == 4 * own
    assert found.memory[0].parts["optimizer"] == 8 * own
    assert found.memory[0].parts["weights"] == 2 * (found.parameters - own)
    assert found.commits.bytes == 12 * own
    assert found.commits.first_bytes == 12 * own + 2 * (found.parameters - own)
    assert found.fits is True  # 16 GB of weights on an H100


def part(optimizer: dict[str, Any], device: Device = "cuda") -> MemoryNeed:
    """The memory of one rank that trains a Llama of 8 B in bf16, alone."""
    return estimate(EIGHT_B, spec(optimizer=optimizer).training, ModelLayout.of("ddp", 1), 1, device)


def test_what_the_optimizer_keeps_is_counted() -> None:
    """Every weight of a matrix is in rows of whole blocks of 256, so each moment has a byte and a 64th of a scale."""
    n = PRESETS["llama-8b"].parameters
    norms = (2 * 32 + 1) * 4096
    eight = 2 * (n - norms) * 65 // 64 + 8 * norms
    plain, small = part({}), part({"name": "adamw8bit", "masterWeights": False})
    assert (plain.weights, plain.optimizer) == (4 * n, 8 * n)
    assert (small.weights, small.optimizer) == (2 * n, eight)
    assert part({"ema": {}}).optimizer == 12 * n
    away = part({"name": "adamw8bit", "offload": True, "ema": {}})
    assert (away.optimizer, away.host) == (0, eight + 4 * n)
    assert f"and {gib(away.host)} of the host's" in str(away)
    at_home = part({"offload": True}, device="cpu")
    assert (at_home.optimizer, at_home.host) == (8 * n, 0)


@pytest.mark.parametrize(
    ("precision", "recompute", "experts", "less"),
    [
        ("bf16", "none", 0, (14_336 + 4096) * 2),
        ("fp32", "none", 0, (14_336 - 4096) * 4),
        ("bf16", "selective", 0, 0),
        ("bf16", "full", 0, 0),
        ("fp8", "none", 0, 0),
        ("bf16", "none", 2, 0),
    ],
)
def test_compiled_layers_keep_less(precision: str, recompute: str, experts: int, less: int) -> None:
    """`less` is in bytes per token and layer."""
    size = replace(EIGHT_B, experts_per_token=experts)

    def activations(compiled: bool) -> int:
        parallel = {"activationCheckpointing": recompute, "compile": compiled}
        batch = {"tokensPerStep": 2**20, "microBatch": 16}  # enough for the end of the forward pass to be the peak
        training = spec({"gpusPerNode": 8}, precision=precision, parallel=parallel, batch=batch).training
        return estimate(size, training, ModelLayout.of("fsdp", 8), 1, "cuda").activations

    assert activations(False) - activations(True) == less * 32 * 16 * 4096


def test_the_automatic_interval_follows_from_what_is_published() -> None:
    """3 failures in 1,000 node-days, and eight requests of 85 MB/s a rank: 96 GB over 8 ranks are under way 17.7 s."""
    found = estimate_job(spec({"gpusPerNode": 8, "instanceTypes": ["p5.48xlarge"]}, precision="bf16"), known()).commits
    assert found.every == "auto"
    assert found.upload_seconds == pytest.approx(found.bytes / 8 / (8 * 85e6))
    assert found.seconds == INTERVAL_SECONDS_MAX  # Young: sqrt(2 x 17.7 s x 333 days) is more than is ever waited
    upload, interval = assumed_interval_seconds(12e9, nodes=2000)
    assert interval == pytest.approx(math.sqrt(2 * upload * 1000 * 86400 / 3 / 2000), rel=0.05)


@given(
    shard=st.sampled_from(["auto", "ddp", "zero2", "fsdp"]),
    precision=st.sampled_from(["fp32", "bf16"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    micro=st.sampled_from([1, 2, 8]),
    ranks=st.sampled_from([1, 2, 8]),
    gigabytes=st.integers(2, 200),
)
def test_a_change_that_is_named_makes_it_fit(
    shard: str, precision: str, recompute: str, micro: int, ranks: int, gigabytes: int
) -> None:
    training: TrainingConfig = spec(
        precision=precision,
        parallel={"shard": shard, "activationCheckpointing": recompute},
        batch={"tokensPerStep": 2**20, "microBatch": micro},
    ).training
    host = RankHost(gigabytes * GIB, "cuda")
    for change in changes_that_fit(EIGHT_B, training, ranks, 1, host):
        assert host.holds(change.need), change.words
    found = lowest_that_fits(EIGHT_B, training, ranks, 1, host)
    if found is not None:
        assert host.holds(found[1])
        assert need_of(EIGHT_B, training, found[0], ranks, 1, host) == found[1]


@given(micro=st.integers(1, 4), scale=st.integers(1, 3))
def test_more_work_never_needs_less(micro: int, scale: int) -> None:
    def need(micro_batch: int, length: int) -> int:
        config = {"train": [{"source": "file:///x"}], "sequenceLength": length}
        batch = {"tokensPerStep": length * micro_batch * 8, "microBatch": micro_batch}
        return need_of(EIGHT_B, spec(data=config, batch=batch).training, "fsdp", 8, 1, RankHost(GIB)).total

    assert need(micro * scale, 1024) >= need(micro, 1024)
    assert need(micro, 1024 * scale) >= need(micro, 1024)


FOLDER = {"source": "s3://bucket/model"}


@pytest.mark.parametrize(
    ("training", "data", "path", "words"),
    [
        ({"model": FOLDER, "optimizer": {"lr": 1e-3}}, None, "optimizer.lr", "high to fine-tune all weights"),
        (
            {"model": FOLDER, "adapter": {"kind": "lora"}, "optimizer": {"lr": 1e-5}},
            None,
            "optimizer.lr",
            "low for an adapter",
        ),
        (
            {"model": FOLDER, "adapter": {"kind": "lora"}, "batch": {"tokensPerStep": 2**22}},
            None,
            "batch.tokensPerStep",
            "many for an adapter",
        ),
        ({"optimizer": {"lr": 0.05}}, None, "optimizer.lr", "may diverge"),
        ({"length": {"steps": 3}}, None, "length", "the run has 3 steps"),
        ({"length": {"tokens": 2**24}}, None, "length", "tokens per parameter"),
        ({"model": FOLDER}, DataShape(tokens=2**20), "length", "the data is seen 1.02e+03 times, of about 1,048,576"),
        (
            {"model": FOLDER, "task": "sft", "data": {"train": [{"source": "x", "format": "openai-chat"}]}},
            DataShape(tokens=2**30, lengths=(300, 900, 2000)),
            "data.sequenceLength",
            "a tenth of the conversations have more than about 900 tokens, and rows have 512",
        ),
        (
            {"data": {"train": [{"source": "x"}], "sequenceLength": 4096, "packing": False}},
            DataShape(tokens=2**30, lengths=(100, 200, 300)),
            "data.sequenceLength",
            "most of a row is padding",
        ),
    ],
)
def test_what_an_experienced_colleague_would_say(
    training: dict[str, Any], data: DataShape | None, path: str, words: str
) -> None:
    found = estimate_job(spec(**training), known(data=data)).warnings
    assert any(warning.path == f"spec.training.{path}" and words in warning.message for warning in found), found


def test_a_usual_job_is_not_warned_of() -> None:
    usual = spec(model=FOLDER, adapter={"kind": "lora"}, optimizer={"lr": 2e-4})
    assert estimate_job(usual, known(data=DataShape(tokens=2**30, lengths=(300, 900, 2000)))).warnings == ()


def test_rows_beyond_the_models_positions_would_end_the_job() -> None:
    found = estimate_job(spec(model=FOLDER), known(position_limit=256))
    assert [(each.path, each.message) for each in found.faults] == [
        ("spec.training.data.sequenceLength", "4096 is longer than the 256 positions of the model")
    ]
    assert estimate_job(spec(model=FOLDER), known(position_limit=4096)).faults == ()


def test_prompts_without_a_template_are_warned_of_where_a_model_has_one() -> None:
    data = DataShape(tokens=2**30, formats=("prompt-completion",))
    sources = {"train": [{"source": "x"}], "sequenceLength": 512}
    tuned = spec(model=FOLDER, task="sft", data=sources, adapter={"kind": "lora"}, optimizer={"lr": 2e-4})
    (warning,) = estimate_job(tuned, known(data=data)).warnings
    assert warning.path == "spec.training.data.train[0].format"
    assert "`muster generate`" in warning.message
    chats = DataShape(tokens=2**30, formats=("openai-chat",))
    assert estimate_job(tuned, known(data=chats)).warnings == ()


def test_an_epoch_of_three_steps_is_warned_of_as_a_run_of_three_steps_is() -> None:
    job = spec(model=FOLDER, length={"epochs": 1}, optimizer={"lr": 1e-5, "schedule": {"warmupSteps": 10}})
    tokens = job.training_config.batch.tokens_per_step
    found = {(each.path, each.message) for each in estimate_job(job, known(data=DataShape(tokens=3 * tokens))).warnings}
    assert ("spec.training.length", "the run has about 3 steps; few batches teach little") in found
    assert any("10 steps of warm-up are all of the about 3 steps" in message for _, message in found)
    little = estimate_job(job, known(data=DataShape(tokens=tokens // 2))).warnings
    assert any("one step sees some of it twice" in each.message for each in little)


# --- ranks that divide the tokens of rows ---


def test_rows_too_long_for_a_rank_fit_once_ranks_divide_their_tokens() -> None:
    """Activations fall with the context, weights and optimizer state stay, and what does not fit names the context."""
    gang = {"nodes": 2, "gpusPerNode": 8, "instanceTypes": ["p5.48xlarge"]}
    long_rows = {
        "data": {"train": [{"source": "file:///x"}], "sequenceLength": 131_072},
        "batch": {"tokensPerStep": 131_072 * 16, "microBatch": 1},
    }

    def at(context: int) -> Estimate:
        parallel = {"shard": "fsdp", "context": context, "activationCheckpointing": "full"}
        return estimate_job(spec(gang, **long_rows, parallel=parallel), known())

    one, two, eight = (at(context).memory[0] for context in (1, 2, 8))
    for part in ("weights", "optimizer"):
        assert one.parts[part] == two.parts[part] == eight.parts[part]
    assert two.parts["activations"] / one.parts["activations"] == pytest.approx(0.5, rel=0.1)
    assert eight.parts["activations"] / one.parts["activations"] == pytest.approx(0.125, rel=0.1)
    assert (one.fits, eight.fits) == (False, True)
    (change,) = (change for change in at(1).changes if "context" in change)
    assert change == "parallel.context 16 (now 1: a rank computes 131,072 tokens of each row)"


def test_what_a_rank_sends_is_said_by_what_ranks_divide() -> None:
    """In each layer the exchanges of queries, keys, values and results, forward and backward."""
    gang = {"nodes": 2, "gpusPerNode": 8, "instanceTypes": ["p5.48xlarge"]}
    batch = {"tokensPerStep": 4096 * 16, "microBatch": 1}
    parallel = {"shard": "fsdp", "context": 8}
    sent = estimate_job(spec(gang, batch=batch, parallel=parallel), known()).sent
    heads, tokens, passes, micro_steps = 2 * 32 + 2 * 8, 4096 // 8, 2, 8
    assert sent["context"] == micro_steps * passes * 32 * 7 / 8 * heads * 128 * tokens * 2
    gathered = 2 * (EIGHT_B.parameters - EIGHT_B.root_group) + EIGHT_B.root_group
    assert sent["data"] == pytest.approx(15 / 16 * (micro_steps * 2 * gathered + 4 * EIGHT_B.parameters), rel=1e-6)
    alone = estimate_job(spec({"nodes": 1, "gpusPerNode": 1}, batch=batch, parallel={"shard": "ddp"}), known()).sent
    assert alone == {"data": 0, "context": 0}
