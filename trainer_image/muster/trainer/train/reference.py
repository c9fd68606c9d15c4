"""Log-probabilities that the reference model gives to the answers, where it is not simply the model without its
adapter.

It is computed once, by the weights that the job begins with, and stored in the job's folder under the SHA-256 of its
bytes, which every commit names: a resumed job compares with the very same numbers, whatever its number of ranks. So no
second model is ever held in memory.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from safetensors import numpy as safetensors

from muster.storage.errors import NotFound
from muster.storage.opening import open_store
from muster.trainer.config import RankPosition
from muster.trainer.data import RunData
from muster.trainer.data.batch import TokenBatch
from muster.trainer.data.packing import Float32s
from muster.trainer.data.pairs import PairPacking
from muster.trainer.errors import StorageError, UserError
from muster.trainer.models.sharding import ParallelModel
from muster.trainer.parallel.groups import groups
from muster.trainer.train.tasks.answers import answers
from muster.words.checkpoint import reference_key

Report = Callable[[str], None]

PROGRESS_SECONDS = 10.0


def compute_reference(
    model: ParallelModel,
    data: RunData,
    micro_batch: int,
    ranks: RankPosition,
    folder: str,
    report: Report,
    alive: Report,
) -> str:
    """Let the model, as it is now, score all pairs of `data`, which carry the result from here on. Collective.

    The result is stored in the job's `folder`; its digest is returned. `alive` is called while it takes its time, and
    `report` with a line of text for people.
    """
    parts = _parts(data)
    values = [_scored(model, part, micro_batch, report, alive) for part in parts]
    content = safetensors.save({part.fingerprint(): value for part, value in zip(parts, values, strict=True)})
    digest = hashlib.sha256(content).hexdigest()
    if ranks.speaks:
        open_store(folder).write(reference_key(digest), memoryview(content))
    _give(parts, dict(zip((part.fingerprint() for part in parts), values, strict=True)))
    return digest


def read_reference(digest: str, data: RunData, folder: str) -> None:
    """Give the pairs of `data` what `compute_reference` stored in the job's `folder` under `digest`.

    Raises StorageError where it is gone or damaged, and UserError where it says nothing of a part of the data.
    """
    key = reference_key(digest)
    try:
        content = open_store(folder).read(key)
    except NotFound:
        raise StorageError(
            f"{folder}/{key} is gone: it holds the log-probabilities that the reference model gave the answers, and "
            "training can't go on without them; put it back, or submit a new job with model.from"
        ) from None
    if hashlib.sha256(content).hexdigest() != digest:
        raise StorageError(f"{folder}/{key} is damaged: its SHA-256 is not its name; put back the file as it was")
    _give(_parts(data), safetensors.load(content))


def _parts(data: RunData) -> list[PairPacking]:
    sets = (data.train, *data.held_out)
    return [part for each in sets for part in each.parts if isinstance(part, PairPacking)]


def _give(parts: Sequence[PairPacking], values: dict[str, Float32s]) -> None:
    for part in parts:
        value = values.get(part.fingerprint())
        if value is None:
            raise UserError(
                "the evaluation's data, or how it is divided, has changed since the job began, and only the weights "
                "that it began with could tell what the reference model says of it; undo the change, or submit a new "
                "job with model.from"
            )
        part.reference = value


@torch.no_grad()
def _scored(model: ParallelModel, part: PairPacking, micro_batch: int, report: Report, alive: Report) -> Float32s:
    """float32 [pairs, 2] in the order of the packing's members. Every rank makes equally many passes."""
    scores = torch.zeros((len(part.members), 2), dtype=torch.float32)
    reported_at = time.monotonic()
    model.model.eval()
    for done, rows in enumerate(_dealt(part.samples, micro_batch)):
        blanks = micro_batch - len(rows)
        batch = TokenBatch.of([part.row(row) for row in [*rows, *[0] * blanks]], unscored=blanks).to(model.device)
        log_probs = answers(model.model, batch).log_probs.cpu()
        for row, of_row in zip(rows, log_probs, strict=False):
            first, last = int(part.edges[row]), int(part.edges[row + 1])
            scores[first:last] = of_row[: last - first]
        if time.monotonic() - reported_at > PROGRESS_SECONDS:
            reported_at = time.monotonic()
            alive("")
            report(f"reference: {done * micro_batch * groups().data.size:,} of {part.samples:,} samples are scored")
    model.model.train()
    others = groups().data  # who compute one share together all have its numbers
    if others.size > 1:
        scores = others.sum(scores.to(model.device))  # each rank's zeros stand where the others have their numbers
    return np.ascontiguousarray(scores.cpu().numpy())


def _dealt(samples: int, micro_batch: int) -> Iterator[list[int]]:
    """The rows of each of this rank's passes."""
    shares = groups().data
    for number in range(math.ceil(samples / (micro_batch * shares.size))):
        first = (number * shares.size + shares.index) * micro_batch
        yield list(range(first, min(first + micro_batch, samples)))
