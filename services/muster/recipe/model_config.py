"""Source of the model: a preset, a shape, a checkpoint or a model's folder."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from muster.recipe.architecture import PRESETS, Architecture
from muster.words.base import Spec
from muster.words.fields import Text
from muster.words.model_sources import FromCommit, ModelAddress


class ModelConfig(Spec):
    """Model to train: exactly one of a preset, a shape, a checkpoint to start from, or a model's folder."""

    preset: Text | None = None
    """The name of a decoder's shape that Muster knows, such as muster-60m."""
    architecture: Architecture | None = None
    """The shape of a decoder of your own."""
    from_: FromCommit | None = Field(default=None, alias="from")
    """The checkpoint whose weights the job starts from."""
    source: ModelAddress | None = None
    """The address of a folder as Hugging Face writes it (config.json, safetensors, tokenizer.json): s3://, file://,
    https:// or hf://organisation/name@revision. The job has its weights, tokenizer and chat marks.
    """

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        kinds = {"preset": self.preset, "architecture": self.architecture, "from": self.from_, "source": self.source}
        given = [name for name, value in kinds.items() if value]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(kinds)} (given: {', '.join(given) or 'none'})")
        if self.preset and self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}; there are {', '.join(PRESETS)}")
        return self

    @property
    def shape(self) -> Architecture | None:
        """Our own decoder's shape; None when the model comes from a commit or a folder."""
        return PRESETS[self.preset] if self.preset else self.architecture
