"""The memory that a rank needs at its peak: pure arithmetic, the same for the trainer's `auto` sharding, its messages,
the API and `muster estimate`. How far it is off: benchmarks/estimate.py.

A step has two moments that can be its peak. Where the forward pass ends, all activations are there, but of the
gradients only those that accumulate. Where the backward pass ends, all gradients are there, and one layer's worth of
activations. In between the one falls as the other rises, layer by layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from muster.plan.layouts import ModelLayout
from muster.plan.model_size import ModelSize
from muster.plan.optimizer_state import UPDATE_VALUES
from muster.recipe.training import TrainingConfig

Device = Literal["cpu", "cuda"]

# Share of the memory that may be planned for; the rest is for the allocator's fragments and for libraries.
USABLE = 0.9
# What a rank takes before it has a tensor. CPU: interpreter and torch. CUDA: the context, cuBLAS' and NCCL's buffers,
# which torch's allocator does not count.
FRAMEWORK_BYTES: dict[Device, int] = {"cpu": 600 * 2**20, "cuda": 1280 * 2**20}
# Logits of one chunk, fp32: large enough to keep the matrix products busy, which on a GPU takes a thousand rows of a
# large vocabulary (with fewer, reading the head's weight anew for each chunk takes longer than the product); small
# beside the activations of a layer.
LOGIT_CHUNK_BYTES: dict[Device, int] = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}


@dataclass(frozen=True)
class MemoryNeed:
    """The bytes that one rank needs at the fullest moment of a step, by part."""

    weights: int  # beside an adapter: those that are frozen; else all
    gradients: int
    optimizer: int  # both moments of AdamW, and the mean of the weights
    adapters: int  # the weights of adapters
    activations: int
    logits: int
    buffers: int  # gathered or cast weights, and gradients on their way between ranks
    framework: int  # what a rank takes before it has a tensor
    second_model: int = 0  # teacher, reward model and reference, which only compute forward
    host: int = 0  # of the host's memory beside the device's: the optimizer's state, where it is offloaded

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Return the parts of the device's memory."""
        return {field.name: int(getattr(self, field.name)) for field in fields(self) if field.name != "host"}

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {gib(size)}" for name, size in self.parts.items() if size)
        beside = f", and {gib(self.host)} of the host's" if self.host else ""
        return f"{parts}: {gib(self.total)} in all{beside}"


def gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


@dataclass(frozen=True)
class _StepMoment:
    gradients: int
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.logits + self.buffers


