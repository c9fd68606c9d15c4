"""A head that gives a text its scores, in the place of the one that predicts tokens: what a reward model has.

A text is scored at its last token that is not the padding token, as transformers' ForSequenceClassification classes do
it; so an exported model gives the same scores there. Where the padding token is the one that ends documents, that is
the token before it. Without torch, for exporting needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from muster.recipe.adapter_config import SCORE
from muster.trainer.errors import UserError

WEIGHT: Final = f"{SCORE}.weight"


@dataclass(frozen=True)
class ScoreHead:
    """Head that gives each text `count` scores, at its last token that is not the padding token."""

    count: int
    pad: int  # the id of the padding token

    def describe(self) -> dict[str, Any]:
        """The head as Commit.architecture holds it."""
        return {"scores": {"count": self.count, "pad": self.pad}}


def score_head_of(architecture: Mapping[str, Any]) -> ScoreHead | None:
    """Return the head that `describe` wrote into a Commit.architecture; None for a model that predicts tokens."""
    scores = architecture.get("scores")
    return None if scores is None else ScoreHead(int(scores["count"]), int(scores["pad"]))


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
