"""Groups of ranks, and how many of them hold the same part of a gradient."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from muster.trainer.config import RankPosition
from muster.trainer.parallel.groups import Groups, groups
from muster.trainer.parallel.shards import replicas_of
from muster.trainer.train.optimizer import squared_norm


@contextmanager
def rank_of_eight(rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_rank_alone_is_all_of_its_groups() -> None:
    alone = groups()
    assert [(group.ranks, group.index) for group in (alone.all, alone.data, alone.model)] == [((0,), 0)] * 3
    assert alone.speaks
    assert alone.all.total(torch.tensor([2.0, 3.0])) == [2.0, 3.0]
    assert alone.all.gather("mine") == ["mine"]
    assert alone.all.any(True)
    assert alone.model.broadcast_object({"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("ranks_per_share", "model", "data"),
    [(1, (5,), tuple(range(8))), (2, (4, 5), (1, 3, 5, 7)), (4, (4, 5, 6, 7), (1, 5)), (8, tuple(range(8)), (5,))],
)
def test_neighbours_compute_a_share_together(
    ranks_per_share: int, model: tuple[int, ...], data: tuple[int, ...]
) -> None:
    with rank_of_eight(5):
        made = Groups(5, 8, ranks_per_share)
        assert (made.model.ranks, made.data.ranks, made.all.ranks) == (model, data, tuple(range(8)))
        assert (made.model.ranks[made.model.index], made.data.ranks[made.data.index]) == (5, 5)
        assert (made.model.size * made.data.size, made.speaks) == (8, False)


def test_one_rank_speaks() -> None:
    assert [RankPosition(rank, rank, 4, 4).speaks for rank in range(4)] == [True, False, False, False]
    assert [RankPosition(rank, rank % 2, 4, 2).speaks_for_its_node for rank in range(4)] == [True, False, True, False]


@pytest.mark.parametrize(
    ("placements", "replicas"),
    [
        ((Replicate(), Replicate(), Replicate()), 8),
        ((Replicate(), Shard(0), Replicate()), 4),
        ((Replicate(), Shard(0), Shard(1)), 2),
        ((Replicate(), _StridedShard(0, split_factor=2), Shard(0)), 2),
        ((Shard(0), Shard(0), Shard(1)), 1),
    ],
)
def test_each_gradient_has_its_own_number_of_replicas(placements: tuple[Placement, ...], replicas: int) -> None:
    with rank_of_eight(0):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
        weight = distribute_tensor(torch.zeros(16, 16), mesh, placements, src_data_rank=None)
        assert replicas_of(weight, 8) == replicas
        assert replicas_of(torch.zeros(3), 8) == 8
        part = distribute_tensor(torch.zeros(16, 16), mesh["shard"], (Shard(0),), src_data_rank=None)
        assert replicas_of(part, 8) == 4


def test_the_norm_counts_each_value_once_however_many_ranks_hold_it() -> None:
    """Four ranks: a weight that all hold, one in halves that two hold each, and one in quarters."""
    whole, halved, quartered = (torch.randn(8, 6, generator=torch.Generator().manual_seed(n)) for n in range(3))
    parts = [[whole, halved.chunk(2)[rank % 2], quartered.chunk(4)[rank]] for rank in range(4)]
    total = sum(squared_norm(gradients, (4, 2, 1)).item() for gradients in parts)
    assert total == pytest.approx(sum(g.double().square().sum().item() for g in (whole, halved, quartered)), rel=1e-6)
    alike = [squared_norm([whole, halved], (4, 4)).item() for _ in range(4)]
    assert sum(alike) == squared_norm([whole, halved]).item()