def estimate(
    size: ModelSize,
    training: TrainingConfig,
    layout: ModelLayout,
    accumulation: int,
    device: Device = "cpu",
    casts_itself: bool = True,
) -> MemoryNeed:
    """Memory that one rank needs.

    `accumulation` is the number of micro-steps of an optimizer step. `casts_itself` says that the model casts its fp32
    weights where it uses them, as our own decoder does; for other models (transformers) FSDP gathers cast ones, also
    where a rank holds all.

    Trained weights and their gradients are fp32, or bf16 without master weights; AdamW's moments are fp32 or in eight
    bits. ddp holds all of it on every rank. zero2 shards it but keeps the gathered weights through the pass; fsdp and
    hsdp gather two layers at a time, besides the root group. Gradients that accumulate unsynchronised are whole.
    """
    parts = layout.shards
    learning, frozen = -(-size.learning // parts), -(-size.frozen_total // parts)
    adapter, each = size.frozen_total > 0 and not training.freeze, weight_bytes(training)
    state, offloaded = -(-state_bytes(size, training) // parts), training.optimizer.offload and device == "cuda"
    fullest = max(_moments(size, training, layout, accumulation, device, casts_itself), key=lambda m: m.total)
    return MemoryNeed(
        weights=frozen if adapter else frozen + each * learning,
        gradients=fullest.gradients,
        optimizer=0 if offloaded else state,
        adapters=each * learning if adapter else 0,
        activations=fullest.activations,
        logits=fullest.logits,
        buffers=fullest.buffers,
        framework=FRAMEWORK_BYTES[device],
        second_model=_second_models(size.second, training, layout),
        host=state if offloaded else 0,
    )


def _second_models(sizes: tuple[ModelSize, ...], training: TrainingConfig, layout: ModelLayout) -> int:
    """Models that compute forward, one after the other, in the activations' dtype: their parts of the weights, those
    that are gathered, of which the root group stays, and what one layer makes of a batch. A teacher's head is used
    alongside the student's, chunk by chunk; a reward model's has one row."""
    resident, passing = 0, [0]
    for size in sizes:
        layer = (size.parameters - size.root_group) // size.layers
        root = 0 if layout.is_whole else size.root_group
        gathered = 0 if layout.is_whole else min(size.parameters - root, size.largest_group + layer)
        resident += -(-size.parameters // layout.shards) + root
        passing.append(gathered + (6 * size.dim + 3 * size.ffn_dim) * _tokens(training))
    return activation_bytes(training) * (resident + max(passing))


def weight_bytes(training: TrainingConfig) -> int:
    """Return the bytes of one trained weight, and of its gradient."""
    return 4 if training.optimizer.master_weights else 2


def state_bytes(size: ModelSize, training: TrainingConfig) -> int:
    """Return the bytes of optimizer state over all ranks: both moments, and the average of the weights."""
    moments = size.eight_bit_moments if training.optimizer.name == "adamw8bit" else 8 * size.learning
    return moments + (4 * size.learning if training.optimizer.ema is not None else 0)


def _moments(
    size: ModelSize,
    training: TrainingConfig,
    layout: ModelLayout,
    accumulation: int,
    device: Device,
    casts_itself: bool,
) -> tuple[_StepMoment, ...]:
    """The head at the end of the forward pass, the last layer's backward pass, the first layer's, and the update."""
    width, masters = activation_bytes(training), training.optimizer.master_weights
    by_fsdp = not layout.is_whole or (not casts_itself and (width == 2 or size.frozen_bytes != width))
    by_fsdp = by_fsdp or training.precision == "fp8"  # whose layers cast no weights
    if not masters and layout.is_whole:
        by_fsdp = False  # nothing is to be cast
    gathered, layer_gathered, gathered_at_the_end = _gathered(size, layout, width, by_fsdp, cast=masters)
    share = -(-size.learning // layout.shards)
    many = size.learning if layout.keeps_gathered and accumulation > 1 else share  # whole until the last micro-step
    # What accumulates before it is reduced, does so in fp32.
    whole = many * (4 if many != share else weight_bytes(training))
    moving = _moving(size, width) if by_fsdp and layout.ranks > 1 else 0
    early = whole if accumulation > 1 else 0
    activations, one = _activations(size, training, width, device, casts_itself)
    shared = _mask(size, training, width, device) + 16 * 4 * _whole_rows(training)  # and the batch itself
    inputs = _layer_inputs(size, training, width) + _embedded_rows(size, training, width)
    head, head_grads = _head(size, training, width, device)
    return (
        _StepMoment(early, activations + shared, head, gathered),
        _StepMoment(early + head_grads, activations + shared + one, 0, gathered + layer_gathered),
        _StepMoment(whole, inputs + shared + one, 0, gathered_at_the_end + moving),
        _StepMoment(whole, shared, 0, _update(size, training, layout.shards, device)),
    )


def _update(size: ModelSize, training: TrainingConfig, parts: int, device: Device) -> int:
    """Return the bytes that updating some rows takes: fp32 copies, rounding noise, and what is moved to the device."""
    optimizer = training.optimizer
    eight_bit, offloaded = optimizer.name == "adamw8bit", optimizer.offload and device == "cuda"
    each = 12 * eight_bit + (0 if optimizer.master_weights else 16)
    if offloaded:
        each += state_bytes(size, training) // max(size.learning, 1)
    return each * min(UPDATE_VALUES, size.learning // parts)


def _tokens(training: TrainingConfig) -> int:
    """Return the tokens of a micro-batch that a rank computes."""
    return training.batch.micro_batch * training.data.sequence_length // training.parallel.context


def _whole_rows(training: TrainingConfig) -> int:
    """Return the tokens of a micro-batch, of which a rank may compute a part."""
    return training.batch.micro_batch * training.data.sequence_length


def activation_bytes(training: TrainingConfig) -> int:
    """Return the bytes of one value of an activation."""
    return 4 if training.precision == "fp32" else 2


def _gathered(size: ModelSize, layout: ModelLayout, width: int, by_fsdp: bool, cast: bool) -> tuple[int, int, int]:
    """Weights in use besides those held: at the end of the forward pass, in a layer's backward pass on top of that, and
    at the end of the backward pass, which lets go of each layer's. `cast`: a model that casts itself, casts them."""
    layer = (size.parameters - size.root_group) // size.layers
    if not by_fsdp:
        return (0, 0, 0) if width == 4 or not cast else (size.active * width, 0, layer * width)
    each: float = width
    if size.nf4:  # gathered in four bits, and decoded matrix by matrix
        each = size.frozen_total / (size.parameters - size.learning)
    decoded = size.dim * size.ffn_dim * width if size.nf4 else 0
    at_hand = int(min(size.largest_group + layer, size.parameters - size.root_group) * each) + decoded
    root, whole = int(size.root_group * each), int(size.parameters * each)
    return (whole, decoded, root + at_hand) if layout.keeps_gathered else (root, at_hand, root + at_hand)


def _moving(size: ModelSize, width: int) -> int:
    """Return the bytes of the whole gradients of the groups that are being reduced, and of the fp32 copies that
    travel."""
    groups = size.largest_learning_group + size.learning // size.layers
    return (4 + width) * min(groups, size.learning)


def _activations(
    size: ModelSize, training: TrainingConfig, width: int, device: Device, casts_itself: bool
) -> tuple[int, int]:
    """Bytes: what the forward pass keeps of all layers for the backward pass, and what one layer's backward pass takes
    besides what it finds: what is made anew, and derivatives. Norms compute in fp32, and keep what a learning weight
    was multiplied with, unless one kernel does it all (CUDA, our own decoder)."""
    tokens = _tokens(training)
    queries, keys = size.heads * size.head_dim, _key_heads(size, training.parallel.context) * size.head_dim
    normed = 4 if casts_itself else width
    kept_twice = size.learning == size.parameters and not (casts_itself and device == "cuda")
    norms = size.normed * (4 + (normed if kept_twice else 0))
    # Packed rows have a mask, with which transformers repeats keys and values for each query, if it is no block mask.
    repeated = not casts_itself and not _by_blocks(width, device)
    attention = (2 * queries + 2 * (queries if repeated else keys)) * width
    wide = (3 * size.ffn_dim + size.matmul_inputs) * width
    experts = 2 * size.experts_per_token * size.dim * width
    layer = norms + attention + wide + experts - _computed_again(size, training, width)
    summed = size.summed * width  # per layer, however many tokens
    kept = {
        "none": layer,
        "selective": (2 * size.dim + 2 * queries + keys + size.ffn_dim) * width,
        "full": size.dim * width,
    }[training.parallel.activation_checkpointing]
    repeats = training.parallel.activation_checkpointing != "none"
    again = layer if repeats else 0
    last = size.dim * (2 * normed + width)  # the last norm, and what the head reads
    kept_bytes = (size.layers * kept + last) * tokens + summed * (1 if repeats else size.layers)
    # In float8 the operands of one product are cast for it, at most those between the residual stream and the widest.
    cast = (tokens * (size.dim + size.ffn_dim) + size.dim * size.ffn_dim) if training.precision == "fp8" else 0
    # The derivative of a sum is as large as the sum.
    return kept_bytes, (again + 2 * (size.ffn_dim + size.dim) * width) * tokens + summed * (2 if repeats else 1) + cast


def _computed_again(size: ModelSize, training: TrainingConfig, width: int) -> int:
    """Bytes per token of what an eager layer keeps and a compiled one does not. torch.compile computes the activation
    function again in the backward pass, and in half precision keeps the inputs of both norms as they came, not in fp32.
    Beside adapters of all matrices it keeps one tensor of the residual stream that the eager layer does not; it is
    counted for every model. tests/unit/models/test_models_compiled.py compares, docs/gpu.md has the peaks of three
    models on a GPU. How experts and float8 are compiled was not looked at, so nothing is taken off for them."""
    parallel = training.parallel
    if not parallel.compile or parallel.activation_checkpointing != "none":
        return 0  # where a layer computes all of it anew, all of it is there at once
    if size.experts_per_token or training.precision == "fp8":
        return 0
    norms = 2 * size.dim if width == 2 else 0
    return (size.ffn_dim - size.dim + norms) * width


def _layer_inputs(size: ModelSize, training: TrainingConfig, width: int) -> int:
    """Return the bytes of a layer that remain in the middle of its backward pass."""
    return 2 * size.dim * width * _tokens(training)


def _embedded_rows(size: ModelSize, training: TrainingConfig, width: int) -> int:
    """Return the bytes of the derivative of whole rows' embeddings, which are cut into ranks' tokens behind them."""
    return size.dim * width * _whole_rows(training) if training.parallel.context > 1 else 0


def _key_heads(size: ModelSize, context: int) -> int:
    """Return the heads' worth of keys that attention keeps for each of a rank's tokens. Ranks that divide tokens
    exchange heads for them, where their number divides the heads, and repeat keys of fewer; or else each has the keys
    of all tokens."""
    return math.lcm(size.kv_heads, context) if size.heads % context == 0 else size.kv_heads * context


def _mask(size: ModelSize, training: TrainingConfig, width: int, device: Device) -> int:
    """Return the bytes of the mask of packed rows; a block mask is negligible."""
    if _by_blocks(width, device):
        return 0
    length, context = training.data.sequence_length, training.parallel.context
    own = length if size.heads % context == 0 else length // context
    return training.batch.micro_batch * own * length * width


def _by_blocks(width: int, device: Device) -> bool:
    """Return whether attention is flex_attention with a block mask."""
    return device == "cuda" and width == 2


def _head(size: ModelSize, training: TrainingConfig, width: int, device: Device) -> tuple[int, int]:
    """Return the bytes at the head: its maximum (a chunk of logits, which becomes its own derivative, alongside the
    weight's gradient), and the weight's gradient, which remains."""
    tokens, table = _tokens(training), size.vocab_size * size.dim
    logits = 4 * tokens * size.vocab_size
    chunk, several = min(LOGIT_CHUNK_BYTES[device], logits), logits > LOGIT_CHUNK_BYTES[device]
    learnt = 4 * table if size.learning == size.parameters else 0
    part = learnt * width // 4 if several or width == 2 else 0
    copies = chunk if width == 4 else chunk * 3 // 2  # in half precision the product, then the derivative
    return 2 * tokens * size.dim * width + copies + learnt + part, learnt * weight_bytes(training) // 4
