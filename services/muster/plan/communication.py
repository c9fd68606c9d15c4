"""Bytes that a rank sends to others in a step, by what the ranks divide: pure arithmetic. How far it is off:
benchmarks/parallel.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

from muster.plan.layouts import ModelLayout
from muster.plan.memory import activation_bytes, weight_bytes
from muster.plan.model_size import ModelSize
from muster.recipe.training import TrainingConfig

# Passes of a layer's exchanges in a micro-step: forward and backward, and forward again where all is recomputed. A
# selective recomputation repeats what is no matrix product, so the exchanges too.
_EXCHANGES = {"none": 2, "selective": 3, "full": 3}


@dataclass(frozen=True)
class SentBytes:
    """The bytes that one rank sends in one optimizer step."""

    data: int  # weights and gradients, between ranks that have other rows or hold other parts of the model
    context: int  # in attention, between ranks that have other tokens of the same rows


def sent_bytes(size: ModelSize, training: TrainingConfig, layout: ModelLayout, accumulation: int) -> SentBytes:
    """Return what a rank sends. `accumulation` is the number of micro-steps of a step, in each of which it is taken to
    reduce gradients once they are sharded, and once a step else."""
    return SentBytes(_data(size, training, layout, accumulation), _context(size, training, accumulation))


def _data(size: ModelSize, training: TrainingConfig, layout: ModelLayout, accumulation: int) -> int:
    """A ring sends (n - 1) / n of what it gathers or reduces, and twice as much of what all then have."""
    width, gradient = activation_bytes(training), max(4, weight_bytes(training))
    if layout.is_whole:
        return int(2 * _of_others(layout.ranks) * gradient * size.learning)
    # A layer is gathered for each pass, the root group once for both; all of it once where it is kept.
    times = 1 if layout.keeps_gathered else 2
    gathered = times * (size.parameters - size.root_group) + size.root_group
    within = _of_others(layout.shards) * (accumulation * width * gathered + gradient * size.learning)
    between = 2 * _of_others(layout.replicas) * gradient * size.learning / layout.shards
    return int(within + between)


def _context(size: ModelSize, training: TrainingConfig, accumulation: int) -> int:
    context, repeated = training.parallel.context, _EXCHANGES[training.parallel.activation_checkpointing]
    tokens = training.batch.micro_batch * training.data.sequence_length // context
    if size.heads % context == 0:  # queries and what they find, keys and values
        heads = 2 * size.heads + 2 * math.lcm(size.kv_heads, context)
        each = _of_others(context) * heads * size.head_dim * tokens
    else:
        each = (context - 1) * 2 * size.kv_heads * size.head_dim * tokens
    return int(accumulation * repeated * size.layers * each * activation_bytes(training))


def _of_others(ranks: int) -> float:
    return (ranks - 1) / ranks
