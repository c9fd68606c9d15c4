"""Estimate of training speed, from measurements or else from published figures. Pure.

A published figure is carried over by its share of the device's peak (MFU), from the nearest model of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from muster.plan import flops
from muster.plan.model_size import ModelSize
from muster.recipe.commits_read import second_models
from muster.recipe.training import TrainingConfig


@dataclass(frozen=True)
class MeasuredSpeed:
    """The speed at which a job on this server trained."""

    job: str
    setup: str  # what `setup_of` returns for the job
    tokens_per_second: float  # of all ranks together, padding included
    ranks: int
    instance_type: str  # of its nodes; empty where they have none, as this machine does
    gpus: int  # of each worker; 0: it ran on CPUs


@dataclass(frozen=True)
class PublishedSpeed:
    """A speed that another project has published, as a share of the GPU's peak."""

    gpu: str  # by the names of plan/flops.py
    parameters: float  # of the model
    adapter: bool  # whether an adapter was trained instead of all weights
    mfu: float  # model FLOPs over the dense bf16 peak, as this project counts them (plan/flops.py)
    words: str  # the source, and the figure that it gives


# As the projects publish them on their own benchmark pages. The shares of the peak follow from the tokens per second.
PUBLISHED = (
    PublishedSpeed("H100", 8e9, False, 0.33, "TorchTitan, Llama-3.1-8B on 8 H100, FSDP2, bf16: 5,762 tokens/s each"),
    PublishedSpeed("H100", 7e9, False, 0.464, "LLM Foundry, MPT-7B on 8 H100, bf16: 10,643 tokens/s each"),
    PublishedSpeed("H100", 3e9, False, 0.423, "LLM Foundry, MPT-3B on 8 H100, bf16: 20,964 tokens/s each"),
    PublishedSpeed("H100", 1e9, False, 0.418, "LLM Foundry, MPT-1B on 8 H100, bf16: 45,455 tokens/s each"),
    PublishedSpeed("H100", 8e9, True, 0.41, "NeMo AutoModel, Llama-3-8B LoRA on an H100, bf16, 4k: 12,473 tokens/s"),
    PublishedSpeed("H100", 7e9, True, 0.43, "NeMo AutoModel, Qwen2.5-7B LoRA on an H100, bf16, 4k: 14,110 tokens/s"),
)


@dataclass(frozen=True)
class Throughput:
    """The speed that is expected of a gang."""

    tokens_per_second: float  # of the whole gang
    basis: str  # `measured` or `published`
    source: str  # whose figure it is, and how it was carried over


def setup_of(training: TrainingConfig) -> str:
    """Return the key of jobs whose speeds are comparable: model, adapter, precision, row length, recomputation."""
    model = training.model
    origin = model.preset or model.source or (model.from_.uri or model.from_.job if model.from_ else model.architecture)
    beside = training.adapter
    targets = sorted(beside.targets + beside.target_parameters) if beside else ()
    adapter = f"{beside.kind}:{beside.rank}:{','.join(targets)}" if beside else "whole"
    how = training.parallel
    parts = (origin, adapter, training.precision, training.data.sequence_length, how.activation_checkpointing)
    beside_it = (second.words for second in second_models(training).values())
    context = (f"context:{how.context}",) if how.context > 1 else ()  # left out of the keys of older records
    return "|".join(map(str, (*parts, how.compile, *beside_it, *context)))


def from_records(
    training: TrainingConfig, ranks: int, instance_type: str, on_gpus: bool, records: Iterable[MeasuredSpeed]
) -> Throughput | None:
    """The nearest record in ranks, of the same setup on the same hardware, carried over by the number of ranks."""
    setup = setup_of(training)
    fitting = [r for r in records if (r.setup, r.instance_type, r.gpus > 0) == (setup, instance_type, on_gpus)]
    if not fitting:
        return None
    best = min(fitting, key=lambda record: abs(math.log(record.ranks / ranks)))
    scaled = best.tokens_per_second * ranks / best.ranks
    words = f"job {best.job} did {best.tokens_per_second:,.0f} tokens/s on {best.ranks} ranks"
    return Throughput(scaled, "measured", words if best.ranks == ranks else f"{words}, scaled to {ranks}")


def from_literature(size: ModelSize, training: TrainingConfig, ranks: int, gpu: str) -> Throughput | None:
    """Estimate the throughput from published figures, or return None if the device's peak is not known, or not in the
    job's precision."""
    peak = flops.peak(gpu, training.precision)
    if peak is None or training.precision in ("fp32", "fp8"):  # what is published was done in bf16
        return None
    beside = size.frozen_total > 0
    comparable = [p for p in PUBLISHED if p.adapter == beside]
    nearest = min(comparable, key=lambda p: (p.gpu != gpu, abs(math.log(p.parameters / size.parameters))))
    recompute = training.parallel.activation_checkpointing
    length = training.data.sequence_length
    slower = flops.hardware_share(size, length, recompute) if recompute == "full" else 1.0
    each = nearest.mfu / slower * peak / flops.per_token(size, length)
    words = f"{nearest.mfu:.0%} of the peak of a {gpu}, as in {nearest.words}"
    return Throughput(each * ranks, "published", words)
