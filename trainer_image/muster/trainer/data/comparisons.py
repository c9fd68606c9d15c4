"""Preparation of preferences, from a store to rows of pairs: they are cut, examined and packed, and pairs that are
lost on the way are reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from muster.recipe.data_config import Source
from muster.recipe.training import TrainingConfig
from muster.trainer.data.packing import LostDocuments, PackedSource, SamplePacking
from muster.trainer.data.pairs import PairPacking, alike, stretches_of, truncated, unlike_prompts
from muster.trainer.data.store import DocumentRange
from muster.trainer.errors import UserError
from muster.words.text import counted

Report = Callable[[str], None]


def packed_pairs(
    config: TrainingConfig, source: Source, documents: DocumentRange, pad: int, stream: int, report: Report
) -> PackedSource:
    """The rows of a source, and what is left out. Raises UserError for pairs that are too long where data.truncation is
    error, and for a single answer alone, which has no other to be measured by.
    """
    name, length, how = source.source, config.data.sequence_length, config.data.truncation
    meta = documents.store.meta
    if meta.compares == "labels" and len(documents) < 2:
        raise UserError(f"data source {name}: task kto measures each answer by another one, and there is only one")
    for words, count in meta.left_out.items():
        report(f"data: {name}: {counted(count, f'lines are left out: {words}')}")
    whole, unlike = stretches_of(documents), np.zeros(len(documents), np.bool_)
    if meta.compares == "pairs":
        unlike = unlike_prompts(documents)
    cut, usable, long = truncated(whole, length, how)
    if how == "error" and long.any():
        most = f"(the longest has {int(whole.sizes.sum(1).max()):,})"
        words = f"pairs are longer than {length} tokens, both sides together {most}, and data.truncation is error"
        raise UserError(
            f"data source {name}: {counted(int(long.sum()), words)}; raise data.sequenceLength, or choose right, left "
            "or drop"
        )
    equal = alike(cut, documents, long & usable) if meta.compares == "pairs" else np.zeros(len(cut), np.bool_)
    why = "they are longer" if how == "drop" else f"nothing of an answer is left once they are cut on the {how}"
    lost = (
        LostDocuments("the template writes their prompt in two ways", np.flatnonzero(unlike)),
        LostDocuments(f"there are {length} tokens for both sides, and {why}", np.flatnonzero(~usable)),
        LostDocuments("their sides are equal once they are cut", np.flatnonzero(equal)),
    )
    for each in lost:
        if len(each.documents):
            report(f"data: {name}: {counted(len(each.documents), f'pairs are left out: {each.reason}')}")
    if cuts := int((long & usable & ~equal).sum()):
        report(
            f"data: {name}: "
            + counted(cuts, f"pairs are longer than {length} tokens for both sides and are cut on the {how}")
        )
    kept = cut.those(usable & ~equal & ~unlike)
    rows = PairPacking(documents, kept, config.data.packing, length, pad, config.seed, stream) if len(kept) else None
    return PackedSource(documents, rows, cuts, tuple(each for each in lost if len(each.documents)))


def must_have_both_labels(parts: Iterable[SamplePacking]) -> None:
    """Raises UserError where single answers are all good or all bad: nothing could be told apart."""
    labelled = [part for part in parts if isinstance(part, PairPacking) and part.has_labels]
    labels = {float(label) for part in labelled for label in np.unique(part.labels)}
    if len(labels) == 1:
        which = "true" if labels == {1.0} else "false"
        raise UserError(
            f"training data: every label is {which}, so that good and bad answers can't be told apart; add answers "
            "with the other label, or train the good ones with task sft"
        )
