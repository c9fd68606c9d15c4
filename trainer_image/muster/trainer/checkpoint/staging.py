"""The copy that training waits for: this rank's share of the state, as one safetensors file in shared memory.

The memory is taken once and used again; the upload process reads it where it lies. On CUDA it is page-locked, the
copies run on a stream of their own, and only the next optimizer step waits for them, on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from muster.trainer.checkpoint.memory import SharedMemory
from muster.trainer.checkpoint.shard_file import ShardLayout, lay_out
from muster.trainer.checkpoint.tensors import (
    Local,
    localize,
    model_tensors,
    optimizer_tensors,
    rank_and_world,
    share_of,
)

_HEADER_BYTES = 1 << 20  # room for names and offsets


@dataclass(frozen=True)
class Share:
    """What this rank writes, and where in the file. pieces: for the COMMIT, by name: dtype, global shape, offset,
    extent."""

    locals: tuple[Local, ...]
    layout: ShardLayout
    pieces: dict[str, list[Any]]


class Staging:
    def __init__(self, on_new_memory: Callable[[SharedMemory], None]) -> None:
        self._on_new_memory = on_new_memory
        self._memory: SharedMemory | None = None
        self._bytes: torch.Tensor | None = None
        self._page_locked = False
        self._share: Share | None = None
        self._seen: tuple[tuple[int, int], ...] = ()
        self._stream: torch.cuda.Stream | None = None
        self._staged: torch.cuda.Event | None = None

    @property
    def share(self) -> Share:
        assert self._share is not None, "nothing was staged yet"
        return self._share

    @property
    def size(self) -> int:
        """Bytes of this rank's file, as far as is known yet."""
        if self._share is not None:
            return self._share.layout.size
        return self._memory.size if self._memory is not None else 0

    def reserve(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take the memory that a save will need, before the first one: AdamW keeps two values per weight."""
        rank, world = rank_and_world()
        locals_ = [localize(name, tensor, world) for name, tensor in model_tensors(model)]
        weights = sum(local.bytes for local in share_of(locals_, rank))
        self._take(3 * weights + _HEADER_BYTES, any(local.data.is_cuda for local in locals_))

    def lay_out(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Settle what this rank writes; True when it is not what it was at the last save."""
        live = [*model_tensors(model), *optimizer_tensors(model, optimizer)]
        seen = tuple(
            (id(tensor), tensor.data_ptr()) if type(tensor) is torch.Tensor else _identity(tensor) for _, tensor in live
        )
        if self._share is not None and seen == self._seen:
            return False
        rank, world = rank_and_world()
        locals_ = share_of([localize(name, tensor, world) for name, tensor in live], rank)
        layout = lay_out((local.name, local.dtype, local.box.extent) for local in locals_)
        pieces: dict[str, list[Any]] = {
            local.name: [local.dtype, local.shape, local.box.offset, local.box.extent, layout.slots[local.name].start]
            for local in locals_
        }
        self._share, self._seen = Share(tuple(locals_), layout, pieces), seen
        self._take(layout.size, any(local.data.is_cuda for local in locals_))
        return True

    def copy(self, optimizer: torch.optim.Optimizer, staged: Callable[[], None]) -> None:
        """Copy the share to shared memory; `staged` is called when its last byte is there (on CUDA from a thread)."""
        assert self._bytes is not None
        layout = self.share.layout
        self._bytes[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        on_device = [local for local in self.share.locals if local.data.is_cuda]
        # First what is copied here and now: `staged` may be called as soon as the device is done.
        self._copy(local for local in self.share.locals if not local.data.is_cuda)
        if on_device:
            self._copy_from_device(on_device, optimizer, staged)
        else:
            staged()

    def wait(self) -> None:
        """Return when the copies that run on the device have ended."""
        if self._staged is not None:
            self._staged.synchronize()

    def close(self) -> None:
        self.wait()
        if self._page_locked and self._bytes is not None:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
        self._bytes, self._page_locked = None, False
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _copy(self, locals_: Iterable[Local], non_blocking: bool = False) -> None:
        assert self._bytes is not None
        for local in locals_:
            slot = self.share.layout.slots[local.name]
            target = self._bytes[slot.start : slot.end].view(local.data.dtype).view(local.data.shape)
            target.copy_(local.data, non_blocking=non_blocking)

    def _copy_from_device(
        self, locals_: Sequence[Local], optimizer: torch.optim.Optimizer, staged: Callable[[], None]
    ) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            # Weights change in the optimizer's step and nowhere else, so this is the one place that must wait.
            optimizer.register_step_pre_hook(self._before_step)
        locals_ = [replace(local, data=local.data.clone()) if local.restless else local for local in locals_]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(locals_, non_blocking=True)
            for local in locals_:
                local.data.record_stream(self._stream)
            self._staged = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._staged.record(self._stream)
        event = self._staged

        def when_done() -> None:
            event.synchronize()
            staged()

        threading.Thread(target=when_done, name="checkpoint-staged", daemon=True).start()

    def _before_step(self, *_: Any) -> None:
        if self._staged is not None:
            torch.cuda.current_stream().wait_event(self._staged)

    def _take(self, size: int, page_locked: bool) -> None:
        if self._memory is not None and self._memory.size >= size:
            return
        self.close()
        self._memory = SharedMemory.create(size)
        self._memory.populate()
        self._bytes = torch.frombuffer(self._memory.map, dtype=torch.uint8)
        if page_locked:
            cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cuda.cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0))
            self._page_locked = True
        self._on_new_memory(self._memory)


def _identity(tensor: torch.Tensor) -> tuple[int, int]:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return id(tensor), local.data_ptr()
