"""The held-out loss is the same however many ranks share the work."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from muster.trainer.config import DataParallel
from muster.trainer.data import Sample
from muster.trainer.train.evaluation import Evaluator, HeldOutResult
from muster.trainer.train.tasks.next_token import NextToken

LENGTH = 6


class HeldOut:
    """Sample i has i % 4 + 1 scored labels."""

    def __init__(self, samples: int) -> None:
        self.samples_per_epoch = samples

    def sample(self, epoch: int, index: int) -> Sample:
        labels = np.full(LENGTH, -100, np.int32)
        labels[: index % 4 + 1] = index
        tokens = np.full(LENGTH, index, np.int32)
        return Sample(tokens, labels, np.arange(LENGTH, dtype=np.int32), np.zeros(LENGTH, np.int32))


class Scores(nn.Module):
    """A loss of (index + 1) per scored label; remembers the samples that it saw scored."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[int]] = []

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        assert smoothing == 0.0
        assert not self.training
        assert not torch.is_grad_enabled()
        assert all(part.dtype == torch.int64 for part in (tokens, positions, documents, labels))
        scored = labels != -100
        self.calls.append([int(row[0]) for row, any_scored in zip(tokens, scored.any(1), strict=True) if any_scored])
        return ((tokens + 1) * scored).sum().float()


@pytest.mark.parametrize(("held_out", "asked_for", "micro_batch"), [(10, 256, 2), (10, 7, 3), (1, 5, 4), (16, 16, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_sample_is_scored_once(held_out: int, asked_for: int, micro_batch: int, ranks: int) -> None:
    vectors: list[Tensor] = []
    calls: list[list[list[int]]] = []

    def remember(vector: Tensor) -> list[float]:
        vectors.append(vector)
        return [1.0, 1.0, 0.0]

    for rank in range(ranks):
        model: Any = Scores()
        evaluator = Evaluator(
            HeldOut(held_out), asked_for, micro_batch, DataParallel(ranks, (rank,)), NextToken(0.1), torch.device("cpu")
        )
        evaluator.run(model, remember, lambda rank=rank: rank == 0)  # type: ignore[misc]
        calls.append(model.calls)
        assert model.training

    count = min(held_out, asked_for)
    assert sorted(index for rank in calls for batch in rank for index in batch) == list(range(count))
    assert len({len(rank) for rank in calls}) == 1  # a sharded forward pass needs all ranks
    loss = sum((index + 1) * (index % 4 + 1) for index in range(count))
    tokens = sum(index % 4 + 1 for index in range(count))
    assert sum(vectors).tolist() == [loss, tokens, 1.0]  # type: ignore[union-attr]


def test_the_mean_is_weighted_by_tokens_and_wishes_are_heard() -> None:
    evaluator = Evaluator(HeldOut(4), 4, 2, DataParallel(1, (0,)), NextToken(0.1), torch.device("cpu"))
    assert evaluator.run(Scores(), lambda vector: vector.tolist(), lambda: True) == HeldOutResult(30 / 10, {}, True)
    assert evaluator.run(Scores(), lambda vector: vector.tolist(), lambda: False) == HeldOutResult(30 / 10, {}, False)
