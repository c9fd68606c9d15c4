"""Deals the samples of each step to the data-parallel shares, a little ahead of the training, on a thread of its own.

A step's samples are the next samples_per_step of the data's one order. Which share gets which is decided per step, so
a run that stops at any cursor goes on under any number of ranks with the very next sample.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from muster.trainer.config import DataParallel
from muster.trainer.data.batch import TokenBatch
from muster.trainer.data.packing import PADDING, PackedSample
from muster.trainer.errors import UserError
from muster.words.checkpoint import DataCursor


class SampleSource(Protocol):
    """Protocol of a data set, as the loader needs it."""

    @property
    def seed(self) -> int: ...
    @property
    def samples_per_epoch(self) -> int: ...
    def sample(self, epoch: int, index: int) -> PackedSample: ...


@dataclass(frozen=True)
class StepBatch:
    """The part of one optimizer step's samples that this rank computes."""

    # as many batches on every rank; the last ones may be unscored (DataParallel.shares_per_rank)
    micro: tuple[TokenBatch, ...]
    cursor: DataCursor  # where the data stands after this step
    # Epoch × samples per epoch + index of each sample, in the order of `micro`; unscored rows have none.
    sample_ids: tuple[int, ...]
    tokens: int  # inputs that are not padding
    # The number, within the step of all ranks, of each batch's first row: its name, whichever rank computes it.
    first_rows: tuple[int, ...]
    wait_seconds: float = 0.0  # how long next() had to wait


def dealt(samples_per_step: int, micro_batch: int, division: DataParallel) -> list[int]:
    """The numbers within a step of the samples in this rank's shares, in order: sample i is of micro-step
    i // (micro_batch · size) and of share (i // micro_batch) % size."""
    return [i for i in range(samples_per_step) if (i // micro_batch) % division.size in division.shares]


def advanced(cursor: DataCursor, samples: int, samples_per_epoch: int) -> DataCursor:
    """The cursor `samples` later; a cursor never stands at the end of an epoch but at the start of the next."""
    epochs, sample = divmod(cursor.sample + samples, samples_per_epoch)
    return DataCursor(seed=cursor.seed, epoch=cursor.epoch + epochs, sample=sample)


class RankLoader:
    """Makes this rank's part of each step, from the sample at `cursor` on.

    `prefetch` is the number of steps that are made ahead; 0 makes each when it is asked for. Raises UserError when the
    step can't be divided, or the cursor is of another seed.
    """

    def __init__(
        self,
        dataset: SampleSource,
        cursor: DataCursor,
        samples_per_step: int,
        micro_batch: int,
        division: DataParallel,
        device: torch.device | str,
        prefetch: int = 2,
    ) -> None:
        if samples_per_step % (micro_batch * division.size):
            raise UserError(
                f"a step of {samples_per_step} samples can't be divided over {division.size} shares × microBatch "
                f"{micro_batch}; change training.batch or the number of ranks"
            )
        if cursor.seed != dataset.seed:
            raise UserError(
                f"the checkpoint's data order is of seed {cursor.seed}, the configuration's of seed {dataset.seed}; "
                "keep training.seed, or start a new job from the checkpoint"
            )
        self._dataset, self._samples_per_step = dataset, samples_per_step
        self._micro_batch, self._device = micro_batch, torch.device(device)
        self._mine = dealt(samples_per_step, micro_batch, division)
        self._blanks = division.blank_shares * samples_per_step // (micro_batch * division.size)
        self._cursor = advanced(cursor, 0, dataset.samples_per_epoch)
        self._prefetch = prefetch
        self._waiting: deque[Future[StepBatch]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        for _ in range(prefetch):
            self._ask()

    def next(self) -> StepBatch:
        """This rank's part of the next step, on the device. What went wrong on the thread is raised here."""
        began = time.perf_counter()
        if not self._prefetch:
            self._ask()
        prepared = self._waiting.popleft().result()
        waited = time.perf_counter() - began
        micro = tuple(batch.to(self._device) for batch in prepared.micro)
        step = replace(prepared, micro=micro, wait_seconds=waited)
        if self._prefetch:  # last of all: the thread takes Python's lock at once
            self._ask()
        return step

    def close(self) -> None:
        """End the thread and wait for it. A second call does nothing."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _ask(self) -> None:
        self._waiting.append(self._thread.submit(self._prepare, self._cursor))
        self._cursor = advanced(self._cursor, self._samples_per_step, self._dataset.samples_per_epoch)

    def _prepare(self, cursor: DataCursor) -> StepBatch:
        per_epoch = self._dataset.samples_per_epoch
        at = [divmod(cursor.sample + number, per_epoch) for number in self._mine]
        samples = [self._dataset.sample(cursor.epoch + later, index) for later, index in at]
        rows = [samples[i : i + self._micro_batch] for i in range(0, len(samples), self._micro_batch)]
        pin = self._device.type == "cuda"
        return StepBatch(
            micro=(
                *(TokenBatch.of(some, pin=pin) for some in rows),
                *(self._blank(cursor, pin) for _ in range(self._blanks)),
            ),
            cursor=advanced(cursor, self._samples_per_step, per_epoch),
            sample_ids=tuple((cursor.epoch + later) * per_epoch + index for later, index in at),
            tokens=sum(int(np.count_nonzero(sample.documents != PADDING)) for sample in samples),
            first_rows=(
                *self._mine[:: self._micro_batch],
                *(self._samples_per_step + blank for blank in range(self._blanks)),
            ),
        )

    def _blank(self, cursor: DataCursor, pin: bool) -> TokenBatch:
        filling = [self._dataset.sample(cursor.epoch, cursor.sample)] * self._micro_batch
        return TokenBatch.of(filling, unscored=self._micro_batch, pin=pin)
