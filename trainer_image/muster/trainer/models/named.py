"""Parameters of a model that the patterns of a setting match, and those of them that stay frozen."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from muster.recipe.parameter_names import any_matches, matches
from muster.trainer.errors import UserError


def names_of(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """All names of each parameter: several where modules share it, or where files call it otherwise than modules do
    (gpt-neox' head is `embed_out` in a folder and `lm_head` in transformers)."""
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    in_files = _name_in_files(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter] = tuple(dict.fromkeys((*names.get(parameter, ()), name, in_files(name))))
    return names


def _name_in_files(model: nn.Module) -> Callable[[str], str]:
    """The name that a folder's files have for a module's weight, as far as it is only renamed."""
    if not hasattr(model, "all_tied_weights_keys"):
        return lambda name: name  # our own decoder
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_renamings

    model_: Any = model
    mapping = get_model_conversion_mapping(model_, add_legacy=False)[::-1]
    renamings: Any = [entry.reverse_transform() for entry in mapping if isinstance(entry, WeightRenaming)]
    return lambda name: apply_renamings(name, renamings)


def named_by(model: nn.Module, patterns: Sequence[str], path: str) -> dict[nn.Parameter, str]:
    """The parameters that the patterns mean, with a name of each. `path` is the setting's, for messages.

    Raises UserError for a pattern that means none.
    """
    names = names_of(model)
    every = [name for each in names.values() for name in each]
    for pattern in patterns:
        if not any(matches(pattern, name) for name in every):
            raise UserError(f"{path}: {pattern!r} matches no weight of this model; {_near_to(pattern, every)}")
    return {parameter: each[0] for parameter, each in names.items() if any_matches(patterns, each)}


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Mark the parameters that the patterns mean as not trained. To be called before the model is sharded. Raises
    UserError for a pattern that means none, and where nothing would be left to train."""
    for parameter in named_by(model, patterns, "freeze"):
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"freeze: {', '.join(patterns)} match all weights of this model, so nothing would be trained")


def near(asked: str, there: Sequence[str]) -> str:
    """List the names that exist, and suggest those that the user may have meant."""
    matches = difflib.get_close_matches(asked.rpartition(".")[2], there, 3, 0.4)
    hint = f"did you mean {' or '.join(matches)}? " if matches else ""
    return f"{hint}There are {', '.join(there)}"


def _near_to(pattern: str, names: Sequence[str]) -> str:
    """The names that come near the first part of the pattern that no name has."""
    parts = {part for name in names for part in name.split(".")}
    strange = [each for each in pattern.split(".") if not any(matches(each, part) for part in parts)]
    words = sorted(part for part in parts if not part.isdecimal())
    if not strange:
        return f"its parts stand in no name in this order; names are such as {names[0]} and {names[-1]}"
    return near(strange[0], words)
