"""The one kind of batch that the trainer knows: rows of tokens for one forward pass of the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from muster.trainer.data.packing import IGNORED, Sample


class Batch:
    """Rows of tokens, their labels, positions and documents, each an int64 tensor [B, T] on one device.

    What the numbers mean is said at `packing.Sample`. All four are views of one tensor [4, B, T], which goes to the
    device in one copy.
    """

    __slots__ = ("documents", "labels", "positions", "tokens", "values")

    def __init__(self, values: Tensor) -> None:
        """A batch over values [4, B, T], which lie in the order of the fields of `Sample`."""
        self.values = values
        self.tokens, self.labels, self.positions, self.documents = values.unbind(0)

    @classmethod
    def of(cls, samples: Sequence[Sample], unscored: int = 0, pin: bool = False) -> Batch:
        """Samples of equal length as rows, in memory.

        The last `unscored` rows only fill the batch; none of their labels counts. `pin` puts the batch where the CUDA
        driver copies from without waiting.
        """
        values = np.empty((len(Sample._fields), len(samples), len(samples[0].tokens)), np.int64)
        for row, sample in enumerate(samples):
            for field, numbers in enumerate(sample):
                values[field, row] = numbers
        values[Sample._fields.index("labels"), len(samples) - unscored :] = IGNORED
        tensor = torch.from_numpy(values)
        return cls(tensor.pin_memory() if pin else tensor)

    def to(self, device: torch.device) -> Batch:
        """The same rows on `device`; the copy may still be under way when this returns."""
        return Batch(self.values.to(device, non_blocking=True))
