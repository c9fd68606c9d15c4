"""What each rank writes of a tensor follows from who holds it, on any mesh: data-parallel, model-parallel or both."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from muster.trainer.checkpoint.coordinator import assemble
from muster.trainer.checkpoint.tensors import localize, share_of

RANKS = 4
# Placements on a mesh of 2 data-parallel shares of 2 ranks each, and who then holds the same chunk as rank 0.
PLACED: dict[str, tuple[tuple[int, ...], list[Any], tuple[int, ...]]] = {
    "columns": ((6, 5), [Replicate(), Shard(0)], (0, 2)),
    "rows": ((6, 5), [Replicate(), Shard(1)], (0, 2)),
    "norm": ((7,), [Replicate(), Replicate()], (0, 1, 2, 3)),
    "sharded-twice": ((6, 5), [Shard(0), Shard(1)], (0,)),
}


@contextmanager
def rank_of_four(rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def slices_of(rank: int) -> dict[str, list[Any]]:
    """What the rank writes, as it reports it to rank 0."""
    with rank_of_four(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        held = []
        for name, (shape, placements, same_as_first) in PLACED.items():
            whole = torch.arange(prod(shape), dtype=torch.float32).view(shape)
            tensor = DTensor.from_local(whole, mesh, [Replicate(), Replicate()], run_check=False)
            local = localize(name, tensor.redistribute(mesh, placements), RANKS)
            assert rank or local.holders == same_as_first
            held.append(local)
        plain = localize("step", torch.zeros(()), RANKS)
        assert plain.holders == tuple(range(RANKS))
        return {
            written.name: [written.dtype, written.shape, written.chunk.offset, written.chunk.extent, 0]
            for written in share_of([*held, plain], rank)
        }


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, list[Any]]]:
    return [slices_of(rank) for rank in range(RANKS)]


@pytest.mark.parametrize("name", [*PLACED, "step"])
def test_every_element_is_written_once(by_rank: list[dict[str, list[Any]]], name: str) -> None:
    entry = assemble(by_rank)[name]  # raises where it is not covered
    seen = torch.zeros(tuple(entry.shape), dtype=torch.int64)
    for piece in entry.slices:
        seen[tuple(slice(first, first + count) for first, count in zip(piece.offset, piece.extent, strict=True))] += 1
    assert (seen == 1).all()
