"""Choice of a sharding that fits into a rank's memory, or else the smallest change that would make one fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from muster.plan.layouts import SMALLEST, layout_of, shardings_of
from muster.plan.memory import USABLE, Device, MemoryNeed, estimate, gib
from muster.plan.model_size import ModelSize
from muster.recipe.training import FP8_MULTIPLE, Shard, TrainingConfig

RANKS_MAX = 4096  # a gang that is looked for is no larger


@dataclass(frozen=True)
class RankHost:
    """Hardware that a rank runs on."""

    capacity: int  # the bytes that one rank has; 0: not known
    device: Device = "cpu"
    casts_itself: bool = True  # whether the model casts its own weights, as in memory.estimate

    def holds(self, need: MemoryNeed) -> bool:
        return need.total <= self.capacity * USABLE


@dataclass(frozen=True)
class MemoryChange:
    """A change of the job's settings that makes it need less memory."""

    words: str  # what to set
    need: MemoryNeed  # what a rank would need then


def need_of(
    size: ModelSize, training: TrainingConfig, shard: Shard, ranks: int, nodes: int, host: RankHost
) -> MemoryNeed:
    """Return the memory that a rank of such a gang needs. Raises ValueError where the batch or the copies can't be
    divided over it."""
    accumulation = training.accumulation(training.data_parallel_size(ranks))
    layout = layout_of(training, shard, ranks, nodes)
    return estimate(size, training, layout, accumulation, host.device, host.casts_itself)


def lowest_that_fits(
    size: ModelSize, training: TrainingConfig, ranks: int, nodes: int, host: RankHost
) -> tuple[Shard, MemoryNeed] | None:
    """The simplest sharding whose need fits, or the asked one if it does; None where there is none."""
    for shard in shardings_of(training):
        need = need_of(size, training, shard, ranks, nodes, host)
        if host.holds(need):
            return shard, need
    return None


def changes_that_fit(
    size: ModelSize, training: TrainingConfig, ranks: int, nodes: int, host: RankHost
) -> tuple[MemoryChange, ...]:
    """Changes of how the same thing is computed, each of which alone makes it fit, the cheapest first. Where none does,
    the first that makes it fit on top of all those before it; where that is not enough, with more ranks too."""
    alone = []
    for words, changed in _single(training, ranks, host):
        if (need := _tried(size, changed, ranks, nodes, host)) is not None:
            alone.append(MemoryChange(words, need))
    if alone:
        return tuple(alone)
    return _together(size, training, ranks, nodes, host)


def _together(
    size: ModelSize, training: TrainingConfig, ranks: int, nodes: int, host: RankHost
) -> tuple[MemoryChange, ...]:
    """The changes one on top of the other, until it fits; more ranks last."""
    said: list[str] = []
    for step in (_with_shard, _with_half, _with_one_sample, _with_recompute, _with_context, _with_eight_bits):
        if (change := step(training, ranks)) is None:
            continue
        said.append(change[0])
        training = change[1]
        if (need := _tried(size, training, ranks, nodes, host)) is not None:
            return (MemoryChange(" and ".join(said), need),)
    if (sharded := _with_shard(training, 2)) is not None:
        said, training = [*said, sharded[0]], sharded[1]
    more = _more_ranks(size, training, ranks, host)
    return (
        () if more is None else (MemoryChange(" and ".join([*said, f"{more[0]} ranks in place of {ranks}"]), more[1]),)
    )


def advice(size: ModelSize, training: TrainingConfig, need: MemoryNeed, ranks: int, nodes: int, host: RankHost) -> str:
    """The out-of-memory message: what was asked for, what there is, what to change."""
    start = (
        f"a rank needs about {gib(need.total)} ({need}) and has {gib(host.capacity)}, of which {USABLE:.0%} may be "
        f"planned for. The model has {size.parameters / 1e6:.1f} M parameters. "
    )
    changes = changes_that_fit(size, training, ranks, nodes, host)
    if changes:
        verb = "Less is needed" if host.holds(need) else "It fits"
        return start + f"{verb} with " + "; or with ".join(f"{c.words} ({gib(c.need.total)})" for c in changes[:4])
    return start + (
        "Nothing that leaves the job as it is makes it fit: choose a smaller model, a shorter data.sequenceLength "
        f"(now {training.data.sequence_length}), an adapter, or ranks with more memory"
    )


