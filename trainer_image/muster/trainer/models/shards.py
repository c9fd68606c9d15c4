"""This rank's part of a tensor, whether it is sharded or not."""

from __future__ import annotations

from typing import Any

import torch
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


def rows_beside(rows: Any, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor [rows, width] without values, of as many rows as `rows` and sharded alike."""
    shape = (int(rows.shape[0]), width)
    if not hasattr(rows, "to_local"):
        return torch.empty(shape, dtype=dtype, device=device)
    from torch.distributed.tensor import DTensor

    here = torch.empty((local(rows).shape[0], width), dtype=dtype, device=device)
    return DTensor.from_local(
        here, rows.device_mesh, rows.placements, run_check=False, shape=torch.Size(shape), stride=(width, 1)
    )
