"""The one kind of batch that the trainer knows: rows of tokens for one forward pass of the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from muster.trainer.data.packing import IGNORED, Float32s, PackedSample


class TokenBatch:
    """Rows of tokens, their labels, positions and documents, each an int64 tensor [B, T] on one device.

    What the numbers mean is said at `packing.Sample`. All four are views of one tensor [4, B, T], which goes to the
    device in one copy. `targets` and `reference` are fp32 [B, D], by the number of the document, where D is the largest
    number of documents of any row; None where the samples have none.
    """

    __slots__ = ("documents", "labels", "positions", "reference", "targets", "tokens", "values")

    def __init__(self, values: Tensor, targets: Tensor | None = None, reference: Tensor | None = None) -> None:
        """A batch over values [4, B, T], which lie in the order of the fields of `PackedSample`."""
        self.values, self.targets, self.reference = values, targets, reference
        self.tokens, self.labels, self.positions, self.documents = values.unbind(0)

    @classmethod
    def of(cls, samples: Sequence[PackedSample], unscored: int = 0, pin: bool = False) -> TokenBatch:
        """Samples of equal length as rows, in memory.

        The last `unscored` rows only fill the batch; none of their labels counts. `pin` puts the batch where the CUDA
        driver copies from without waiting.
        """
        values = np.empty((4, len(samples), len(samples[0].tokens)), np.int64)
        for row, sample in enumerate(samples):
            for field, numbers in enumerate(sample[:4]):
                values[field, row] = numbers
        values[PackedSample._fields.index("labels"), len(samples) - unscored :] = IGNORED
        tensor = torch.from_numpy(values)
        extras = (_beside([s.targets for s in samples]), _beside([s.reference for s in samples]))
        return cls(*(each.pin_memory() if pin and each is not None else each for each in (tensor, *extras)))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> TokenBatch:
        """The same rows on `device`; the copy may still be under way when this returns."""
        extras = (self.targets, self.reference)
        return TokenBatch(
            self.values.to(device, non_blocking=True),
            *(each if each is None else each.to(device, non_blocking=True) for each in extras),
        )


def _beside(rows: Sequence[Float32s | None]) -> Tensor | None:
    """Rows of different lengths as one tensor, filled up with zeros; None where there are none."""
    there = [row for row in rows if row is not None]
    if not there:
        return None
    made = torch.zeros(len(rows), max(map(len, there)))
    for number, row in enumerate(there):
        made[number, : len(row)] = torch.from_numpy(row)
    return made
