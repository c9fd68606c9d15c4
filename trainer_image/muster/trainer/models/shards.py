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
    return beside(rows, (int(rows.shape[0]), width), dtype, device)


def beside(
    parameter: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, page_locked: bool = False
) -> Tensor:
    """A tensor of this global shape without values, of as many rows as `parameter` and sharded alike. It may lie on
    another device than its mesh, such as in (page-locked) host memory."""
    here = torch.empty((len(local(parameter)), *shape[1:]), dtype=dtype, device=device, pin_memory=page_locked)
    if not hasattr(parameter, "to_local"):
        return here
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    # Not by from_local, which would move it to the device of the mesh.
    return DTensor(here, DTensorSpec(parameter.device_mesh, parameter.placements, meta), requires_grad=False)  # type: ignore[no-untyped-call]
