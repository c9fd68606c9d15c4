"""Truncation of documents that are longer than a sample, where samples hold whole documents."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from muster.recipe.data_config import Truncation
from muster.trainer.data.packing import LostDocuments
from muster.trainer.data.shuffle import Int64s
from muster.trainer.data.store import DocumentRange
from muster.trainer.errors import UserError
from muster.words.text import counted


class TruncatedDocuments(NamedTuple):
    """The documents that are left, by their number; the first token of each of all documents that a sample begins with;
    how many of them are cut; and those that are not left, and why."""

    usable: Int64s
    begins: Int64s
    truncated: int
    lost: tuple[LostDocuments, ...]


def cut_documents(
    documents: DocumentRange, length: int, how: Truncation, scored: bool, name: str
) -> TruncatedDocuments:
    """Documents that fit into `length` tokens, the last label beside them. `scored` says that only some of their tokens
    are learnt: what has none of those left is lost. `name` is the source's, for messages. Raises UserError for too long
    ones where `how` is error.
    """
    sizes = np.diff(documents.bounds)
    long = sizes > length + 1  # the last token of a document that is one longer than a sample is still a label
    begins = np.zeros(len(sizes), np.int64)
    if how == "error" and long.any():
        most = f"(the longest has {int(sizes.max()):,})"
        words = f"documents are longer than {length} tokens {most}, and data.truncation is error"
        raise UserError(
            f"data source {name}: {counted(int(long.sum()), words)}; raise data.sequenceLength, or choose right, left "
            "or drop"
        )
    silent = np.zeros(len(sizes), np.bool_)
    if how == "left":
        begins = np.maximum(sizes - length - 1, 0)
        if scored:
            silent[long] = [not _speaks(documents, int(number), int(begins[number])) for number in np.flatnonzero(long)]
    elif scored:
        silent = documents.firsts > length
    dropped = long if how == "drop" else np.zeros(len(sizes), np.bool_)
    silent &= ~dropped
    where = "last" if how == "left" else "first"
    lost = (
        LostDocuments(f"the assistant does not speak within their {where} {length} tokens", np.flatnonzero(silent)),
        LostDocuments(f"they are longer than {length} tokens", np.flatnonzero(dropped)),
    )
    usable = ~silent & ~dropped
    return TruncatedDocuments(
        np.flatnonzero(usable), begins, int((long & usable).sum()), tuple(each for each in lost if len(each.documents))
    )


def _speaks(documents: DocumentRange, number: int, begin: int) -> bool:
    """Return whether any token after token `begin` is learnt."""
    store = documents.store
    assert store.loss_mask is not None, "a store of conversations says what is learnt"
    start = int(store.starts[documents.first + number])
    size = int(documents.bounds[number + 1] - documents.bounds[number])
    return bool(store.loss_mask[start + begin + 1 : start + size].any())
