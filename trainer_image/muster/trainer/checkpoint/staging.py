"""The copy that training waits for: this rank's share of the state, as one safetensors file in shared memory.

The memory is taken once and used again; the upload process reads it where it lies. There is one slot for saving; a
second lets every step be copied, with one whole copy there at any moment. On CUDA they are page-locked, the copies run
on a stream of their own, and only the next optimizer step waits for them, on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from math import prod
from typing import Any

import torch
from torch import nn

from muster.trainer.checkpoint.chunks import TensorChunk
from muster.trainer.checkpoint.memory import SharedMemory
from muster.trainer.checkpoint.optimizer_state import state_bytes
from muster.trainer.checkpoint.shard_file import ShardLayout, lay_out
from muster.trainer.checkpoint.snapshot import ORDER_BYTES, begin, complete
from muster.trainer.checkpoint.tensors import (
    ATTACHED_BYTES,
    LocalChunk,
    attached_name,
    is_frozen,
    localize,
    model_tensors,
    optimizer_tensors,
    share_of,
    trained_parameters,
)
from muster.trainer.parallel.groups import groups as gang

_HEADER_BYTES = 512  # for each tensor of a file: its name, shape and place


@dataclass(frozen=True)
class RankShare:
    """Tensors that this rank writes, and their places in the file."""

    locals: tuple[LocalChunk, ...]
    layout: ShardLayout
    slices: dict[str, list[Any]]  # for the COMMIT, by name: dtype, global shape, offset, extent
    stateless: list[str]  # trained parameters that have no optimizer state yet
    groups: list[list[str]]  # the parameters of each of the optimizer's groups

    @property
    def file(self) -> tuple[ShardLayout, dict[str, list[Any]], list[str], list[list[str]]]:
        """The description of the file, in the file and in its COMMIT. It stays the same when tensors only move in
        memory."""
        return self.layout, self.slices, self.stateless, self.groups


class StagingSlot:
    """Memory for one copy of the share."""

    def __init__(self, size: int, page_locked: bool) -> None:
        self.memory = SharedMemory.create(size + ORDER_BYTES)
        self.memory.populate()
        self.bytes = torch.frombuffer(self.memory.map, dtype=torch.uint8)
        self._places: dict[str, torch.Tensor] = {}
        self._layout = 0  # the number of the layout that the places are of; 0 before the first
        self._page_locked = page_locked
        if page_locked:
            cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cuda.cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0))

    @property
    def capacity(self) -> int:
        return self.memory.size - ORDER_BYTES

    def begin(self, share: RankShare, layout: int) -> None:
        """The copy that is here is given up for one of `share`, whose layout has the number `layout`."""
        begin(self.memory)
        if self._layout != layout:
            self._lay_out(share)
            self._layout = layout

    def _lay_out(self, share: RankShare) -> None:
        """Write the header and assign each tensor its place; the tensors are copied later."""
        header = share.layout.header
        self.bytes[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._places = {}
        for local in share.locals:
            place = share.layout.slots[local.name]
            self._places[local.name] = self.bytes[place.start : place.end].view(local.data.dtype).view(local.data.shape)

    def copy(self, locals_: Sequence[LocalChunk], non_blocking: bool = False) -> None:
        if locals_:
            places = [self._places[local.name] for local in locals_]
            torch._foreach_copy_(places, [local.data for local in locals_], non_blocking)

    def close(self) -> None:
        if self._page_locked:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())  # type: ignore[no-untyped-call]
        del self.bytes, self._places
        self.memory.close()


class StagingMemory:
    """Copies this rank's share of the state into memory that the upload process shares.

    `on_new_memory` is called with the number and the memory of each slot that is made.
    """

    def __init__(self, on_new_memory: Callable[[int, SharedMemory], None]) -> None:
        self._on_new_memory = on_new_memory
        self._slots: list[StagingSlot] = []
        self._wanted_slots, self._newest = 1, 0
        self._share: RankShare | None = None
        self.layout = 0  # the number of the layout that the next copy has; 0 before the first
        self._seen: tuple[tuple[int, int], ...] = ()
        self._stream: torch.cuda.Stream | None = None
        self._staged: torch.cuda.Event | None = None
        self._completing: threading.Thread | None = None
        self._frozen: StagingSlot | None = None
        self._attached: torch.Tensor | None = None

    @property
    def share(self) -> RankShare:
        assert self._share is not None, "nothing was staged yet"
        return self._share

    @property
    def size(self) -> int:
        """Bytes of this rank's files, as far as is known yet."""
        frozen = self._frozen.capacity if self._frozen is not None else 0
        if self._share is not None:
            return frozen + self._share.layout.size
        return frozen + (self._slots[0].capacity if self._slots else 0)

    def reserve(self, model: nn.Module, optimizer: torch.optim.Optimizer, slots: int) -> None:
        """Take the memory that saves will need, before the first one."""
        self._wanted_slots = slots
        self._take(reserve_bytes(model, optimizer), any(tensor.is_cuda for _, tensor in model_tensors(model)))

    def lay_out(self, model: nn.Module, optimizer: torch.optim.Optimizer, attached: bytes = b"") -> bool:
        """Settle what this rank writes; True when the file is laid out otherwise than the last one. `attached` are
        bytes that it writes beside.

        Copies that are there stay: while this rank copies the next step, they are all that it shares with the others.
        """
        self._attach(attached)
        seen = (*_identities(model, optimizer), (id(self._attached), 0))
        if self._share is not None and seen == self._seen:
            return False
        weights = [(name, tensor) for name, tensor in model_tensors(model) if not is_frozen(tensor)]
        live = [*weights, *optimizer_tensors(model, optimizer)]
        share = _share(live, _stateless(model, optimizer), _groups(model, optimizer), self._attached)
        previous, self._share = self._share, share
        # Anew, for the layers that FSDP had gathered are in shards since the lines above.
        self._seen = (*_identities(model, optimizer), (id(self._attached), 0))
        if previous is not None and previous.file == share.file:
            return False
        self.layout += 1
        self._take(share.layout.size, any(local.data.is_cuda for local in share.locals))
        return True

    def _attach(self, data: bytes) -> None:
        """Hold bytes behind their number. There is room for more, so that the file keeps its layout when they grow a
        little."""
        if not data:
            self._attached = None
            return
        framed = ATTACHED_BYTES.pack(len(data)) + data
        if self._attached is None or self._attached.numel() < len(framed):
            self._attached = torch.zeros(max(4096, 1 << (len(framed) - 1).bit_length()), dtype=torch.uint8)
        self._attached[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)

    def copy_frozen(self, model: nn.Module) -> tuple[SharedMemory, RankShare] | None:
        """A copy of this rank's share of what is never trained, in memory of its own; None where all is trained."""
        self.drop_frozen()
        frozen = [(name, tensor) for name, tensor in model_tensors(model) if is_frozen(tensor)]
        if not frozen:
            return None
        share = _share(frozen, [], [])
        self._frozen = StagingSlot(share.layout.size, page_locked=False)
        self._frozen.begin(share, layout=1)
        self._frozen.copy(share.locals)
        return self._frozen.memory, share

    def drop_frozen(self) -> None:
        """The copy is not needed any more."""
        if self._frozen is not None:
            self._frozen.close()
            self._frozen = None

    def copy(
        self, optimizer: torch.optim.Optimizer, order: bytes, uploading: int | None, staged: Callable[[int], None]
    ) -> int:
        """Copy the share to the slot that is neither `uploading` (an upload reads it) nor, if possible, the newest.

        When the last byte is there, the slot has the order, and `staged` is told the slot: on CUDA from a thread.
        Returns the slot's number.
        """
        number = min((n for n in range(len(self._slots)) if n != uploading), key=lambda n: n == self._newest)
        slot, self._newest = self._slots[number], number
        slot.begin(self.share, self.layout)

        def done() -> None:
            complete(slot.memory, order)
            staged(number)

        on_device = [local for local in self.share.locals if local.data.is_cuda]
        # First what is copied here and now: `done` may be called as soon as the device is done.
        slot.copy([local for local in self.share.locals if not local.data.is_cuda])
        if on_device:
            self._copy_from_device(slot, on_device, optimizer, done)
        else:
            done()
        return number

    def wait(self) -> None:
        """Return when the copies that run on the device have ended, and those who wait for them were told."""
        if self._completing is not None:
            self._completing.join()
            self._completing = None

    def close(self) -> None:
        self.wait()
        self.drop_frozen()
        self._free_slots()

    def _free_slots(self) -> None:
        while self._slots:
            self._slots.pop().close()

    def _copy_from_device(
        self,
        slot: StagingSlot,
        locals_: Sequence[LocalChunk],
        optimizer: torch.optim.Optimizer,
        done: Callable[[], None],
    ) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            # Weights change in the optimizer's step and nowhere else, so this is the one place that must wait.
            optimizer.register_step_pre_hook(self._before_step)
        locals_ = [replace(local, data=local.data.clone()) if local.mutable else local for local in locals_]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            slot.copy(locals_, non_blocking=True)
            for local in locals_:
                local.data.record_stream(self._stream)
            self._staged = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._staged.record(self._stream)
        event = self._staged

        def when_done() -> None:
            event.synchronize()
            done()

        self._completing = threading.Thread(target=when_done, name="checkpoint-staged", daemon=True)
        self._completing.start()

    def _before_step(self, *_: Any) -> None:
        if self._staged is not None:
            torch.cuda.current_stream().wait_event(self._staged)

    def _take(self, size: int, page_locked: bool) -> None:
        if len(self._slots) >= self._wanted_slots and self._slots[0].capacity >= size:
            return
        self.wait()
        self._free_slots()
        for number in range(self._wanted_slots):
            self._slots.append(StagingSlot(size, page_locked))
            self._on_new_memory(number, self._slots[number].memory)


