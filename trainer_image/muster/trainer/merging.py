"""An adapter added to weights that pass by, a few megabytes at a time; without torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from muster.contract.checkpoint import Commit
from muster.contract.training import Adapter
from muster.trainer.adapter import is_part, parts_of, weight_of
from muster.trainer.checkpoint.store import Store
from muster.trainer.errors import UserError
from muster.trainer.pieces import whole


@dataclass(frozen=True)
class Delta:
    """What is to be added to W [outputs, inputs]: scale × B A. a: [rank, inputs], b: [outputs, rank], both fp32."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float

    def added_to(self, data: memoryview, at: int) -> bytes:
        """fp32 elements of W, from its byte `at` on, and the same with their part of the product added."""
        values, inputs = np.frombuffer(data, "<f4"), self.a.shape[1]
        first = at // 4
        row, end = first // inputs, -(-(first + len(values)) // inputs)
        product = (self.b[row:end] @ self.a).reshape(-1)[first - row * inputs :][: len(values)]
        total: NDArray[np.float32] = values + np.float32(self.scale) * product
        return total.astype("<f4").tobytes()


def deltas(store: Store, commit: Commit, adapter: Adapter) -> dict[str, Delta]:
    """By the name of each weight that the commit has an adapter beside. All of the adapter is in memory from now on."""
    parts = [name for name in commit.tensors if name.startswith("model/") and is_part(name)]
    weights = sorted({weight_of(part) for part in parts})
    if other := [name for name in (*parts, *weights) if commit.tensors[name].dtype != "F32"]:
        raise UserError(f"an adapter is merged in fp32, but the commit has other numbers in: {', '.join(other[:5])}")
    held = whole(store, commit, parts)
    arrays = {name: np.frombuffer(held[name], "<f4").reshape(commit.tensors[name].shape) for name in parts}
    found = {}
    for weight in weights:
        a, b = parts_of(weight)
        found[weight] = Delta(arrays[a], arrays[b], adapter.scale)
    return found
