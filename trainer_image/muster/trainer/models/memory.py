"""The memory that a model needs on a rank: pure arithmetic on its shape, for `auto` sharding and clear messages."""

from __future__ import annotations

from dataclasses import dataclass

from muster.contract.architecture import Architecture
from muster.contract.training import Shard, TrainingConfig

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


def estimate(
    architecture: Architecture, training: TrainingConfig, shard: Shard, shards: int, accumulation: int
) -> Need:
    """What one rank needs at its peak. shards: ranks that share one copy of the model.

    Master weights, gradients and both AdamW moments are fp32; in half precision a cast copy of what is in use comes on
    top. Weights that are frozen beside an adapter have neither gradients nor moments. ddp holds all of it on every
    rank. zero2 shards it but keeps the gathered weights from forward to backward; fsdp and hsdp gather two layers at a
    time. Gradients that accumulate unsynchronised are whole.
    """
    adapter = training.adapter
    learning = trained(architecture, training)
    weights = architecture.parameters + (learning if adapter else 0)
    width = 4 if training.precision == "fp32" else 2
    held, held_learning = (n if shard == "ddp" else -(-n // shards) for n in (weights, learning))
    largest = _largest_group(architecture)
    largest_learning = learning // architecture.layers if adapter else largest
    if shard == "ddp":
        gathered = 0 if width == 4 else 2 * largest * width
        # DDP's buckets, and one on its way there
        gradients = 4 * (learning if shards == 1 else learning + largest_learning)
    else:
        gathered = weights * width if shard == "zero2" else min(weights, 2 * largest) * width
        whole = learning if accumulation > 1 and shard == "zero2" else min(learning, 2 * largest_learning)
        gradients = 4 * (held_learning + whole)
    return Need(
        parameters=4 * held + gathered,
        gradients=gradients,
        optimizer=8 * held_learning,
        activations=activation_bytes(architecture, training, width),
        other=PROCESS_BYTES + LOSS_BYTES,
    )


def trained(architecture: Architecture, training: TrainingConfig) -> int:
    """Weights that learn: all, or an adapter's."""
    return training.adapter.parameters(architecture) if training.adapter else architecture.parameters


def activation_bytes(architecture: Architecture, training: TrainingConfig, width: int) -> int:
    """What the backward pass needs of the forward pass, per rank; and the attention mask of packed rows."""
    a = architecture
    tokens = training.batch.micro_batch * training.data.sequence_length
    residual = a.dim
    queries_and_keys = a.dim + 2 * a.kv_heads * a.head_dim
    # norm inputs and outputs, projections before and after rotation, attention output, the feed-forward's parts
    layer = 4 * residual + 2 * queries_and_keys + 2 * residual + 4 * a.ffn_dim
    kept = {"none": layer, "selective": residual + (layer - residual) // 2, "full": residual}
    # and one layer's worth that is made anew and its gradients, while the backward pass is in that layer
    per_token = a.layers * kept[training.parallel.activation_checkpointing] + 2 * layer + 4 * residual
    mask = training.batch.micro_batch * training.data.sequence_length**2 * (width + 2)
    return tokens * per_token * width + mask


def lowest_that_fits(
    architecture: Architecture, training: TrainingConfig, world: int, accumulation: int, capacity: int
) -> tuple[Shard, Need] | None:
    """The simplest sharding whose need fits in `capacity` bytes per rank; None when even fsdp does not."""
    choices: tuple[Shard, ...] = ("ddp", "zero2", "fsdp")
    for shard in choices:
        need = estimate(architecture, training, shard, world, accumulation)
        if need.total <= capacity * USABLE:
            return shard, need
    return None


def advice(architecture: Architecture, training: TrainingConfig, need: Need, capacity: int, world: int) -> str:
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
        f"The model has {architecture.parameters / 1e6:.1f} M parameters. To fit: {'; '.join(changes)}"
    )


def _largest_group(architecture: Architecture) -> int:
    """Weights that fsdp gathers at once: a layer, or the embedding where that is larger."""
    a = architecture
    layer = a.dim * a.head_dim * (2 * a.heads + 2 * a.kv_heads) + 3 * a.dim * a.ffn_dim + 2 * a.dim
    return max(layer, a.vocab_size * a.dim)
