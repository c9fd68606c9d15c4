"""The map of base models that clients of OpenAI's API may name: a document in YAML or JSON."""

from __future__ import annotations

import re
from typing import Any, Final

from muster.words.base import Spec
from muster.words.fields import Text

# No colon: a fine-tuned model is called ft:<base>:<project>:<suffix>:<job>.
MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
MODEL_NAME_WORDS: Final = "a model's name has letters, digits, `.`, `_`, `-` and `/`, and at most 128 characters"


class MappedModel(Spec):
    """Spec of the jobs that start from this model, without their data, their length and the settings of the request."""

    spec: dict[str, Any]
    """A TrainingJob's spec: training.model, and all that this model needs (gang, adapter, precision, lengths)."""
    owned_by: Text = "muster"
    """Owner that `GET /v1/models` names."""


class ModelMapFile(Spec):
    """A file of base models, by their names."""

    models: dict[str, MappedModel]
