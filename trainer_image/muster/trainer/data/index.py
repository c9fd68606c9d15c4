"""The index of a store that is being written: what was noted of its documents, in the order of their hashes."""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple

import numpy as np

from muster.trainer.data.draft import StoreDraft
from muster.trainer.data.encode import ROW, EncodingWork
from muster.trainer.data.shuffle import Int64s
from muster.trainer.data.sketches import without_boilerplate
from muster.trainer.data.store import Array

ROWS_AT_ONCE = 1 << 14  # sketches: 8 MB


class IndexFacts(NamedTuple):
    """Facts about an index that meta.json holds."""

    contents: str
    compares: Literal["", "pairs", "labels"]
    grams: int | None
    columns: int | None


def write_index(draft: StoreDraft, work: EncodingWork) -> IndexFacts:
    """Write all files of the store that are in index order, one after the other: in memory are the order and the one
    that is written. Raises OSError."""
    draft.flush()
    rows = draft.read("rows.raw", ROW)
    order = np.argsort(rows["hash"], kind="stable")
    hashes = rows["hash"][order]
    contents = hashlib.sha256(hashes.data).hexdigest()
    _write(draft, "hashes", hashes)
    del hashes
    _write(draft, "starts", _begins(rows["tokens"])[order])
    bounds = np.zeros(len(order) + 1, np.int64)
    np.cumsum(rows["tokens"][order], out=bounds[1:])
    _write(draft, "bounds", bounds)
    del bounds
    compares: Literal["", "pairs", "labels"] = ""
    if work.scored:
        _write(draft, "firsts", rows["first"][order])
    if work.compares:
        compares = "pairs" if work.source.format == "preference" else "labels"
        _write(draft, "values", rows["value"][order])
    if compares == "pairs":
        _write(draft, "splits", rows["split"][order])
    if work.rules.shingle_words:
        _write_sketches(draft, order)
    return IndexFacts(contents, compares, _write_grams(draft, work), _write_spans(draft, work, rows, order))


def _write(draft: StoreDraft, name: str, values: Array) -> None:
    values.tofile(draft.folder / f"{name}.bin")


def _begins(sizes: Array) -> Int64s:
    begins = np.zeros(len(sizes), np.int64)
    np.cumsum(sizes[:-1], out=begins[1:])
    return begins


def _write_sketches(draft: StoreDraft, order: Int64s) -> None:
    sketches = draft.sketches()
    with open(draft.folder / "sketches.bin", "wb") as file:
        for at in range(0, len(order), ROWS_AT_ONCE):
            file.write(np.ascontiguousarray(sketches[order[at : at + ROWS_AT_ONCE]]).data)


def _write_grams(draft: StoreDraft, work: EncodingWork) -> int | None:
    """Write the n-grams, and return their number; None where the rules collect none."""
    if not work.rules.collect:
        return None
    grams = without_boilerplate(draft.read("grams.raw", np.uint64))
    _write(draft, "grams", grams)
    return len(grams)


def _write_spans(draft: StoreDraft, work: EncodingWork, rows: Array, order: Int64s) -> int | None:
    """Bytes of what verifiers read; None where there are none."""
    if work.references is None:
        return None
    begins = _begins(rows["columns"])
    _write(draft, "spans", np.stack((begins, begins + rows["columns"]), 1)[order])
    return (draft.folder / "columns.bin").stat().st_size
