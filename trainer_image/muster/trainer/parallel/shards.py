"""This rank's part of a tensor, whether the tensor is split over ranks or not.

FSDP and tensor parallelism keep a split tensor as a DTensor: a local tensor, a mesh of ranks, and a placement for each
dimension of the mesh. Here that becomes what the rest of the trainer asks for: a block (its offset and extent) and the
ranks that hold the same one. A tensor that is no DTensor is whole on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muster.trainer.errors import UserError


@dataclass(frozen=True)
class ShardBlock:
    """The block of a tensor that lies on this rank. Offset and extent are in elements, per dimension."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    holders: tuple[int, ...]  # the ranks that hold the same block


def is_split(tensor: Any) -> bool:
    """Return whether a tensor lies on a mesh of ranks, each with its part of it."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """A DTensor's shard on this rank; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_part(parameter: Any) -> tuple[Tensor, tuple[int, ...]]:
    """The part of a parameter on this rank, and the global index of its first element in each dimension."""
    if not is_split(parameter):
        return parameter.data, (0,) * parameter.dim()
    offset, _ = _extent(tuple(parameter.shape), parameter)
    return parameter.to_local(), offset


def local_rows(parameter: Any) -> tuple[Tensor, int]:
    """The rows of a parameter on this rank, and the global index of the first. For arithmetic that needs whole rows."""
    values, offset = local_part(parameter)
    assert values.shape[1:] == parameter.shape[1:], f"rows of {list(parameter.shape)} are split over the ranks"
    return values, offset[0]


def block_on_rank(tensor: Any) -> ShardBlock:
    """The block of a DTensor on this rank. Raises ValueError where its values are no block of the tensor, or only a
    term of a sum."""
    offset, extent = _extent(tuple(tensor.shape), tensor)
    if tuple(tensor.to_local().shape) != extent:
        raise ValueError(f"has {list(tensor.to_local().shape)} values on a rank where {list(extent)} are expected")
    mesh = tensor.device_mesh
    split = zip(tensor.placements, mesh.get_coordinate(), strict=True)
    here = tuple(slice(None) if placement.is_replicate() else at for placement, at in split)
    return ShardBlock(offset, extent, _in_all_slices(mesh, mesh.mesh[here].reshape(-1)))


def replicas_of(parameter: Any, world: int) -> int:
    """The number of the gang's ranks that hold the same part of a parameter, and of its gradient."""
    if not is_split(parameter):
        return world
    sizes: Sequence[int] = parameter.device_mesh.shape
    return world // math.prod(sizes[number] for number, _ in _splits(parameter.placements, sizes))


def _in_all_slices(mesh: Any, ranks: Tensor) -> tuple[int, ...]:
    """These ranks of a mesh, and those that stand in their places in the other slices of the mesh it was cut from: a
    weight that is not split along a dimension may lie on a mesh without it, and is then the same in each slice."""
    root = mesh._get_root_mesh().mesh
    inside, holding = torch.isin(root, mesh.mesh), torch.isin(root, ranks)
    for dim in range(root.dim()):
        if inside.any(dim).sum() == inside.sum():  # a slice has one place in this dimension, and the rest are others'
            holding = holding.any(dim, keepdim=True).expand_as(root)
    return tuple(sorted(int(rank) for rank in root[holding]))


def _extent(shape: tuple[int, ...], like: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(offset, extent) of this rank's block of a tensor of this global shape that is placed as the DTensor `like`.
    Raises ValueError where that is no block."""
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the mesh of its own parameter"
    offset, extent = [0] * len(shape), list(shape)
    for number, dim in _splits(like.placements, like.device_mesh.shape):
        each = -(-extent[dim] // like.device_mesh.shape[number])  # as torch.chunk: the last ones may have less
        first = min(coordinate[number] * each, extent[dim])
        offset[dim] += first
        extent[dim] = min(each, extent[dim] - first)
    return tuple(offset), tuple(extent)


def _splits(placements: Sequence[Any], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(dimension of the mesh, dimension of the tensor) of each split, in the order in which they are made.

    The dimensions of a mesh split one after another, but for `_StridedShard`: FSDP, whose dimension comes first, splits
    the parts that tensor parallelism has made. torch writes that as a stride, which is right while it is the number of
    those parts.
    """
    # Where nothing is sharded, half a second of imports is spared.
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    splits: list[tuple[int, int]] = []
    for number, placement in reversed(list(enumerate(placements))):
        if type(placement) is Shard:
            splits.insert(0, (number, placement.dim))
        elif type(placement) is _StridedShard:
            parts = math.prod(sizes[later] for later, dim in splits if dim == placement.dim)
            if placement.split_factor != parts:
                raise ValueError(f"is placed {placements}, so that a rank holds rows that do not follow each other")
            splits.append((number, placement.dim))
        elif type(placement) is not Replicate:
            raise ValueError(f"is placed {placements}; only shards of a dimension and replicas can be named")
    return splits


def rows_alongside(rows: Any, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor [rows, width] without values, of as many rows as `rows` and split alike."""
    return alongside(rows, (int(rows.shape[0]), width), dtype, device)


def alongside(
    parameter: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, page_locked: bool = False
) -> Tensor:
    """A tensor of this global shape without values, split as `parameter` is. It may lie on another device than its
    mesh, such as in (page-locked) host memory.

    The shape may differ from the parameter's in what a value stands for (a scale for each block of a row). Raises
    UserError where a rank's part of the parameter is then no whole number of those.
    """
    if not is_split(parameter):
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=page_locked)
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole = tuple(parameter.shape)
    (first, count), (offset, extent) = _extent(whole, parameter), _extent(shape, parameter)
    for there, own, *pairs in zip(whole, shape, first, offset, count, extent, strict=True):
        if any(of_parameter * own != mine * there for of_parameter, mine in zip(pairs[::2], pairs[1::2], strict=True)):
            raise UserError(
                f"a weight of shape {list(whole)} is split over ranks within what its state of shape {list(shape)} "
                "holds one value for; choose another number of ranks, or an optimizer whose state has a value for each "
                "weight (adamw)"
            )
    here = torch.empty(extent, dtype=dtype, device=device, pin_memory=page_locked)
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), dtype)
    # Not by from_local, which would move it to the device of the mesh.
    return DTensor(here, DTensorSpec(parameter.device_mesh, parameter.placements, meta), requires_grad=False)  # type: ignore[no-untyped-call]
