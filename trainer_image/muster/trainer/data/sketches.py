"""What is noted of documents to compare them with others later: MinHash sketches, and n-grams of the evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import rensa

from muster.trainer.data.rules import EVALUATION_DOCUMENTS_MAX
from muster.trainer.data.shuffle import Int64s
from muster.trainer.data.store import SKETCH_VALUES, Array
from muster.trainer.data.words import Uint64s

SEED: Final = 17
SHINGLES_AT_ONCE: Final = 1 << 20  # 8 MB
ROWS_AT_ONCE: Final = 1 << 14  # 8 MB


class Sketches:
    """Sketches of documents in the order in which they are read, in a file; `finish` puts them into the index's."""

    def __init__(self, folder: Path) -> None:
        self._raw, self._path = folder / "sketches.raw", folder / "sketches.bin"
        self._file: BinaryIO = open(self._raw, "wb")  # noqa: SIM115  closed by finish
        self._waiting: list[Uint64s] = []
        self._count = 0

    def add(self, shingles: Uint64s) -> None:
        """The hashes of a document's n-grams, one at least."""
        self._waiting.append(shingles)
        self._count += len(shingles)
        if self._count >= SHINGLES_AT_ONCE:
            self._write()

    def finish(self, order: Int64s) -> None:
        """Write sketches.bin: row n is of the document that was read as number order[n]."""
        self._write()
        self._file.close()
        rows = np.memmap(self._raw, np.uint32, mode="r").reshape(-1, SKETCH_VALUES)
        with open(self._path, "wb") as file:
            for at in range(0, len(order), ROWS_AT_ONCE):
                file.write(np.ascontiguousarray(rows[order[at : at + ROWS_AT_ONCE]]).data)
        del rows
        self._raw.unlink()

    def _write(self) -> None:
        if self._waiting:
            offsets = np.cumsum([0, *map(len, self._waiting)]).astype(np.uint64)
            matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
                np.concatenate(self._waiting), offsets, SKETCH_VALUES, SEED
            )
            self._file.write(np.array(matrix.to_rows(), np.uint32).data)
        self._waiting, self._count = [], 0


class Grams:
    """The n-grams of an evaluation source, without those that too many documents have. Memory: 8 bytes a word."""

    def __init__(self) -> None:
        self._found: list[Uint64s] = []

    def add(self, grams: Uint64s) -> None:
        """Those of one document, each once."""
        self._found.append(grams)

    def kept(self) -> Array:
        """Ascending."""
        if not self._found:
            return np.zeros(0, np.uint64)
        grams, counts = np.unique(np.concatenate(self._found), return_counts=True)
        return grams[counts <= EVALUATION_DOCUMENTS_MAX]
