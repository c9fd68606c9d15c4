"""Layouts of a model over ranks: how many of them hold which part of it, and for how long.

One description, which the trainer makes and the estimates price, so that a new dimension is one property here in place
of a name in each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from muster.recipe.training import Shard, TrainingConfig

# What `auto` chooses from, the simplest first, and the one of them that needs the least memory.
AUTOMATIC: Final[tuple[Shard, ...]] = ("ddp", "zero2", "fsdp")
SMALLEST: Final[Shard] = "fsdp"
# A rank has all weights from the forward pass to the end of the step, so that its gradients can accumulate whole, too.
KEEP_GATHERED: Final[tuple[Shard, ...]] = ("ddp", "zero2")


@dataclass(frozen=True)
class ModelLayout:
    """A sharding over some ranks."""

    shard: Shard  # never `auto`
    replicas: int  # copies of the model
    shards: int  # ranks that share one copy

    @classmethod
    def of(cls, shard: Shard, ranks: int, replicas: int = 1) -> ModelLayout:
        """The layout over so many ranks; `replicas` counts the copies of hsdp."""
        copies = {"ddp": ranks, "hsdp": replicas}.get(shard, 1)
        return cls(shard, copies, ranks // copies)

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards

    @property
    def is_whole(self) -> bool:
        """Return whether every rank holds weights, gradients and optimizer state whole."""
        return self.shard == "ddp"

    @property
    def keeps_gathered(self) -> bool:
        """Return whether a rank keeps all weights, once it has gathered them, to the end of the step."""
        return self.shard in KEEP_GATHERED


def layout_of(training: TrainingConfig, shard: Shard, ranks: int, nodes: int) -> ModelLayout:
    """The layout of a job with this sharding. Raises ValueError where hsdp can't hold so many copies."""
    return ModelLayout.of(shard, ranks, training.replicas(ranks, nodes) if shard == "hsdp" and ranks > 1 else 1)


def shardings_of(training: TrainingConfig) -> tuple[Shard, ...]:
    """Return the shardings that a job may take, the simplest first."""
    return AUTOMATIC if training.parallel.shard == "auto" else (training.parallel.shard,)


def shardings_to_show(training: TrainingConfig, ranks: int, nodes: int) -> tuple[Shard, ...]:
    """Return the shardings worth an estimate: the job's, or with `auto` each that could differ over these ranks."""
    if training.parallel.shard != "auto":
        return (training.parallel.shard,)
    if ranks == 1:
        return AUTOMATIC[:1]
    return (*AUTOMATIC, "hsdp") if nodes > 1 and ranks > nodes else AUTOMATIC
