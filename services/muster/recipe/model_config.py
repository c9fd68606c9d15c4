"""Source of the model: a preset, a shape, a checkpoint or a model's folder."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from muster.recipe.architecture import PRESETS, Architecture
from muster.words.fields import Text
from muster.words.model_sources import FromCommit, ModelAddress
from muster.words.rules import DocumentRule, RuledSpec

_KINDS = {"preset": "preset", "architecture": "architecture", "from": "from_", "source": "source"}


def _one_kind(it: ModelConfig) -> str | None:
    given = [name for name, field in _KINDS.items() if getattr(it, field)]
    return None if len(given) == 1 else f"give exactly one of {', '.join(_KINDS)} (given: {', '.join(given) or 'none'})"


class ModelConfig(RuledSpec):
    """Model to train: exactly one of a preset, a shape, a checkpoint to start from, or a model's folder."""

    rules = (
        DocumentRule[Any](
            f"give exactly one of {', '.join(_KINDS)}",
            _one_kind,
            f"[{', '.join(f'has(self.{name})' for name in _KINDS)}].filter(x, x).size() == 1",
        ),
        DocumentRule[Any](
            f"unknown preset; there are {', '.join(PRESETS)}",
            lambda it: (
                it.preset
                and it.preset not in PRESETS
                and f"unknown preset {it.preset!r}; there are {', '.join(PRESETS)}"
            ),
            f"!has(self.preset) || self.preset in {json.dumps(sorted(PRESETS))}",
        ),
    )

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

    @property
    def shape(self) -> Architecture | None:
        """Our own decoder's shape; None when the model comes from a commit or a folder."""
        return PRESETS[self.preset] if self.preset else self.architecture
