"""The memory that a model needs on a rank: pure arithmetic on its shape, for `auto` sharding and clear messages."""

from __future__ import annotations

from dataclasses import dataclass

from muster.contract.training import Shard, TrainingConfig
from muster.trainer.models.definition import ModelSize

# Share of the memory that may be planned for; the rest is for the allocator's fragments and for libraries.
USABLE = 0.9
PROCESS_BYTES = 600 * 2**20  # an idle rank: interpreter, torch, communication buffers
LOSS_BYTES = 2 * 64 * 2**20  # one chunk of logits and its derivative (models/head.py)


@dataclass(frozen=True)
class Need:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    other: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.other

    def __str__(self) -> str:
        parts = ("parameters", "gradients", "optimizer", "activations", "other")
        return ", ".join(f"{part} {gib(getattr(self, part))}" for part in parts) + f": {gib(self.total)} in all"


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def estimate(size: ModelSize, training: TrainingConfig, shard: Shard, shards: int, accumulation: int) -> Need:
    """What one rank needs at its peak. shards: ranks that share one copy of the model.

    Master weights, gradients and both AdamW moments are fp32; in half precision a cast copy of what is in use comes on
    top. Weights that are frozen beside an adapter keep their dtype, and have neither gradients nor moments. ddp holds
    all of it on every rank. zero2 shards it but keeps the gathered weights from forward to backward; fsdp and hsdp
    gather two layers at a time. Gradients that accumulate unsynchronised are whole.
    """
    learning, weights = size.learning, size.parameters
    width = 4 if training.precision == "fp32" else 2
    held, held_learning = (n if shard == "ddp" else -(-n // shards) for n in (weights, learning))
    largest, largest_learning = size.largest_group, size.largest_learning_group
    if shard == "ddp":
        gathered = 0 if width == 4 else 2 * largest * width
        # DDP's buckets, and one on its way there
        gradients = 4 * (learning if shards == 1 else learning + largest_learning)
    else:
        gathered = weights * width if shard == "zero2" else min(weights, 2 * largest) * width
        whole = learning if accumulation > 1 and shard == "zero2" else min(learning, 2 * largest_learning)
        gradients = 4 * (held_learning + whole)
    return Need(
        parameters=4 * held_learning + round(size.frozen_bytes * (held - held_learning)) + gathered,
        gradients=gradients,
        optimizer=8 * held_learning,
        activations=activation_bytes(size, training, width),
        other=PROCESS_BYTES + LOSS_BYTES,
    )


def activation_bytes(size: ModelSize, training: TrainingConfig, width: int) -> int:
    """What the backward pass needs of the forward pass, per rank; and the attention mask of packed rows."""
    tokens = training.batch.micro_batch * training.data.sequence_length
    residual = size.dim
    queries_and_keys = (size.heads + 2 * size.kv_heads) * size.head_dim
    # norm inputs and outputs, projections before and after rotation, attention output, the feed-forward's parts
    layer = 4 * residual + 2 * queries_and_keys + 2 * residual + 4 * size.ffn_dim
    kept = {"none": layer, "selective": residual + (layer - residual) // 2, "full": residual}
    # and one layer's worth that is made anew and its gradients, while the backward pass is in that layer
    per_token = size.layers * kept[training.parallel.activation_checkpointing] + 2 * layer + 4 * residual
    mask = training.batch.micro_batch * training.data.sequence_length**2 * (width + 2)
    return tokens * per_token * width + mask


def lowest_that_fits(
    size: ModelSize, training: TrainingConfig, world: int, accumulation: int, capacity: int
) -> tuple[Shard, Need] | None:
    """The simplest sharding whose need fits in `capacity` bytes per rank; None when even fsdp does not."""
    choices: tuple[Shard, ...] = ("ddp", "zero2", "fsdp")
    for shard in choices:
        need = estimate(size, training, shard, world, accumulation)
        if need.total <= capacity * USABLE:
            return shard, need
    return None


def advice(size: ModelSize, training: TrainingConfig, need: Need, capacity: int, world: int) -> str:
    """The out-of-memory message: what was asked for, what there is, what to change."""
    changes = []
    if training.batch.micro_batch > 1:
        changes.append(f"lower batch.microBatch (now {training.batch.micro_batch})")
    if training.parallel.activation_checkpointing != "full":
        changes.append(
            f"set parallel.activationCheckpointing to full (now {training.parallel.activation_checkpointing})"
        )
    if training.parallel.shard in ("ddp", "zero2") and world > 1:
        changes.append(f"set parallel.shard to fsdp (now {training.parallel.shard})")
    if training.precision == "fp32":
        changes.append("set precision to bf16")
    changes.append(f"add ranks (now {world}) or shorten data.sequenceLength (now {training.data.sequence_length})")
    return (
        f"a rank needs about {gib(need.total)} ({need}) and has {gib(capacity)}. "
        f"The model has {size.parameters / 1e6:.1f} M parameters. To fit: {'; '.join(changes)}"
    )
