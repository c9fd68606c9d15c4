"""Random generators that a commit can't give back are found out before anything is restored."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from muster.contract.checkpoint import Commit, DataCursor
from muster.trainer.checkpoint import UnusableCommit, randomness


def commit(*rng: dict[str, Any]) -> Commit:
    return Commit(
        job="j", job_uid="u", attempt=1, step=5, committed_at=5.0, world_size=max(len(rng), 1), files=(), tensors={},
        cursor=DataCursor(seed=0, epoch=0, sample=5), config={}, architecture={}, rng=rng,
    )  # fmt: skip


DAMAGES: list[Callable[[dict[str, Any]], Any]] = [
    lambda saved: saved.update(torch="AAAA"),
    lambda saved: saved.update(torch=7),
    lambda saved: saved.update(python={}),
    lambda saved: saved.update(python=[]),
    lambda saved: saved["python"].update(words="not base64!"),
    lambda saved: saved["python"].update(version=2),
    lambda saved: saved["python"].update(words=saved["python"]["words"][:400]),
    lambda saved: saved["numpy"].update(position=10**9),
    lambda saved: saved["numpy"].update(kind="PCG"),
]


@pytest.mark.parametrize("number", range(len(DAMAGES)))
def test_damaged_generators_are_told_and_those_in_use_stay(number: int) -> None:
    randomness.seed(3, 0)
    sound = randomness.state()
    randomness.must_be_restorable(commit(sound), 0, 1)
    damaged = copy.deepcopy(sound)
    DAMAGES[number](damaged)
    with pytest.raises(UnusableCommit, match="the state of rank 1's random generators is damaged"):
        randomness.must_be_restorable(commit(sound, damaged), 1, 2)
    randomness.must_be_restorable(commit(sound, damaged), 0, 1)  # another number of ranks has no use for them
    assert randomness.state() == sound
    values = random.random(), torch.rand(1).item()
    randomness.restore(sound)
    assert (random.random(), torch.rand(1).item()) == values
