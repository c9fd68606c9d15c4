"""Evaluation of the model on held-out data: the metrics of each set, summed over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from muster.recipe.evaluation_config import source_metrics
from muster.trainer.config import DataParallel
from muster.trainer.data.batch import TokenBatch
from muster.trainer.data.packing import IGNORED, PackedSample
from muster.trainer.train.answering import AnswerEvaluator
from muster.trainer.train.tasks.objective import LossTotals, TrainingObjective, means

# A perplexity is e to the loss; of a larger loss it is no number that fp64 holds.
EXPONENT_MAX = 700.0


class HeldOut(Protocol):
    """Protocol of a data set, as the evaluation needs it."""

    @property
    def samples_per_epoch(self) -> int: ...
    @property
    def names(self) -> tuple[str, ...]: ...  # of its sources
    def sample(self, epoch: int, index: int) -> PackedSample: ...
    def source_of(self, epoch: int, index: int) -> int:
        """The number of the source, among `names`, that a sample is of."""


@dataclass(frozen=True)
class HeldOutSet:
    """A set that is evaluated on."""

    name: str  # "" for that of evaluation.data or evaluation.holdout
    data: HeldOut
    samples: int  # the most that are scored

    def by_source(self) -> list[list[int]]:
        """The first `samples` samples, by the source that they are of."""
        indices: list[list[int]] = [[] for _ in self.data.names]
        for index in range(min(self.samples, self.data.samples_per_epoch)):
            indices[self.data.source_of(0, index)].append(index)
        return indices


@dataclass(frozen=True)
class HeldOutResult:
    """Result of an evaluation."""

    loss: float  # the mean over all that is scored
    values: dict[str, float]  # all other metrics by name
    stop: bool  # whether any rank was asked to stop meanwhile


@dataclass(frozen=True)
class _ScoredSums:
    """Sums over what was scored, of all ranks."""

    loss: float
    count: float
    values: tuple[float, ...]  # of each named value of the objective its sum and its divisor
    text_bytes: float

    def __add__(self, other: _ScoredSums) -> _ScoredSums:
        values = tuple(a + b for a, b in zip(self.values, other.values, strict=True))
        return _ScoredSums(self.loss + other.loss, self.count + other.count, values, self.text_bytes + other.text_bytes)

    @property
    def mean(self) -> float:
        return self.loss / self.count if self.count else float("nan")


class HeldOutEvaluator:
    """Scores the first samples of each set, dealt to the data-parallel shares in turn. Every rank runs equally many
    batches, filled up with unscored rows, however many shares it holds: a sharded model's forward pass needs all ranks.

    A batch holds samples of one source, so that each source has a loss of its own. `by_token` tells that the loss is a
    mean over tokens. `token_bytes` [vocab] holds the bytes of text that each token stands for; None where that is not
    known. `answers` scores what the model says to prompts of the sets.
    """

    def __init__(
        self,
        sets: Sequence[HeldOutSet],
        micro_batch: int,
        division: DataParallel,
        objective: TrainingObjective,
        device: torch.device,
        by_token: bool = False,
        token_bytes: npt.NDArray[np.int64] | None = None,
        answers: AnswerEvaluator | None = None,
    ) -> None:
        self._answers = answers
        self._sets = tuple(sets)
        self._micro_batch, self._division, self._objective = micro_batch, division, objective
        self._device, self._by_token, self._token_bytes = device, by_token, token_bytes
        self._places = [(number, source) for number, each in enumerate(sets) for source in range(len(each.data.names))]
        self._batches: list[tuple[int, TokenBatch]] = []  # with the number of the place that it is of

    @torch.no_grad()
    def run(
        self, model: nn.Module, total: Callable[[Tensor], list[float]], stop_wanted: Callable[[], bool]
    ) -> HeldOutResult:
        """Score all of them. Collective.

        `total` adds a vector up over all ranks. The loss is NaN where nothing is scored.
        """
        model.eval()
        names = self._objective.names
        totals = [LossTotals(names, self._device) for _ in self._places]
        text_bytes = torch.zeros(len(self._places), dtype=torch.float64)
        for place, batch in self._all():
            totals[place].add(self._objective.held_out_loss(model, batch.to(self._device)))
            text_bytes[place] += self._bytes_of(batch)
        model.train()
        beside = torch.cat((text_bytes, torch.tensor([float(stop_wanted())], dtype=torch.float64)))
        vector = torch.cat((*(each.vector() for each in totals), beside.to(self._device)))
        # Ranks of one share report the same, so their number cancels out.
        *sums, stopped = total(vector)
        width = 2 + 2 * len(names)
        scored = []
        for place in range(len(totals)):
            loss, count, *values = sums[width * place : width * (place + 1)]
            scored.append(_ScoredSums(loss, count, tuple(values), sums[width * len(totals) + place]))
        result = self._result(scored, stopped > 0)
        # A stop does not wait for answers, unless they decide what the best commit is.
        if self._answers is None or (result.stop and not self._answers.decides):
            return result
        return replace(result, values=result.values | self._answers.run(total))

    def _result(self, scored: Sequence[_ScoredSums], stop: bool) -> HeldOutResult:
        values: dict[str, float] = {}
        whole: list[_ScoredSums] = []
        for number, each in enumerate(self._sets):
            parts = [part for part, (of, _) in zip(scored, self._places, strict=True) if of == number]
            whole.append(_sum(parts))
            prefix = f"{each.name}/" if each.name else ""
            for name, part in zip(source_metrics(each.data.names), parts, strict=False):
                if part.count:
                    values[prefix + name] = part.mean
            if prefix:
                if whole[-1].count:
                    values[f"{prefix}loss"] = whole[-1].mean
                values |= {prefix + name: value for name, value in self._metrics(whole[-1]).items()}
        # Without a set that has no name, the evaluation's loss is that of all together.
        overall = _sum([one for one, each in zip(whole, self._sets, strict=True) if not each.name] or whole)
        return HeldOutResult(overall.mean, self._metrics(overall) | values, stop)

    def _metrics(self, scored: _ScoredSums) -> dict[str, float]:
        """Return the metrics that are reported of a set in addition to its loss."""
        metrics = means(self._objective.names, list(scored.values))
        if self._by_token and scored.mean < EXPONENT_MAX:
            metrics["perplexity"] = math.exp(scored.mean)
        if self._by_token and scored.text_bytes:
            metrics["bits_per_byte"] = scored.loss / math.log(2.0) / scored.text_bytes
        return metrics

    def _all(self) -> Iterator[tuple[int, TokenBatch]]:
        if not self._batches:
            self._batches = [(place, batch) for place in range(len(self._places)) for batch in self._of_place(place)]
        return iter(self._batches)

    def _of_place(self, place: int) -> Iterator[TokenBatch]:
        division, rows = self._division, self._micro_batch
        of, source = self._places[place]
        indices = self._sets[of].by_source()[source]
        passes = math.ceil(len(indices) / (division.size * rows))
        dealt = [indices[share :: division.size] for share in division.shares]
        for own in [*dealt, *[[]] * division.blank_shares]:
            yield from (self._batch(self._sets[of].data, own[n * rows : (n + 1) * rows]) for n in range(passes))

    def _batch(self, data: HeldOut, indices: list[int]) -> TokenBatch:
        blanks = self._micro_batch - len(indices)
        return TokenBatch.of([data.sample(0, index) for index in [*indices, *[0] * blanks]], unscored=blanks)

    def _bytes_of(self, batch: TokenBatch) -> int:
        """The bytes of text that a batch, in memory, is scored on."""
        if self._token_bytes is None or not self._by_token:
            return 0
        labels = batch.labels[batch.labels != IGNORED]
        return int(self._token_bytes[labels.numpy()].sum())


def _sum(parts: Sequence[_ScoredSums]) -> _ScoredSums:
    first, *others = parts
    for other in others:
        first = first + other
    return first
