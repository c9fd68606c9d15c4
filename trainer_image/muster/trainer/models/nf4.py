"""Linear layers whose frozen weights are held in four bits: QLoRA (Dettmers et al. 2023, arXiv 2305.14314).

NF4 in blocks of 64 along the rows, by the kernels of `bitsandbytes`, which compute on a CPU too. Unlike its Linear4bit
the layer keeps its bytes by rows: `weight_nf4` [outputs, inputs / 2] and `weight_absmax` [outputs, inputs / 64 x 4],
the latter the bytes of fp32, which no mixed precision casts. So a shard of rows decodes alone, and commits reshard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from muster.trainer.errors import UserError
from muster.trainer.models.nf4_format import ABSMAX_BYTES, BLOCK
from muster.trainer.parallel.shards import local, rows_alongside


class NF4Linear(nn.Module):
    """y = x Wᵀ + b, W [out_features, in_features] decoded for each pass, forward and backward."""

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        blocks = in_features // BLOCK * ABSMAX_BYTES
        self.weight_nf4 = nn.Parameter(torch.empty(out_features, in_features // 2, dtype=torch.uint8), False)
        self.weight_absmax = nn.Parameter(torch.empty(out_features, blocks, dtype=torch.uint8), False)
        self.bias: nn.Parameter | None
        self.register_parameter("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _NF4Multiply.apply(x, self.weight_nf4, self.weight_absmax)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _NF4Multiply(torch.autograd.Function):
    """Only the bytes are kept for the backward pass, not the weight that they stand for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, absmax: Tensor) -> Tensor:
        ctx.save_for_backward(packed, absmax)
        return F.linear(x, decode(packed, absmax, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return input_gradient(grad, *ctx.saved_tensors), None, None


@library.custom_op(
    "muster::nf4_input_gradient", mutates_args=(), schema="(Tensor grad, Tensor packed, Tensor absmax) -> Tensor"
)
def input_gradient(grad: Tensor, packed: Tensor, absmax: Tensor) -> Tensor:
    """Multiply grad [..., rows] by the decoded weight [rows, inputs]; contiguous [..., inputs] in grad's dtype.

    An operator of its own, because torch.compile sees the forward and the backward pass in one graph: it would find
    the weight decoded twice, decode it once, and keep it decoded from the one pass to the other.
    """
    return (grad @ decode(packed, absmax, grad.dtype)).contiguous()


@input_gradient.register_fake
def _(grad: Tensor, packed: Tensor, absmax: Tensor) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], 2 * packed.shape[1])


def decode(packed: Tensor, absmax: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, inputs] from the bytes of as many rows."""
    shape = (packed.shape[0], 2 * packed.shape[1])
    if not packed.numel():
        return torch.empty(shape, dtype=dtype, device=packed.device)
    flat = packed.reshape(-1, 1)
    scales = absmax.contiguous().view(torch.float32).reshape(-1)
    weight: Tensor = torch.ops.bitsandbytes.dequantize_4bit(flat, scales, BLOCK, "nf4", shape, dtype)
    return weight


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of rows [rows, inputs]: packed, and the largest absolute value of each block."""
    count, inputs = rows.shape
    if not rows.numel():
        empty = torch.empty(count, 0, dtype=torch.uint8, device=rows.device)
        return empty.new_empty(count, inputs // 2), empty.new_empty(count, inputs // BLOCK * ABSMAX_BYTES)
    packed, absmax = torch.ops.bitsandbytes.quantize_4bit(rows.contiguous(), BLOCK, "nf4", torch.uint8)
    return packed.view(count, -1), absmax.float().view(torch.uint8).view(count, -1)


def quantize(model: nn.Module, left_out: set[nn.Module]) -> None:
    """Put an NF4Linear in the place of each linear layer but those that are left out (the head, as in `peft`, and what
    is trained whole), or lie in them. Before the model has values and is sharded. Raises UserError for layers whose
    rows are no whole blocks."""
    need_kernels()
    left_out = {part for module in left_out for part in module.modules()}
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m not in left_out}
    if odd := [f"{name} ({layer.in_features})" for name, layer in linear.items() if layer.in_features % BLOCK]:
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        raise UserError(
            f"adapter.kind qlora: NF4 is held in blocks of {BLOCK} inputs, which do not divide those of "
            f"{', '.join(odd[:5])}{more}; use lora, which leaves the weights as they are"
        )
    for name, layer in linear.items():
        parent, _, own = name.rpartition(".")
        with torch.device(layer.weight.device):
            setattr(model.get_submodule(parent), own, NF4Linear(layer.in_features, layer.out_features, layer.bias))


@contextmanager
def receiving(layers: Iterable[NF4Linear], dtype: torch.dtype, where: str) -> Iterator[None]:
    """Meanwhile the layers have a `weight` [outputs, inputs] without values, sharded as their bytes are; what it is
    given becomes the bytes. Raises UserError for weights that are no numbers."""
    layers = list(layers)
    for layer in layers:
        place = rows_alongside(layer.weight_nf4, layer.in_features, dtype, torch.device("meta"))
        layer.weight = nn.Parameter(place, requires_grad=False)
    yield
    for layer in layers:
        rows = local(layer._parameters.pop("weight"))  # type: ignore[arg-type]
        if rows.is_meta or not bool(rows.isfinite().all()):
            raise UserError(f"model.source {where}: lacks a weight, or has values that are no numbers; copy it again")
        with torch.no_grad():
            for buffer, made in zip((layer.weight_nf4, layer.weight_absmax), encode(rows), strict=True):
                local(buffer).copy_(made)


def need_kernels(what: str = "adapter.kind qlora") -> None:
    """Raise UserError where the kernels can't be loaded. `what` needs them."""
    try:
        import bitsandbytes  # noqa: F401  (it registers them)
    except Exception as error:  # the library raises many kinds
        raise UserError(
            f"{what} needs bitsandbytes, which can't be loaded here: {error}; "
            "use the trainer's image, or install muster-train[trainer]"
        ) from None
