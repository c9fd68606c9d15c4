"""The ranks of a gang as groups: whom a rank computes with, and the collectives among them.

A step's samples are divided into data-parallel shares (`config.DataParallel`). The ranks that compute one share
together are a model-parallel group, of one rank as long as no layer is split; the ranks that hold the same part of the
model, each for another share, are a data-parallel group. Everything that is summed, voted on or sent goes through one
of these, or through all ranks; nobody else knows torch's process groups.

A process is in one gang, so there is one `Groups` in it: `groups()`. Before it connects, and in a process of its own,
each group is this rank alone and a collective does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from muster.trainer.config import SPEAKER
from muster.trainer.errors import RanksApart, is_lost_peer

T = TypeVar("T")

# Long enough for a slow peer that prepares data or loads a commit; a dead one breaks the connection at once.
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)


# torch 2.13 has given them new names, and warns of the old ones.
_gather_into: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum_into: Final[Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingSum(Protocol):
    """A sum that is under way. The tensor has its values once `wait` returns."""

    def wait(self) -> Any: ...


class RankGroup:
    """Some ranks that make the same collectives in the same order. `ranks` are their global numbers."""

    def __init__(self, ranks: tuple[int, ...], rank: int, process_group: dist.ProcessGroup | None = None) -> None:
        self.ranks, self.size, self.index = ranks, len(ranks), ranks.index(rank)
        self._group = process_group  # None: torch's default one, or none where the rank is alone

    def sum(self, tensor: Tensor) -> Tensor:
        """Add a tensor up over the group, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def begin_sum(self, tensor: Tensor) -> PendingSum:
        """Begin to add a tensor up over a group of several ranks, in place."""
        pending: PendingSum = dist.all_reduce(tensor, group=self._group, async_op=True)
        return pending

    def total(self, vector: Tensor) -> list[float]:
        """Add a vector up over the group, in place, and read it on the host."""
        return [float(value) for value in self.sum(vector).tolist()]

    def any(self, mine: bool, device: torch.device | str = "cpu") -> bool:
        """Return whether it is true on some rank. `device` is one that the group's backend sends from."""
        if self.size == 1:
            return mine
        flag = torch.tensor([int(mine)], dtype=torch.int32, device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor with that of the group's first rank."""
        if self.size > 1:
            dist.broadcast(tensor, src=self.ranks[0], group=self._group)
        return tensor

    def broadcast_object(self, value: T) -> T:
        """Return the value of the group's first rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=self.ranks[0], group=self._group)
        return values[0]

    def gather(self, value: T) -> list[T]:
        """Return the value of each rank, in the group's order."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def exchange(self, parts: Tensor) -> Tensor:
        """Send part i of [size, ...] to the group's i-th rank, and return the part that each has sent here."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self._group)
        return received

    def collect(self, tensor: Tensor) -> Tensor:
        """Return the tensor of each rank, [size, ...], in the group's order."""
        collected = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        _gather_into(collected.view(-1), tensor.reshape(-1), group=self._group)
        return collected

    def scatter_sum(self, parts: Tensor) -> Tensor:
        """Add the parts of [size, ...] up over the group, and return the sum of the part that is this rank's."""
        mine = torch.empty_like(parts[0])
        _scatter_sum_into(mine.view(-1), parts.reshape(-1), group=self._group)
        return mine

    def close(self) -> None:
        """Destroy a group that `Groups.control` has made."""
        if self._group is not None:
            dist.destroy_process_group(self._group)


class Groups:
    """The groups of this rank, numbered `rank` of `world`, of which `ranks_per_share` neighbours compute each share
    together. Making it is collective where a share has several ranks."""

    def __init__(self, rank: int = 0, world: int = 1, ranks_per_share: int = 1) -> None:
        assert world % ranks_per_share == 0, f"{world} ranks can't be divided into groups of {ranks_per_share}"
        everyone = range(world)
        self.all = RankGroup(tuple(everyone), rank)
        self.rank, self.world, self.speaks = rank, world, rank == SPEAKER
        shares = [tuple(everyone[first : first + ranks_per_share]) for first in everyone[::ranks_per_share]]
        parts = [tuple(everyone[first::ranks_per_share]) for first in range(ranks_per_share)]
        # The ranks that compute this rank's share together. Also where these are all, they have a process group of
        # their own: on a GPU one group's collectives follow each other, and FSDP gathers a layer ahead of its use.
        self.model = self._of(shares, rank, apart=True)
        self.data = self._of(parts, rank)  # the ranks that hold this rank's part of the model, each for another share

    def _of(self, divided: list[tuple[int, ...]], rank: int, apart: bool = False) -> RankGroup:
        mine = next(ranks for ranks in divided if rank in ranks)
        if len(mine) == 1 or (len(divided) == 1 and not apart):
            return RankGroup(mine, rank)
        made = [dist.new_group(list(ranks), timeout=COLLECTIVE_TIMEOUT) for ranks in divided]  # by all, for all
        return RankGroup(mine, rank, made[divided.index(mine)])

    def control(self) -> RankGroup:
        """A group of all ranks, on the CPU, whose messages never come between the collectives of training. Collective;
        the caller closes it."""
        group = dist.new_group(backend="gloo") if self.all.size > 1 else None
        return RankGroup(self.all.ranks, self.rank, group)


_current: Groups | None = None


def groups() -> Groups:
    """The groups of this process: those that `connect` has made, those of the process group that a program has made,
    or this rank alone."""
    if not dist.is_initialized():
        return Groups()
    rank, world = dist.get_rank(), dist.get_world_size()
    if _current is not None and (_current.rank, _current.world) == (rank, world):
        return _current
    return Groups(rank, world)


def connect(
    device: torch.device, ranks_per_share: int = 1, environ: dict[str, str] | os._Environ[str] = os.environ
) -> Groups:
    """Meet the other ranks, if that has not happened. A process without torchrun's variables becomes a gang of one.

    Raises RanksApart where they can't meet: the port of rank 0's store was taken, its name is unknown, nobody came."""
    global _current
    if not dist.is_initialized():
        _form(device, environ)
    _current = Groups(dist.get_rank(), dist.get_world_size(), ranks_per_share)
    return _current


def _form(device: torch.device, environ: dict[str, str] | os._Environ[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        environ.setdefault(name, value)
    if all_local(environ):
        # All ranks are on this machine: don't ask a name service which address it has.
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if device.type == "cuda" else "gloo"
    accelerator = device if device.type == "cuda" else None
    try:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=accelerator)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if is_lost_peer(type(error).__name__, str(error)):
            raise
        where = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise RanksApart(f"the ranks could not meet at {where}: {first_line}") from error


def all_local(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the whole gang runs on this machine."""
    return environ.get("MASTER_ADDR", "127.0.0.1") in ("127.0.0.1", "localhost", "::1")