def reserve_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """About what this rank's file will take at every save, told from its share of the weights before there is an
    optimizer state."""
    rank, world = gang().rank, gang().world
    tensors = {name: tensor for name, tensor in model_tensors(model) if not is_frozen(tensor)}
    mine = share_of([localize(name, tensor, world) for name, tensor in tensors.items()], rank)
    total = 8 * _HEADER_BYTES
    for local in mine:
        state = state_bytes(tensors[local.name], optimizer)  # of the whole parameter, as its bytes and values are
        whole = prod(local.shape) * local.data.element_size()
        total += local.bytes + (1 + len(state)) * _HEADER_BYTES
        total += sum(state) * local.bytes // whole if whole else 0
    return total


def _share(
    live: Sequence[tuple[str, torch.Tensor]],
    stateless: list[str],
    groups: list[list[str]],
    attached: torch.Tensor | None = None,
) -> RankShare:
    rank, world = gang().rank, gang().world
    locals_ = share_of([localize(name, tensor, world) for name, tensor in live], rank)
    if attached is not None:
        whole = TensorChunk((0,), tuple(attached.shape))
        locals_.append(LocalChunk(attached_name(rank), whole.extent, whole, attached, (rank,)))
    layout = lay_out((local.name, local.dtype, local.chunk.extent) for local in locals_)
    slices: dict[str, list[Any]] = {
        local.name: [local.dtype, local.shape, local.chunk.offset, local.chunk.extent, layout.slots[local.name].start]
        for local in locals_
    }
    return RankShare(tuple(locals_), layout, slices, stateless, groups)


def _stateless(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    return [name for name, parameter in trained_parameters(model, optimizer) if not optimizer.state.get(parameter)]


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    names = [name for name, _ in trained_parameters(model, optimizer)]
    ends = list(accumulate(len(group["params"]) for group in optimizer.param_groups))
    return [names[start:end] for start, end in pairwise([0, *ends])]


def _identities(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[tuple[int, int], ...]:
    """Return the sizes of the groups, and the identities of all tensors and of the memory that they lie in. This is
    quick, because every snapshot needs it. A layer that FSDP has gathered has other identities than one that lies in
    shards."""
    states = (value for state in optimizer.state.values() for value in state.values())
    tensors = chain(model.parameters(), model.buffers(), (value for value in states if isinstance(value, torch.Tensor)))
    groups = ((number, len(group["params"])) for number, group in enumerate(optimizer.param_groups))
    places = ((id(tensor), getattr(tensor, "_local_tensor", tensor).data_ptr()) for tensor in tensors)
    return (*groups, *places)
