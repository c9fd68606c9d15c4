"""A transformers model of a commit in the words of its files: public names, experts unfused, config.json patched."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from muster.storage.model_folder import CONFIG
from muster.trainer.convert import hugging_face
from muster.trainer.models.scoring import score_head_of
from muster.words.checkpoint import Commit, TensorEntry


@dataclass(frozen=True)
class TensorConversion:
    """Tensors of the commit that become others together (fused experts)."""

    ours: tuple[str, ...]  # our names of the tensors
    shapes: dict[str, tuple[int, ...]]  # of what they become, by the names of transformers
    # from the values of our tensors, as torch tensors, to those that transformers names
    revert: Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class TransformersNames:
    """Names that transformers gives our tensors."""

    direct: dict[str, str]  # their name of each of ours that stays as it is
    conversions: tuple[TensorConversion, ...] = ()  # how the others are made


def is_transformers(commit: Commit) -> bool:
    return commit.architecture.get("kind") == "transformers"


def names(commit: Commit, weights: Mapping[str, TensorEntry]) -> TransformersNames:
    """Return the names of these tensors (without `model/`) in files, by transformers' own reverse conversion."""
    import torch
    from transformers import WeightConverter
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import apply_converters, revert_weight_conversion

    from muster.trainer.models.transformers_model import from_commit

    model: Any = from_commit(commit.architecture, None, f"the checkpoint at step {commit.step}").build(
        torch.float32, "none"
    )
    mapping = [entry.reverse_transform() for entry in get_model_conversion_mapping(model, add_legacy=False)[::-1]]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]

    def revert(values: dict[str, Any]) -> dict[str, Any]:
        reverted: dict[str, Any] = revert_weight_conversion(model, values)
        return reverted

    direct: dict[str, str] = {}
    together: dict[str, list[str]] = {}
    for name in weights:
        renamed, pattern = apply_converters(name, converters)
        if pattern is None:
            (direct[name],) = revert({name: torch.empty(0, device="meta")})
        else:
            together.setdefault(renamed, []).append(name)
    conversions = []
    for group in together.values():
        empty = {name: torch.empty(tuple(weights[name].shape), device="meta") for name in group}
        shapes = {name: tuple(tensor.shape) for name, tensor in revert(empty).items()}
        conversions.append(TensorConversion(tuple(group), shapes, revert))
    return TransformersNames(direct, tuple(conversions))


def weight_places(commit: Commit) -> dict[str, bool]:
    """The model's weights by our names, in the order in which their modules have them, and of each whether its module
    holds experts as [experts, inputs, outputs]. Empty for our own decoder."""
    if not is_transformers(commit):
        return {}
    from muster.trainer.models.parameter_lora import is_transposed
    from muster.trainer.models.pretrained import build
    from muster.trainer.models.transformers_model import from_commit

    model = build(from_commit(commit.architecture, None, f"the checkpoint at step {commit.step}").config)
    return {
        f"{name}.{own}" if name else own: is_transposed(module)
        for name, module in model.named_modules()
        for own, _ in module.named_parameters(recurse=False)
    }


def tied_to(commit: Commit) -> str:
    """Return the name that transformers gives the head's weight where it is the embedding's."""
    if not is_transformers(commit):
        return "lm_head.weight"
    from muster.trainer.models.pretrained import build
    from muster.trainer.models.transformers_model import from_commit

    keys: dict[str, str] = build(
        from_commit(commit.architecture, None, f"the checkpoint at step {commit.step}").config
    ).all_tied_weights_keys
    return next(iter(keys))


def config(commit: Commit, dtype: str) -> dict[str, Any]:
    """The source's config.json with the dtype of what was written, with the head where that was exchanged for one that
    scores texts, and nothing else changed.

    A file that transformers writes anew has keys that older readers pass over in silence. `dtype` is spelled as torch
    spells it.
    """
    document: dict[str, Any] = json.loads(commit.architecture["companions"][CONFIG])
    scores = score_head_of(commit.architecture)
    if scores is not None:
        from muster.trainer.models.transformers_model import from_commit

        model = from_commit(commit.architecture, None, f"the checkpoint at step {commit.step}")
        document |= hugging_face.scoring(scores, model.class_name)
    present = [key for key in ("dtype", "torch_dtype") if key in document]
    return document | dict.fromkeys(present or ["dtype"], dtype)


def companions(commit: Commit) -> dict[str, str]:
    """The source's other small files, byte for byte."""
    return {name: text for name, text in commit.architecture["companions"].items() if name != CONFIG}
