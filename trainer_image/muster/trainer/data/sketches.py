"""Sketches of documents for comparing them with others later: MinHash sketches, and n-grams of the evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import rensa

from muster.trainer.data.rules import EVALUATION_DOCUMENTS_MAX
from muster.trainer.data.store import SKETCH_VALUES, Array
from muster.trainer.data.words import Uint64s

SEED: Final = 17


def sketches_of(shingles: Sequence[Uint64s]) -> Array:
    """uint32 [documents, SKETCH_VALUES]: a row for the hashes of each document's n-grams, of which there is one at
    least. No row depends on another."""
    if not shingles:
        return np.zeros((0, SKETCH_VALUES), np.uint32)
    offsets = np.cumsum([0, *map(len, shingles)]).astype(np.uint64)
    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(shingles), offsets, SKETCH_VALUES, SEED)
    return np.array(matrix.to_rows(), np.uint32)


def without_boilerplate(grams: Uint64s) -> Uint64s:
    """Each n-gram once, ascending, but those that too many documents have. `grams` are those of one document after the
    other, each of its own once."""
    distinct, counts = np.unique(grams, return_counts=True)
    return distinct[counts <= EVALUATION_DOCUMENTS_MAX]
