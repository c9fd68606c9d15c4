"""Names of an adapter's tensors in a commit. It works on names alone, because exporting needs no torch.

A weight `<module>.weight` has `<module>.lora_A.weight` [rank, inputs], `<module>.lora_B.weight` [outputs, rank] and,
for DoRA, `<module>.lora_magnitude_vector` [outputs]. Experts that are held together as `<module>.<name>` have
`<module>.lora_A.<name>` [experts × rank, inputs] and `<module>.lora_B.<name>` [outputs, rank × experts], as in `peft`.
"""

from __future__ import annotations

import re

from pydantic import ValidationError

from muster.recipe.adapter_config import Adapter
from muster.trainer.errors import UserError
from muster.words.checkpoint import Commit

_PART = re.compile(r"(.+)\.lora_(?:[AB]\.(\w+)|magnitude_vector)")


def is_part(name: str) -> bool:
    """Return whether a tensor belongs to an adapter, and not to the decoder under it."""
    return _PART.fullmatch(name) is not None


def weight_of(part: str) -> str:
    """The weight that an adapter's tensor stands beside."""
    match = _PART.fullmatch(part)
    assert match is not None, f"{part} is no adapter's"
    return f"{match[1]}.{match[2] or 'weight'}"


def parts_of(weight: str) -> tuple[str, str, str]:
    """The names that A, B and (with DoRA) the magnitudes beside a weight have."""
    module, _, own = weight.rpartition(".")
    return f"{module}.lora_A.{own}", f"{module}.lora_B.{own}", f"{module}.lora_magnitude_vector"


def adapter_of(commit: Commit) -> Adapter | None:
    """The adapter that a commit holds beside its weights; None where the whole model was trained. Raises UserError for
    one that a newer Muster wrote."""
    document = commit.config.get("adapter")
    if document is None:
        return None
    try:
        adapter = Adapter.model_validate(document)
        return adapter if "scores" not in commit.architecture else adapter.with_score_head()
    except ValidationError:
        raise UserError(
            f"the checkpoint at step {commit.step} of job {commit.job!r} has an adapter unknown here ({document}); "
            "use the Muster that wrote it"
        ) from None
