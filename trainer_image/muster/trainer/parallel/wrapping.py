"""A model laid out over the ranks: by FSDP2 in groups of its modules, or whole on every rank by DDP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from muster.trainer.parallel.integer_shards import integers_expected


def shard_by_groups(
    model: nn.Module,
    groups: Sequence[nn.Module],
    sizes: Mapping[str, int],
    reshard: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Shard each of the groups of modules apart by FSDP2; the rest is the root group, which lives through the whole
    pass.

    `sizes` names the dimensions of the mesh, of which the last shards and those before it replicate; one that
    replicates nothing is left out. `reshard` lets go of a group's gathered weights between its forward and its backward
    pass. Weights are cast to `dtype` where they are used.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    *replicating, last = sizes
    names = (*(name for name in replicating if sizes[name] > 1), last)
    mesh = init_device_mesh(device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)
    half = dtype != torch.float32
    casts = half or any(p.dtype != dtype for p in model.parameters())
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype if casts else None,
            reduce_dtype=torch.float32 if half else None,
            cast_forward_inputs=False,
        ),
    }
    with integers_expected():
        for group in groups:
            fully_shard(group, **options)
        # The backward pass begins where the forward pass ends: what the root holds would be gathered again at once.
        fully_shard(model, **{**options, "reshard_after_forward": False})


def replicate(model: nn.Module, device: torch.device, deterministic: bool) -> nn.Module:
    """Wrap a model that every rank holds whole, so that gradients are averaged over the ranks."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        # Every rank made the same weights from the seed, so nothing need be sent to make them equal.
        init_sync=False,
        # DDP lays its buckets out anew after the first step, and a ring adds up in an order that depends on a value's
        # place in the bucket: a resumed run would differ in the last bit. To look for unused parameters keeps them.
        find_unused_parameters=deterministic,
    )
