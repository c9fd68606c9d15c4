"""What each rank writes of a tensor follows from who holds it, on any mesh: data-parallel, model-parallel or both."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from muster.trainer.checkpoint.coordinator import assemble
from muster.trainer.checkpoint.tensors import localize, share_of
from muster.trainer.errors import UserError
from muster.trainer.parallel.shards import alongside, local

RANKS = 4
# Placements on a mesh of 2 data-parallel shares of 2 ranks each, and who then holds the same chunk as rank 0.
PLACED: dict[str, tuple[tuple[int, ...], list[Any], tuple[int, ...]]] = {
    "columns": ((6, 5), [Replicate(), Shard(0)], (0, 2)),
    "rows": ((6, 5), [Replicate(), Shard(1)], (0, 2)),
    "norm": ((7,), [Replicate(), Replicate()], (0, 1, 2, 3)),
    "sharded-twice": ((6, 5), [Shard(0), Shard(1)], (0,)),
    "fsdp-over-tensor-parallel": ((7, 5), [_StridedShard(0, split_factor=2), Shard(0)], (0,)),
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
            tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            chunk = localize(name, tensor, RANKS)
            block = zip(chunk.chunk.offset, chunk.chunk.extent, strict=True)
            assert torch.equal(chunk.data, whole[tuple(slice(first, first + count) for first, count in block)])
            assert rank or chunk.holders == same_as_first
            held.append(chunk)
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


def test_a_weight_on_a_slice_of_the_mesh_is_the_same_in_every_slice() -> None:
    with rank_of_four(3):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        tensor = distribute_tensor(torch.zeros(6, 5), mesh["data"], [Shard(0)], src_data_rank=None)
        chunk = localize("embedding", tensor, RANKS)
        assert (chunk.chunk.offset, chunk.holders) == ((3, 0), (2, 3))


def test_rows_that_do_not_follow_each_other_are_refused() -> None:
    with rank_of_four(0):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        tensor = distribute_tensor(
            torch.zeros(8, 5), mesh, [_StridedShard(0, split_factor=2), Replicate()], src_data_rank=None
        )
        with pytest.raises(UserError, match=r"odd is placed .* rows that do not follow each other"):
            localize("odd", tensor, RANKS)


@pytest.mark.parametrize(
    "placements", [[Replicate(), Shard(1)], [Shard(0), Shard(1)], [_StridedShard(0, split_factor=2), Shard(0)]]
)
def test_what_is_kept_of_a_weight_is_split_as_it_is(placements: list[Any]) -> None:
    with rank_of_four(3):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        weight = distribute_tensor(torch.zeros(32, 96), mesh, placements, src_data_rank=None)
        moment = alongside(weight, (32, 96), torch.float32, weight.device)
        assert isinstance(moment, DTensor)
        assert local(moment).shape == local(weight).shape
        scales = alongside(weight, (32, 4), torch.float32, weight.device)
        assert 24 * local(scales).numel() == local(weight).numel()
        if Shard(1) in placements:
            with pytest.raises(
                UserError, match=r"a weight of shape \[32, 96\] is split over ranks within what its state"
            ):
                alongside(weight, (32, 3), torch.float32, weight.device)
