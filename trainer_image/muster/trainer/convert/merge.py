"""An adapter added to weights that pass by, a few megabytes at a time; without torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from muster.recipe.adapter_config import Adapter
from muster.storage.store import Store
from muster.trainer.convert.pieces import whole
from muster.trainer.convert.transformers_names import weight_places
from muster.trainer.errors import UserError
from muster.trainer.models.adapter import is_part, parts_of, weight_of
from muster.words.checkpoint import Commit

BLOCK_ELEMENTS = 2**18  # of the product at a time: no more memory than that, and it stays in the cache


@dataclass(frozen=True)
class WeightDelta:
    """Change to a weight W [outputs, inputs], which is the product B A; or to experts that are held together, W
    [experts, outputs, inputs], as in models/parameter_lora.py."""

    a: NDArray[np.float32]  # [rank, inputs], or [experts × rank, inputs]
    b: NDArray[np.float32]  # [outputs, rank] or [outputs, rank × experts], times the scale
    # with DoRA, the length that each row of the sum gets, [outputs]; else None
    magnitude: NDArray[np.float32] | None = None
    streams: bool = True  # whether any stretch of W can be merged by itself, for W is fp32 and no row's length counts
    transposed: bool = False  # whether W is [experts, inputs, outputs]

    def merged(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """All of W with what is added to it."""
        if weight.ndim == 3:
            experts = len(weight)
            a = self.a.reshape(experts, -1, self.a.shape[1])
            product = self.b.reshape(len(self.b), -1, experts).transpose(2, 0, 1) @ a
            return weight + (product.swapaxes(1, 2) if self.transposed else product)
        summed: NDArray[np.float32] = weight + self.b @ self.a
        if self.magnitude is not None:
            summed *= (self.magnitude / np.linalg.norm(summed, axis=1))[:, None]
        return summed

    def add_to(self, data: memoryview, at: int) -> None:
        """Add their part of B A to some elements of W. `data` holds the elements as fp32, from byte `at` of W on."""
        values, inputs = np.frombuffer(data, "<f4"), self.a.shape[1]
        first, last = at // 4, at // 4 + len(values)
        rows = max(1, BLOCK_ELEMENTS // inputs)
        for row in range(first // inputs, -(-last // inputs), rows):
            # Not `@`: BLAS would start threads of its own beside those that read; at so small a rank they only wait.
            product = np.einsum("or,ri->oi", self.b[row : row + rows], self.a).reshape(-1)
            begin, end = max(first, row * inputs), min(last, (row + rows) * inputs)
            values[begin - first : end - first] += product[begin - row * inputs : end - row * inputs]


def deltas(store: Store, commit: Commit, adapter: Adapter) -> dict[str, WeightDelta]:
    """Return the change to each weight for which the commit has an adapter, by the weight's name. All of the adapter is
    in memory from now on."""
    parts = [name for name in commit.tensors if name.startswith("model/") and is_part(name)]
    weights = sorted({weight_of(part) for part in parts})
    if other := [name for name in parts if commit.tensors[name].dtype != "F32"]:
        raise UserError(
            f"an adapter is merged in fp32, but these tensors of the checkpoint are not: {', '.join(other[:5])}"
        )
    contents = whole(store, commit, parts)
    arrays = {name: np.frombuffer(contents[name], "<f4").reshape(commit.tensors[name].shape) for name in parts}
    by_weight = {}
    places = weight_places(commit) if adapter.target_parameters else {}
    for weight in weights:
        a, b, m = parts_of(weight)
        entry = commit.tensors.get(weight)  # None: it is held in four bits
        streams = m not in arrays and entry is not None and entry.dtype == "F32" and len(entry.shape) == 2
        transposed = places.get(weight.removeprefix("model/"), False)
        by_weight[weight] = WeightDelta(
            arrays[a], arrays[b] * np.float32(adapter.scale), arrays.get(m), streams, transposed
        )
    return by_weight
