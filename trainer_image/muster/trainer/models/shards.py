"""This rank's part of a tensor, whether it is sharded or not."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def local(tensor: Tensor) -> Tensor:
    """A DTensor's shard on this rank; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_rows(parameter: Any) -> tuple[Tensor, int]:
    """The rows of a parameter on this rank, and the global index of the first."""
    if not hasattr(parameter, "to_local"):
        return parameter.data, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), int(offset[0])
