"""The files of a token store while it is written, and how far they are: a killed preparation is gone on with.

    <cache>/tokens/.building-<name>-<key>/tokens.bin, scored.bin, columns.bin   as in store.py
                                          rows.raw       encode.ROW per document, in the order in which they are read
                                          sketches.raw   the MinHash of each, likewise
                                          grams.raw      the n-grams of one document after the other
                                          progress.json  the sizes of these, and what they hold of the input

Files only grow; what lies behind the sizes of the last progress.json is cut off when they are opened again.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np

from muster.trainer.data.documents import LeftOut
from muster.trainer.data.encode import ROW, EncodedDocuments, EncodingWork
from muster.trainer.data.store import META, SKETCH_VALUES, Array, TokenStore, sync

PROGRESS: Final = "progress.json"
KEPT: Final = ("tokens.bin", "scored.bin", "columns.bin")  # which the store has too
RAW: Final = ("rows.raw", "sketches.raw", "grams.raw")


class InputPosition(NamedTuple):
    """Position in the input: all files before number `file` were read, and `units` of that one."""

    file: int = 0
    units: int = 0


START: Final = InputPosition()


@dataclass
class DraftProgress:
    """Progress of writing a store. It is the same however often the preparation was interrupted."""

    position: InputPosition = START
    tokens: int = 0
    open: int = 0  # of these, tokens of a text that goes on
    documents: int = 0
    learnt: int = 0  # tokens in the loss
    kinds: Counter[str] = field(default_factory=Counter)
    left_out: LeftOut = field(default_factory=LeftOut)

    def document(self) -> dict[str, Any]:
        return vars(self) | {"left_out": vars(self.left_out)}

    @staticmethod
    def parse(given: dict[str, Any]) -> DraftProgress:
        """Raises TypeError and KeyError for what `document` did not make."""
        parsed = {"position": InputPosition(*given["position"]), "kinds": Counter(given["kinds"])}
        return DraftProgress(**given | parsed | {"left_out": LeftOut(**given["left_out"])})


class StoreDraft:
    """The growing files of one store. A context manager that closes them."""

    def __init__(self, folder: Path, work: EncodingWork) -> None:
        """Opens what there is in the folder, as far as it was kept. Raises OSError."""
        self.folder, self.dtype, self.scored = folder, work.dtype, work.scored
        folder.mkdir(exist_ok=True)
        sizes, self.progress = _kept(folder)
        self._closing = ExitStack()
        self._files: dict[str, BinaryIO] = {}
        for name in (*KEPT, *RAW):
            file = self._closing.enter_context((folder / name).open("ab"))
            file.truncate(sizes.get(name, 0))
            self._files[name] = file

    def __enter__(self) -> StoreDraft:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def add_tokens(self, ids: Array) -> None:
        """Write tokens of a text that may go on. Raises OSError."""
        self._files["tokens.bin"].write(ids.data)
        self.progress.tokens += len(ids)
        self.progress.open += len(ids)

    def add(self, encoded: EncodedDocuments) -> None:
        """The next documents. Raises OSError."""
        data = {"tokens.bin": encoded.ids, "scored.bin": encoded.loss_mask, "rows.raw": encoded.rows}
        data |= {"sketches.raw": encoded.sketches, "grams.raw": encoded.grams}
        for name, array in data.items():
            self._files[name].write(np.ascontiguousarray(array).data)
        self._files["columns.bin"].write(encoded.columns)
        progress = self.progress
        progress.tokens += len(encoded.ids)
        progress.documents += len(encoded.rows)
        progress.learnt += int(encoded.loss_mask.sum(dtype=np.int64) if self.scored else encoded.rows["tokens"].sum())
        progress.kinds += encoded.kinds
        progress.left_out.merge(encoded.left_out)

    def forget_open(self) -> None:
        """Take back the tokens of the text that goes on."""
        progress = self.progress
        progress.tokens, progress.open = progress.tokens - progress.open, 0
        self._files["tokens.bin"].truncate(progress.tokens * self.dtype.itemsize)

    def keep(self) -> None:
        """Save the progress, so that a new preparation resumes from here, also after a power cut."""
        self.flush()
        sizes = {name: os.fstat(file.fileno()).st_size for name, file in self._files.items()}
        for file in self._files.values():
            os.fsync(file.fileno())
        beside = self.folder / f"{PROGRESS}.new"
        beside.write_text(json.dumps({"sizes": sizes, **self.progress.document()}))
        sync(beside)
        beside.replace(self.folder / PROGRESS)

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def read(self, name: str, dtype: np.dtype[np.void] | type[np.generic]) -> Array:
        """All that was appended, as one array over the file."""
        empty = not (self.folder / name).stat().st_size
        return np.zeros(0, dtype) if empty else np.memmap(self.folder / name, dtype, mode="r")

    def sketches(self) -> Array:
        """uint32 [documents, SKETCH_VALUES]."""
        return self.read("sketches.raw", np.uint32).reshape(-1, SKETCH_VALUES)


def clean(folder: Path, store: TokenStore) -> None:
    """Remove what the store does not have, once it is whole: until then a killed preparation needs all of it."""
    needed = {META, *store.meta.sizes()}
    for path in folder.iterdir():
        if path.name not in needed:
            path.unlink()


def _kept(folder: Path) -> tuple[Mapping[str, int], DraftProgress]:
    """The sizes of the files as they were last kept, and what they held; nothing where they are not whole."""
    try:
        document = json.loads((folder / PROGRESS).read_text())
        sizes: dict[str, int] = document.pop("sizes")
        whole = all((folder / name).stat().st_size >= size for name, size in sizes.items())
        progress = DraftProgress.parse(document)
        rows = sizes["rows.raw"] == progress.documents * ROW.itemsize
    except (OSError, ValueError, TypeError, KeyError):
        return {}, DraftProgress()
    return (sizes, progress) if whole and rows else ({}, DraftProgress())