# --- the changes ---

_Change = tuple[str, TrainingConfig]


def _single(training: TrainingConfig, ranks: int, host: RankHost) -> Iterator[_Change]:
    cheap = (_with_shard, _with_half, _with_selective, _with_recompute, _with_one_sample)
    for change in (*cheap, _with_context, _with_eight_bits, *((_with_offload,) if host.device == "cuda" else ())):
        if (changed := change(training, ranks)) is not None:
            yield changed


def _with_shard(training: TrainingConfig, ranks: int) -> _Change | None:
    asked = training.parallel.shard
    if asked in (SMALLEST, "auto") or ranks == 1:
        return None
    return f"parallel.shard {SMALLEST} (now {asked})", _with(training, "parallel", shard=SMALLEST, replicas=None)


def _with_half(training: TrainingConfig, _: int) -> _Change | None:
    if training.precision != "fp32":
        return None
    return "precision bf16 (now fp32)", training.model_copy(update={"precision": "bf16"})


def _with_selective(training: TrainingConfig, _: int) -> _Change | None:
    return _recomputing(training, "selective") if training.parallel.activation_checkpointing == "none" else None


def _with_recompute(training: TrainingConfig, _: int) -> _Change | None:
    return _recomputing(training, "full") if training.parallel.activation_checkpointing != "full" else None


def _recomputing(training: TrainingConfig, how: str) -> _Change:
    now = training.parallel.activation_checkpointing
    words = f"parallel.activationCheckpointing {how} (now {now})"
    return words, _with(training, "parallel", activation_checkpointing=how)


def _with_one_sample(training: TrainingConfig, _: int) -> _Change | None:
    if training.batch.micro_batch == 1:
        return None
    return f"batch.microBatch 1 (now {training.batch.micro_batch})", _with(training, "batch", micro_batch=1)


def _with_context(training: TrainingConfig, ranks: int) -> _Change | None:
    """Divide the tokens of rows over as many ranks as can: all of them are there already."""
    asked, length = training.parallel.context, training.data.sequence_length
    context = math.gcd(ranks, length)
    rows = training.batch.micro_batch * length // context
    if context <= asked or training.why_not_divided is not None:
        return None
    if training.precision == "fp8" and rows % FP8_MULTIPLE:
        return None
    words = f"parallel.context {context} (now {asked}: a rank computes {length // asked:,} tokens of each row)"
    return words, _with(training, "parallel", context=context)


def _with_eight_bits(training: TrainingConfig, _: int) -> _Change | None:
    if training.optimizer.name == "adamw8bit":
        return None
    words = f"optimizer.name adamw8bit (now {training.optimizer.name})"
    return words, _with(training, "optimizer", name="adamw8bit")


def _with_offload(training: TrainingConfig, _: int) -> _Change | None:
    if training.optimizer.offload:
        return None
    return "optimizer.offload true (now false)", _with(training, "optimizer", offload=True)


def _with(training: TrainingConfig, part: str, **changes: Any) -> TrainingConfig:
    return training.model_copy(update={part: getattr(training, part).model_copy(update=changes)})


def _tried(size: ModelSize, training: TrainingConfig, ranks: int, nodes: int, host: RankHost) -> MemoryNeed | None:
    try:
        lowest = lowest_that_fits(size, training, ranks, nodes, host)
    except ValueError:  # these ranks can't divide the batch
        return None
    return lowest[1] if lowest else None


def _more_ranks(size: ModelSize, training: TrainingConfig, ranks: int, host: RankHost) -> tuple[int, MemoryNeed] | None:
    count = ranks * 2
    while count <= RANKS_MAX:
        if (need := _tried(size, training, count, 2, host)) is not None:
            return count, need
        count *= 2
    return None
