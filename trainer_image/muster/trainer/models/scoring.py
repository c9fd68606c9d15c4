"""A head that gives a text its scores, in the place of the one that predicts tokens: what a reward model has.

A text is scored at its last token that is not the padding token, as transformers' ForSequenceClassification classes do
it; so an exported model gives the same scores there. Where the padding token is the one that ends documents, that is
the token before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from muster.contract.adapter_config import SCORE
from muster.trainer.errors import UserError

WEIGHT: Final = f"{SCORE}.weight"


@dataclass(frozen=True)
class ScoreHead:
    """How many scores a text gets, and where."""

    count: int
    pad: int  # the id of the padding token

    def describe(self) -> dict[str, Any]:
        """For Commit.architecture."""
        return {"scores": {"count": self.count, "pad": self.pad}}


def score_head_of(architecture: Mapping[str, Any]) -> ScoreHead | None:
    """What `describe` wrote into a Commit.architecture; None for a model that predicts tokens."""
    found = architecture.get("scores")
    return None if found is None else ScoreHead(int(found["count"]), int(found["pad"]))


def chosen_head(asked: ScoreHead | None, own: ScoreHead | None, where: str) -> ScoreHead | None:
    """The head of a job that starts from a model with the head `own`. `where` names that model in messages.

    Raises UserError where the model has a head that the job can't use; a head that it lacks begins anew.
    """
    if own is None:
        return asked
    if asked is None:
        raise UserError(
            f"{where} scores texts and has no head that predicts tokens; start from the model that it was trained from"
        )
    if asked.count != own.count:
        raise UserError(
            f"{where} gives a text {own.count} scores, and this task needs {asked.count}; start from another"
        )
    return own


def document_scores(scores: Tensor, tokens: Tensor, documents: Tensor, pad: int) -> Tensor:
    """The scores of whole documents, of those at each token.

    The shapes are scores [B, T, N], tokens and documents [B, T]. Returns [B, T, N], where [b, d] are the scores of the
    document d of row b, as far as there is one.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    counted = (documents >= 0) & (tokens != pad)
    last = torch.zeros_like(tokens).scatter_reduce(1, documents.clamp_min(0), places * counted, "amax")
    return scores.gather(1, last[..., None].expand(-1, -1, scores.shape[-1]))
