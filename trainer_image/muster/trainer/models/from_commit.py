"""The model that a commit holds."""

from __future__ import annotations

from pydantic import ValidationError

from muster.recipe.adapter_config import Adapter
from muster.recipe.architecture import Architecture
from muster.trainer.errors import UserError
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.models.definition import ModelDefinition
from muster.trainer.models.scoring import ScoreHead, score_head_of
from muster.words.checkpoint import Commit


def definition_of(
    commit: Commit, folder: str, adapter: Adapter | None, scores: ScoreHead | None = None
) -> ModelDefinition:
    """The model of a commit in `folder`, with an adapter to be trained beside it, and with the head `scores` in place
    of one that predicts tokens. Raises UserError for one that is unknown here."""
    where = f"the checkpoint at step {commit.step} in {folder}"
    if commit.architecture.get("kind") == "transformers":
        from muster.trainer.models.transformers_model import from_commit

        return from_commit(commit.architecture, adapter, where, scores)
    try:
        shape = {key: value for key, value in commit.architecture.items() if key != "scores"}
        return DecoderModel(Architecture.model_validate(shape), adapter, score_head_of(commit.architecture) or scores)
    except ValidationError as error:
        raise UserError(f"{where} has a model shape unknown here: {error}") from None
