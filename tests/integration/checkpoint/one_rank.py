"""One rank's model, optimizer and saver in the test's own process."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.integration.checkpoint import gang
from tests.polling import WAIT_SECONDS_MAX
from torch import nn

from muster.trainer.checkpoint import CheckpointSaver, SaveOutcome, SaverIdentity, TrainState
from muster.words.checkpoint import DataCursor
from muster.words.job import Keep


def identity(folder: str, attempt: int = 1, fence: str | None = None) -> SaverIdentity:
    return SaverIdentity("job", "uid", attempt, fence, folder, {"seed": 0}, {"dim": 16}, {"kind": "bytes"})


def state(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, **more: Any) -> TrainState:
    fields = {"state": {}, "rng": {}, "metrics": {}, "best": False, **more}
    return TrainState(model, optimizer, step, 10 * step, DataCursor(seed=0, epoch=0, sample=step), **fields)


@contextlib.contextmanager
def saver(folder: str, keep: Keep | None = None, **about: Any) -> Iterator[CheckpointSaver]:
    made = CheckpointSaver(identity(folder, **about), keep or Keep(), {"shard": "none"})
    try:
        yield made
    finally:
        made.close()


def trained(folder: str, steps: int) -> dict[int, dict[str, str]]:
    """Train and commit each step; the digest of the state after each."""
    model, optimizer = gang.build("none", seed=0)
    digests = {}
    with saver(folder, Keep(last=steps)) as saving:
        for step in range(1, steps + 1):
            gang.step_once(model, optimizer, step)
            digests[step] = gang.digest(model, optimizer)
            saving.save(state(model, optimizer, step), emergency=True)
            assert [(o.step, o.committed) for o in saving.drain(WAIT_SECONDS_MAX)] == [(step, True)]
    return digests


def outcomes(saving: CheckpointSaver, seconds: float = WAIT_SECONDS_MAX) -> list[tuple[int, bool, str | None]]:
    return [_brief(outcome) for outcome in saving.drain(seconds)]


def _brief(outcome: SaveOutcome) -> tuple[int, bool, str | None]:
    return outcome.step, outcome.committed, outcome.error


def fence(path: Path, attempt: int) -> str:
    """A job's status as the operator of one machine tells it."""
    path.write_text(json.dumps({"metadata": {"uid": "uid"}, "status": {"attempt": attempt}}))
    return path.as_uri()
