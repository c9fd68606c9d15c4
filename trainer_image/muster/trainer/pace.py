"""Is a rank slower than its peers? Told from its own work alone: in the time of a step all ranks are equal, for each
waits for the slowest.

What is timed is the forward pass, in which replicated ranks need nobody; where weights are sharded, only the layers
themselves, between the collectives. On a GPU by its own events, so that a slow host shows as well.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from muster.contract.signals import SlowRank

WINDOW = 6  # steps: with the one by which the times lag, a rank is known to be slow 7 steps after it became so
SLOW = 1.25  # times the median of the other ranks, as the window's median …
SLOW_EACH = 1.1  # … and in each of its steps, so that a hiccup is not a habit
WELL_AGAIN = 1.1
DEVIATIONS = 3.0  # and beyond the noise, robustly measured over all ranks
STEPS_IGNORED = 3  # compilation, page caches


class Pace:
    """Times one rank's own work. decoder: where its weights are sharded, else None. Read `seconds` after the step's
    wait for the device.
    """

    def __init__(self, device: torch.device, decoder: nn.Module | None, layers: Iterable[nn.Module] = ()) -> None:
        self._cuda = device.type == "cuda"
        self._own: list[tuple[Any, Any]] = []
        self._elsewhere: list[tuple[Any, Any]] = []
        self._open: dict[int, Any] = {}
        self._working = False
        if decoder is not None:
            # FSDP's own hooks gather weights before a forward pass: its wait lies between the decoder's begin, told
            # before FSDP's hook, and the layer's, told after it.
            decoder.register_forward_pre_hook(self._begin, prepend=True)
            decoder.register_forward_hook(lambda module, *_: self._end(module, self._elsewhere))
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

    def seconds(self) -> float:
        """Of work since this was last asked; every moment that was noted must have come."""
        total = sum(map(self._between, self._own)) - sum(map(self._between, self._elsewhere))
        self._own.clear()
        self._elsewhere.clear()
        return max(0.0, total)

    def _begin(self, module: nn.Module, *_: object) -> None:
        if self._working:
            self._open[id(module)] = self._now()

    def _end(self, module: nn.Module, into: list[tuple[Any, Any]]) -> None:
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


class Stragglers:
    """Which ranks are slow, and since which step. Fed with every rank's work of every step."""

    def __init__(self, ranks: int) -> None:
        self.slow: tuple[SlowRank, ...] = ()
        self._ratios: list[deque[float]] = [deque(maxlen=WINDOW) for _ in range(ranks)]
        self._heard = 0

    def hear(self, step: int, seconds: Sequence[float]) -> None:
        """seconds: of own work in the step before, by rank; without them all, the step counts for nothing."""
        self._heard += 1
        if len(seconds) < 2 or self._heard <= STEPS_IGNORED or min(seconds) <= 0:
            return
        typical = _medians_of_the_others(seconds)
        for ratios, mine, usual in zip(self._ratios, seconds, typical, strict=True):
            ratios.append(mine / usual)
        if len(self._ratios[0]) < WINDOW:
            return
        known = {entry.rank: entry for entry in self.slow}
        found = []
        for rank, ratios in enumerate(self._ratios):
            if rank in known or max(ratios) >= SLOW:
                score = statistics.median(ratios)
                if rank in known and score > WELL_AGAIN:
                    found.append(known[rank].model_copy(update={"ratio": round(score, 2)}))
                elif score >= SLOW and min(ratios) >= SLOW_EACH and score - 1 >= DEVIATIONS * self._noise():
                    found.append(SlowRank(rank=rank, ratio=round(score, 2), since_step=max(1, step - WINDOW)))
        self.slow = tuple(found)

    def _noise(self) -> float:
        """How far a rank's ratio strays from that rank's own median: robust standard deviation over all ranks."""
        centres = [statistics.median(ratios) for ratios in self._ratios]
        strays = [abs(r - centre) for ratios, centre in zip(self._ratios, centres, strict=True) for r in ratios]
        return 1.4826 * statistics.median(strays)


def _medians_of_the_others(seconds: Sequence[float]) -> list[float]:
    """For each rank the lower median of all but itself, by one sort."""
    order = sorted(range(len(seconds)), key=seconds.__getitem__)
    place = {rank: at for at, rank in enumerate(order)}
    middle = (len(seconds) - 2) // 2  # among the others
    return [seconds[order[middle if place[rank] > middle else middle + 1]] for rank in range(len(seconds))]
