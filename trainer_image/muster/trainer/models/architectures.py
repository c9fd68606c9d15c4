"""Models that `transformers` can train from a config.json, and the reasons for which others are refused. Imports
transformers lazily."""

from __future__ import annotations

import copy
import difflib
from typing import Any

from muster.trainer.errors import UserError
from muster.trainer.models.scoring import ScoreHead

# Layers that look at earlier tokens by attention alone, so that a mask can keep documents apart. State-space and
# linear-attention layers carry a state over, too faintly for a short test to see in every family (LFM2: 7e-5).
MASKED_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

_FLOAT, _FLOATS = "__float__", ("Infinity", "-Infinity", "NaN")


def trainable_config(document: dict[str, Any], where: str, scoring: bool = False) -> Any:
    """The PretrainedConfig of a causal language model, made of its config.json. `where` names the folder in messages.
    `scoring` takes one whose head scores texts, too. Raises UserError for any other model.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = document.get("model_type")
    if not isinstance(kind, str):
        raise UserError(f"model.source {where}: its config.json has no model_type; copy it again")
    if kind not in CONFIG_MAPPING_NAMES:
        near = difflib.get_close_matches(kind, list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), 1, 0.5)
        nearest = f"; the nearest it knows is {near[0]}" if near else ""
        code = (
            f" The folder brings code of its own ({', '.join(sorted(map(str, document['auto_map'].values())))}), "
            "which Muster never runs."
            if isinstance(document.get("auto_map"), dict)
            else ""
        )
        raise UserError(
            f"model.source {where}: transformers {transformers.__version__} knows no architecture {kind!r}{nearest}."
            f"{code} Take a model that transformers knows, or a Muster with a newer transformers"
        )
    if parts := [name for name in ("vision_config", "audio_config") if document.get(name)]:
        raise UserError(
            f"model.source {where}: a {kind} sees or hears ({', '.join(parts)}); Muster trains language models. Take "
            "the text-only variant, where there is one"
        )
    if (
        document.get("is_encoder_decoder")
        or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        or _is_encoder(document, scoring)
    ):
        raise UserError(
            f"model.source {where}: a {kind} ({', '.join(document.get('architectures') or ['no architecture named'])}) "
            "is no causal language model; Muster trains models that predict the next token. Take one whose config.json "
            "names a class …ForCausalLM"
        )
    return _parsed(document, kind, where)


def _is_encoder(document: dict[str, Any], scoring: bool) -> bool:
    """Some encoders have a causal head in transformers (BertLMHeadModel), which their weights were not made for."""
    if scoring and (document.get("architectures") or [""])[0] == _scoring_class(document["model_type"]):
        return False
    names = [str(name) for name in document.get("architectures") or ()]
    return bool(names) and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def _scoring_class(kind: str) -> str | None:
    """The class that puts a head that scores texts on a causal language model, as transformers does it in general; None
    where the family has none."""
    from transformers import AutoConfig
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES

    scoring: Any = CLASSES.get(type(AutoConfig.for_model(kind)), None)
    return scoring.__name__ if scoring is not None and issubclass(scoring, GenericForSequenceClassification) else None


def scoring_config(config: Any, scores: ScoreHead, where: str) -> Any:
    """The same model's configuration with a head that scores texts. Raises UserError for families without one."""
    if _scoring_class(config.model_type) is None:
        raise UserError(
            f"{where}: transformers has no class that scores texts for a {config.model_type}; take a model of another "
            "family"
        )
    scored = copy.deepcopy(config)
    scored.num_labels, scored.pad_token_id = scores.count, scores.pad
    return scored


def _parsed(document: dict[str, Any], kind: str, where: str) -> Any:
    from transformers import AutoConfig

    clean = {key: _with_floats(value) for key, value in document.items() if key not in ("model_type", "auto_map")}
    try:
        return AutoConfig.for_model(kind, **clean)
    except Exception as error:  # the library raises many kinds
        raise UserError(f"model.source {where}: transformers refuses its config.json: {error}") from None


def _with_floats(value: Any) -> Any:
    """A value of a config.json with the floats that JSON does not know, which transformers 5 writes as
    `{"__float__": "Infinity"}`."""
    if isinstance(value, dict):
        if value.keys() == {_FLOAT} and value[_FLOAT] in _FLOATS:
            return float(value[_FLOAT])
        return {key: _with_floats(each) for key, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def layer_types_allow_packing(config: Any) -> bool:
    types = getattr(config, "layer_types", None)
    return types is None or set(types) <= MASKED_LAYERS
