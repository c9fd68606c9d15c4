"""Ranks that are threads of one process, for self-tests: they exchange tensors as the ranks of a gang do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from muster.trainer.parallel.groups import RankGroup

# A thread that waits longer than a self-test takes: the other one has met an endless loop in a class of transformers.
PATIENCE_SECONDS = 60.0


class _Meeting:
    """The place where the threads of one group hand each other what they have."""

    def __init__(self, size: int) -> None:
        self.given: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_SECONDS)


class ThreadGroup(RankGroup):
    """A group of threads. Only what ranks do in a model's forward and backward pass."""

    def __init__(self, size: int, index: int, meeting: _Meeting) -> None:
        super().__init__(tuple(range(size)), index)
        self._meeting = meeting

    @contextmanager
    def leaving_none_waiting(self) -> Iterator[None]:
        """Around all that a thread does: if it fails, those that wait for it fail too."""
        try:
            yield
        except BaseException:
            self._meeting.barrier.abort()
            raise

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._of_all(tensor)).sum(0))

    def exchange(self, parts: Tensor) -> Tensor:
        return torch.stack([given[self.index] for given in self._of_all(parts)])

    def collect(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._of_all(tensor))

    def scatter_sum(self, parts: Tensor) -> Tensor:
        return torch.stack([given[self.index] for given in self._of_all(parts)]).sum(0)

    def _of_all(self, tensor: Tensor) -> list[Tensor]:
        meeting = self._meeting
        meeting.given[self.index] = tensor.clone()  # `sum` writes into what it was given
        meeting.barrier.wait()
        given = [each for each in meeting.given if each is not None]
        meeting.barrier.wait()  # nobody gives anew before all have read
        return given


def thread_groups(size: int) -> list[ThreadGroup]:
    """The places of `size` threads in one group."""
    meeting = _Meeting(size)
    return [ThreadGroup(size, index, meeting) for index in range(size)]
