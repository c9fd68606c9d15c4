"""Is a rank slower than its peers? Told from its own work alone: in the time of a step all ranks are equal, for each
waits for the slowest.

What is timed is the forward pass, in which replicated ranks need nobody; where weights are sharded, only the layers
themselves, between the collectives. Where ranks divide a row's tokens, what they exchange within a layer is taken off
(`apart`). On a GPU by its own events, so that a slow host shows as well.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from muster.words.signals import SlowRank

Work = NDArray[np.float64]  # seconds, by rank

WINDOW = 6  # steps: with the one by which the times lag, a rank is known to be slow 7 steps after it became so
SLOW = 1.25  # times the median of the other ranks, as the window's median …
SLOW_EACH = 1.1  # … and in each of its steps, so that a hiccup is not a habit
WELL_AGAIN = 1.1
DEVIATIONS = 3.0  # and so many standard deviations of one step's ratio (a window's median has half of one)
REMEMBERED = 64  # steps, for the noise
RANKS_LISTENED_TO = 16  # of whom the noise is learnt
STEPS_IGNORED = 3  # compilation, page caches


class StragglerTimer:
    """Times one rank's own work. Read `seconds` after the step's wait for the device.

    `module` is the model where its weights are sharded, else None. Where it is given, `layers` are timed one by one,
    and `moved` is called at the begin and the end of each of them.
    """

    def __init__(
        self,
        device: torch.device,
        module: nn.Module | None,
        layers: Iterable[nn.Module] = (),
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._moved = moved
        self._cuda = device.type == "cuda"
        self._own: list[tuple[Any, Any]] = []
        self._elsewhere: list[tuple[Any, Any]] = []
        self._open: dict[int, Any] = {}
        self._working = False
        if module is not None:
            # FSDP's own hooks gather weights before a forward pass: its wait lies between the model's begin, told
            # before FSDP's hook, and the layer's, told after it.
            module.register_forward_pre_hook(self._begin, prepend=True)
            module.register_forward_hook(lambda module, *_: self._end(module, self._elsewhere))
            for layer in layers:
                layer.register_forward_pre_hook(self._begin)
                layer.register_forward_hook(lambda module, *_: self._end(module, self._own), prepend=True)

    @contextmanager
    def working(self) -> Iterator[None]:
        began = self._now()
        self._working = True
        yield
        self._working = False
        self._own.append((began, self._now()))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Around a wait for other ranks in the midst of work, which is not this rank's own."""
        began = self._now() if self._working else None
        yield
        if began is not None:
            self._elsewhere.append((began, self._now()))

    def seconds(self) -> float:
        """Return the seconds of work since the previous call; the device must have reached every moment that was
        noted."""
        total = sum(map(self._between, self._own)) - sum(map(self._between, self._elsewhere))
        self._own.clear()
        self._elsewhere.clear()
        return max(0.0, total)

    def _begin(self, module: nn.Module, *_: object) -> None:
        self._moved()
        if self._working:
            self._open[id(module)] = self._now()

    def _end(self, module: nn.Module, into: list[tuple[Any, Any]]) -> None:
        self._moved()
        if (began := self._open.pop(id(module), None)) is not None:
            into.append((began, self._now()))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, span: tuple[Any, Any]) -> float:
        return float(span[0].elapsed_time(span[1]) / 1000 if self._cuda else span[1] - span[0])


class StragglerDetector:
    """Detection of slow ranks, and of the step since which each is slow. It is given every rank's work of every
    step."""

    def __init__(self, ranks: int) -> None:
        self.slow: tuple[SlowRank, ...] = ()
        self._window = np.ones((WINDOW, ranks))  # ratios, a row for each of the last steps
        self._changes: deque[float] = deque(maxlen=REMEMBERED * min(ranks, RANKS_LISTENED_TO))
        self._heard = 0

    def hear(self, step: int, seconds: Sequence[float]) -> None:
        """Take note of a step. `seconds` holds each rank's own work in the step before; where one of them is missing,
        the step counts for nothing.
        """
        self._heard += 1
        if len(seconds) < 2 or self._heard <= STEPS_IGNORED or min(seconds) <= 0:
            return
        work = np.asarray(seconds)
        ratios = work / _medians_of_the_others(work)
        changes = np.log(ratios[:RANKS_LISTENED_TO] / self._window[-1][:RANKS_LISTENED_TO])
        self._changes.extend(np.abs(changes).tolist())
        self._window = np.vstack((self._window[1:], ratios))
        by_rank = {entry.rank: entry for entry in self.slow}
        suspects = (
            {*by_rank, *np.flatnonzero(ratios >= SLOW_EACH).tolist()} if by_rank or ratios.max() >= SLOW_EACH else ()
        )
        judged = [self._judged(rank, by_rank.get(rank), step) for rank in sorted(suspects)]
        self.slow = tuple(entry for entry in judged if entry is not None)

    def _judged(self, rank: int, before: SlowRank | None, step: int) -> SlowRank | None:
        mine = self._window[:, rank]
        score = float(np.median(mine))
        if before is not None:
            return before.model_copy(update={"ratio": round(score, 2)}) if score > WELL_AGAIN else None
        if score < SLOW or mine.min() < SLOW_EACH or math.log(score) < DEVIATIONS * self._noise():
            return None
        return SlowRank(rank=rank, ratio=round(score, 2), since_step=max(1, step - WINDOW))

    def _noise(self) -> float:
        """Standard deviation of a ratio's logarithm from step to step, robustly; who becomes slow moves it but once."""
        return 1.4826 * statistics.median(self._changes) / math.sqrt(2)


def _medians_of_the_others(work: Work) -> Work:
    """Return, for each rank, the lower median of all other ranks, by one sort."""
    order = np.argsort(work)
    place = np.empty_like(order)
    place[order] = np.arange(len(work))
    middle = (len(work) - 2) // 2  # among the others
    medians: Work = np.where(place > middle, work[order[middle]], work[order[middle + 1]])
    return medians
