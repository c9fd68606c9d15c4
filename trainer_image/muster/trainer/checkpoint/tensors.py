"""Chunks of tensors, with their names, of a model and its optimizer, whatever shards them.

Names are free of wrappers and of world size: `model/<parameter or persistent buffer>`,
`optimizer/<parameter>/<state>`, and `attached/<rank>` for what a program adds. A tensor that two names share (tied
weights) appears once, under the first.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import nn

from muster.trainer.checkpoint.chunks import TensorChunk
from muster.trainer.errors import UserError
from muster.trainer.parallel import shards

DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ATTACHED_BYTES: Final = struct.Struct("<Q")  # how many bytes are attached, before them
_WRAPPERS: Final = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class LocalChunk:
    """This rank's chunk of a tensor."""

    name: str
    shape: tuple[int, ...]  # global
    chunk: TensorChunk
    data: torch.Tensor  # the elements of the chunk, in the live storage
    holders: tuple[int, ...]  # the ranks that hold the same chunk
    mutable: bool = False  # whether it may change at any time (a buffer), not only in the optimizer's step

    @property
    def dtype(self) -> str:
        return DTYPES[self.data.dtype]

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def model_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(`model/<name>`, live tensor) of parameters and persistent buffers, each tensor once."""
    seen: set[int] = set()
    # The state dict, not named_parameters: it leaves out what is not persistent and makes FSDP reshard first.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield f"model/{plain_name(name)}", tensor


def is_frozen(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of a model never changes."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """(`optimizer/<parameter>/<state>`, live tensor). Parameters that were never updated have none."""
    for name, parameter in trained_parameters(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, torch.Tensor):
                raise UserError(
                    f"optimizer state {key!r} of {name} is a {type(value).__name__}; only tensors can be saved"
                )
            yield f"optimizer/{name}/{key}", value


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """(name, parameter) of all that the optimizer updates, in its order."""
    names = {id(tensor): name.removeprefix("model/") for name, tensor in model_tensors(model)}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UserError(
                    "the optimizer updates a parameter that is not in the model; build it from model.parameters()"
                )
            yield names[id(parameter)], parameter


def attached_name(rank: int) -> str:
    """Return the name of the bytes that a program's rank attached."""
    return f"attached/{rank}"


def plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def localize(name: str, tensor: torch.Tensor, world_size: int) -> LocalChunk:
    """The chunk of `tensor` that lies on this rank."""
    if tensor.dtype not in DTYPES:
        raise UserError(f"{name} has dtype {tensor.dtype}, which safetensors can't hold")
    shape = tuple(tensor.shape)
    if shards.is_split(tensor):
        try:
            block = shards.block_on_rank(tensor)
        except ValueError as error:
            raise UserError(f"{name} {error}") from None
        chunk = TensorChunk(block.offset, block.extent)
        return LocalChunk(name, shape, chunk, shards.local(tensor.detach()), block.holders)
    mutable = name.startswith("model/") and not isinstance(tensor, nn.Parameter)
    chunk = TensorChunk((0,) * len(shape), shape)
    return LocalChunk(name, shape, chunk, tensor.detach(), tuple(range(world_size)), mutable)


def share_of(locals_: Sequence[LocalChunk], rank: int) -> list[LocalChunk]:
    """Return the chunks that this rank writes. Chunks that several ranks hold are divided among them, evenly in bytes,
    cut along rows.

    Every holder of a chunk computes the same division from the same list, so nothing is written twice or left out.
    """
    written: list[LocalChunk] = []
    for holders in dict.fromkeys(local.holders for local in locals_):
        group = [local for local in locals_ if local.holders == holders]
        total, mine = sum(local.bytes for local in group), holders.index(rank)
        start, end = (total * mine // len(holders), total * (mine + 1) // len(holders))
        position = 0
        for local in group:
            if (rows := _rows_between(local, start - position, end - position)) is not None:
                written.append(rows)
            position += local.bytes
    return written


def _rows_between(local: LocalChunk, start: int, end: int) -> LocalChunk | None:
    """The rows of a chunk whose first byte lies in [start, end) of its bytes; None where there is none."""
    rows = local.chunk.extent[0] if local.chunk.extent else 1
    if not local.bytes:
        return None
    row_bytes = local.bytes // rows
    first, last = (min(max(-(-edge // row_bytes), 0), rows) for edge in (start, end))
    if first >= last:
        return None
    if last - first == rows:
        return local
    offset, extent = local.chunk.offset, local.chunk.extent
    chunk = TensorChunk((offset[0] + first, *offset[1:]), (last - first, *extent[1:]))
    return replace(local, chunk=chunk, data=local.data[first:last])
