"""A decoder in the words of Hugging Face's `transformers`: names of weights, config.json, the split into files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from muster.recipe.architecture import END_OF_DOCUMENT, Architecture
from muster.trainer.errors import UserError
from muster.trainer.models.scoring import ScoreHead, score_head_of
from muster.words.checkpoint import Commit

FILE_BYTES_MAX = 5 * 10**9  # as transformers splits by default

INTEGERS = frozenset({"I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"})
_OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "score.weight": "score.weight",
}
_INSIDE = {
    "attention_norm.weight": "input_layernorm.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
    **{f"attention.{part}_proj.weight": f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"feed_forward.{part}_proj.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def names(ours: Mapping[str, str]) -> dict[str, str]:
    """`transformers`' name of each of our tensors, given by name and dtype. Raises UserError naming all that have none.

    A buffer of integers (a counter, a mask) is no weight of a Llama: it keeps its name, and `transformers` passes it
    over.
    """
    renamed, unknown = {}, []
    for name, dtype in ours.items():
        layer = _LAYER.fullmatch(name)
        theirs = _INSIDE.get(layer[2]) if layer else _OUTSIDE.get(name)
        if theirs is not None:
            renamed[name] = f"model.layers.{layer[1]}.{theirs}" if layer else theirs
        elif dtype in INTEGERS:
            renamed[name] = name
        else:
            unknown.append(name)
    if unknown:
        raise UserError(f"no name in a Hugging Face Llama for: {', '.join(unknown)}")
    return renamed


def reads_bytes(commit: Commit) -> bool:
    """Return whether the model was trained with the built-in tokenizer."""
    return commit.tokenizer.get("kind") == "bytes"


def config(commit: Commit, dtype: str) -> dict[str, Any]:
    """Return the config.json of a LlamaForCausalLM, or of one that scores texts. `dtype` is spelled as torch spells
    it."""
    scores = score_head_of(commit.architecture)
    shape = Architecture.model_validate({k: v for k, v in commit.architecture.items() if k != "scores"})
    end = END_OF_DOCUMENT if reads_bytes(commit) else None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn_dim,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        # transformers 4 reads the first two, 5 the third.
        "rope_theta": shape.rope_theta,
        "rope_scaling": rope_scaling(shape),
        "rope_parameters": {"rope_theta": shape.rope_theta, **(rope_scaling(shape) or {"rope_type": "default"})},
        "tie_word_embeddings": shape.tied_head,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
        **(scoring(scores, "LlamaForSequenceClassification") if scores else {}),
    }


def scoring(scores: ScoreHead, architecture: str) -> dict[str, Any]:
    """Return the fields of config.json that differ for a class that scores texts."""
    names = [f"LABEL_{number}" for number in range(scores.count)]
    return {
        "architectures": [architecture],
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "pad_token_id": scores.pad,
        "tie_word_embeddings": False,
    }


def rope_scaling(shape: Architecture) -> dict[str, Any] | None:
    """Return the scaling of positions as config.json describes it; None where they are not scaled."""
    if shape.rope_scaling is None:
        return None
    return {
        "rope_type": "llama3",
        "factor": shape.rope_scaling.factor,
        "low_freq_factor": shape.rope_scaling.low_freq_factor,
        "high_freq_factor": shape.rope_scaling.high_freq_factor,
        "original_max_position_embeddings": shape.rope_scaling.original_max_positions,
    }


def files(sizes: dict[str, int]) -> list[list[str]]:
    """Tensors by file, in order, each file of at most 5 GB (or a single tensor)."""
    split: list[list[str]] = [[]]
    file_bytes = 0
    for name, size in sizes.items():
        if split[-1] and file_bytes + size > FILE_BYTES_MAX:
            split.append([])
            file_bytes = 0
        split[-1].append(name)
        file_bytes += size
    return split


def file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
