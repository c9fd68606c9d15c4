"""The numbers of a model that memory and FLOPs follow from, counted from the names and shapes of its weights alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from muster.plan.optimizer_state import eight_bit_moments_bytes
from muster.recipe.adapter_config import ALL_LINEAR, SCORE, Adapter, is_named
from muster.recipe.architecture import Architecture
from muster.recipe.parameter_names import any_matches

NF4_BYTES = 0.5 + 4 / 64  # of a weight: four bits, and the fp32 scale of each block of 64


@dataclass(frozen=True)
class ModelSize:
    """The numbers of a model that its memory and its FLOPs follow from. An adapter's weights are included."""

    parameters: int  # all weights
    learning: int  # the weights that are trained
    # The weights that a token is multiplied with. An embedding table is only looked up and does not count, unless it is
    # the head too; of the experts only the chosen ones count.
    active: int
    active_learning: int  # those of them that are trained
    largest_group: int  # the most weights that are gathered at once
    largest_learning_group: int  # likewise, of those that are trained
    root_group: int  # the weights that are gathered from a pass's beginning to its end
    layers: int
    dim: int  # of the residual stream
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int  # of the feed-forward part, added up over the experts that a token goes through
    vocab_size: int  # what the output head makes of a token; the number of scores where it gives scores
    normed: int  # elements per token and layer that go through a norm
    # Elements per token and layer that are kept because a matrix behind them learns, attention's output left out.
    matmul_inputs: int
    experts_per_token: int = 0  # 0: the model has no experts
    frozen_bytes: int = 4  # of one weight that is not trained and not in NF4
    nf4: int = 0  # weights that are kept in NF4, with four bits each
    adapted: int = 0  # outputs per token and layer of the matrices that have an adapter
    summed: int = 0  # weights of a layer that are made anew in each pass, with their adapter's product added
    eight_bit_moments: int = 0  # bytes of both moments of what is trained, in eight bits where its rows allow that
    second: tuple[
        ModelSize, ...
    ] = ()  # second models, which only compute forward; none of the numbers above count them

    @property
    def frozen_total(self) -> int:
        """Return the bytes of all weights that are not trained."""
        frozen = self.parameters - self.learning
        return int(self.nf4 * NF4_BYTES) + (frozen - self.nf4) * self.frozen_bytes


@dataclass(frozen=True)
class ModelDimensions:
    """Properties of a model that its weights' shapes don't show."""

    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    tied_head: bool
    experts: int = 0
    experts_per_token: int = 0


def decoder_size(
    architecture: Architecture, adapter: Adapter | None, scores: int | None = None, freeze: Sequence[str] = ()
) -> ModelSize:
    """Return the size of our own decoder. `scores` and `freeze` are as in `size_of`."""
    a = architecture
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (a.vocab_size, a.dim), "norm.weight": (a.dim,)}
    if not a.tied_head:
        shapes["head.weight"] = (a.vocab_size, a.dim)
    for layer in range(a.layers):
        for name, shape in a.projections.items():
            part = "attention" if name in _OF_ATTENTION else "feed_forward"
            shapes[f"layers.{layer}.{part}.{name}.weight"] = shape
        shapes |= {f"layers.{layer}.{name}_norm.weight": (a.dim,) for name in ("attention", "feed_forward")}
    dimensions = ModelDimensions(a.dim, a.heads, a.kv_heads, a.head_dim, a.ffn_dim, a.tied_head)
    return size_of(shapes, dimensions, adapter, scores=scores, freeze=freeze)


def dimensions_of(config: Mapping[str, Any]) -> ModelDimensions:
    """Parse the dimensions of a config.json. Raises ValueError naming the missing key."""

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            if isinstance(value := config.get(name), int) and not isinstance(value, bool) and value > 0:
                return value
        if default is None:
            raise ValueError(f"config.json says no {names[0]}")
        return default

    dim, heads = number("hidden_size", "n_embd", "d_model"), number("num_attention_heads", "n_head", "n_heads")
    experts = number("num_experts", "num_local_experts", "n_routed_experts", default=0)
    chosen = number("num_experts_per_tok", default=experts) if experts else 0
    width = number("intermediate_size", "n_inner", "ffn_dim", default=4 * dim)
    if experts:
        width = number("moe_intermediate_size", default=width) * chosen
    return ModelDimensions(
        dim=dim,
        heads=heads,
        kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=dim // heads),
        ffn_dim=width,
        tied_head=bool(config.get("tie_word_embeddings")),
        experts=experts,
        experts_per_token=chosen,
    )


def position_limit(config: Mapping[str, Any]) -> int | None:
    """Positions that a model was made for, by its config.json, rope scaling included; None where it sets no limit.

    Linear, dynamic and YaRN scaling stretch the original limit by their factor; those of Llama 3.1 and of longrope
    have the stretched one in max_position_embeddings already.
    """
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int) or isinstance(limit, bool) or limit <= 0:
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    factor, kind = rope.get("factor"), rope.get("rope_type", rope.get("type"))
    if kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, int | float) or factor <= 1:
        return limit
    original = rope.get("original_max_position_embeddings")
    return max(limit, int((original if isinstance(original, int) else limit) * factor))


_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.(.+)")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|embed_in|wte|word_embeddings|embed)\.weight$")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|head|score)\.weight$")
_ROUTER = re.compile(r"(?:mlp|block_sparse_moe|moe)\.(?:gate|router)\.weight$")
_QUERIES = ("q_proj", "qkv_proj", "query_key_value", "c_attn")
_INTO_ATTENTION = (*_QUERIES, "k_proj", "v_proj")
_OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")  # of our own decoder
_INTO_FFN = ("gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1", "w1", "w3")
_OUT_OF_FFN = ("down_proj", "fc2", "w2")


def size_of(
    shapes: Mapping[str, tuple[int, ...]],
    d: ModelDimensions,
    adapter: Adapter | None = None,
    frozen_bytes: int = 4,
    scores: int | None = None,
    freeze: Sequence[str] = (),
) -> ModelSize:
    """The size of a model with these weights, and with this adapter alongside them.

    `shapes` has the shape of each weight by its name, without an adapter's: as in a folder's files, or as in a module,
    whose experts are held together. It may list a tied head, which is counted once. `frozen_bytes` is the size of one
    weight that is not trained. `scores` is the number of scores that a head gives a text, which takes the place of the
    head that predicts tokens. `freeze` are patterns of weights that are not trained, where there is no adapter; the
    activations are counted as if all were.
    """
    if scores is not None:
        d = replace(d, tied_head=False)
        shapes = {name: shape for name, shape in shapes.items() if not _HEAD.search(name)}
        shapes = {**shapes, f"{SCORE}.weight": (scores, d.dim)}
    named = {name: shape for name, shape in _fused(shapes).items() if not (d.tied_head and _HEAD.search(name))}
    counts = {name: prod(shape) for name, shape in named.items()}
    layers: dict[str, list[str]] = {}
    for name in named:
        match = _LAYER.search(name)
        layers.setdefault(match[1] if match else "", []).append(name)
    rest = layers.pop("", [])
    tables = [name for name in rest if _EMBEDDING.search(name) or _HEAD.search(name)]
    lone = [] if d.tied_head else tables
    weights, share = sum(counts.values()), d.experts_per_token / d.experts if d.experts else 1.0
    multiplied = sum(
        int(count * (share if ".experts." in name else 1.0)) for name, count in counts.items() if _multiplies(name, d)
    )
    groups = [_sum(counts, names) for names in layers.values()] + [counts[name] for name in lone]
    root = _sum(counts, (name for name in rest if name not in lone))
    first = layers.get("0") or next(iter(layers.values()), [])
    left = [name for name in named if not any_matches(freeze, _names_of(name, d.tied_head))]
    saved = {name: counts[name] for name in (saved_weights(named, adapter, d.tied_head) if adapter else left)}
    linear = {name: shape for name, shape in named.items() if name not in saved and _is_target(name, shape, adapter)}
    beside = {name: _adapter_weights(shape, adapter) for name, shape in linear.items()}
    adapted = [name for name in named if name not in saved and adapter is not None and adapter.adds_to(name)]
    beside |= {name: _adapter_weights(_as_matrix(named[name]), adapter) for name in adapted}
    added, learns = sum(beside.values()), len(saved) == len(named)
    targets = set(beside) if adapter else set(named)
    trained = {name: beside.get(name, 0) + saved.get(name, 0) for name in named}
    group_trained = max((_sum(trained, names) for names in [*layers.values(), rest]), default=0)
    table = next((named[name] for name in tables if _EMBEDDING.search(name)), (0, 0))
    return ModelSize(
        parameters=weights + added,
        learning=added + sum(saved.values()),
        active=multiplied + added,
        active_learning=multiplied if learns else added + _sum(saved, (n for n in saved if _multiplies(n, d))),
        largest_group=max([root, *groups]),
        largest_learning_group=max([root, *groups]) if learns else group_trained,
        root_group=root,
        layers=len(layers),
        dim=d.dim,
        heads=d.heads,
        kv_heads=d.kv_heads,
        head_dim=d.head_dim,
        ffn_dim=d.ffn_dim,
        vocab_size=table[0] if scores is None else scores,
        normed=sum(_normed(name, named[name], d) for name in first),
        matmul_inputs=_kept_inputs(first, targets, d),
        experts_per_token=d.experts_per_token,
        frozen_bytes=4 if learns else frozen_bytes,
        nf4=_in_four_bits({n: s for n, s in named.items() if n not in saved}, adapter),
        adapted=sum(named[name][0] for name in first if name in linear),
        summed=sum(counts[name] for name in first if name in adapted),
        eight_bit_moments=sum(map(eight_bit_moments_bytes, _trained_shapes(named, beside, saved, adapter))),
    )


def _names_of(weight: str, tied_head: bool) -> tuple[str, ...]:
    """Return all names that a weight may have: a tied embedding is the head too."""
    return (weight, "lm_head.weight", "head.weight") if tied_head and is_embedding(weight) else (weight,)


def _multiplies(name: str, d: ModelDimensions) -> bool:
    """Return whether tokens are multiplied with a weight: an embedding that is no head is only looked up."""
    return d.tied_head or not _EMBEDDING.search(name)


def _trained_shapes(
    named: Mapping[str, tuple[int, ...]], beside: Iterable[str], saved: Iterable[str], adapter: Adapter | None
) -> list[tuple[int, ...]]:
    shapes = [named[name] for name in saved]
    for experts, outputs, inputs in ((1, *named[name])[-3:] for name in beside):
        assert adapter is not None, "only an adapter stands beside weights"
        ranks = adapter.rank * experts
        shapes += [(ranks, inputs), (outputs, ranks), *([(outputs,)] if adapter.kind == "dora" else [])]
    return shapes


def _sum(counts: Mapping[str, int], names: Iterable[str]) -> int:
    return sum(counts[name] for name in names)


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    plain = name.endswith(".weight") and len(shape) == 2 and ".experts." not in name
    return plain and not _EMBEDDING.search(name) and not _ROUTER.search(name)


def _is_target(name: str, shape: tuple[int, ...], adapter: Adapter | None) -> bool:
    if adapter is None or not _is_linear(name, shape):
        return False
    layer = name.removesuffix(".weight")
    return any(
        (target == ALL_LINEAR and not _HEAD.search(name)) or is_named(layer, target) for target in adapter.targets
    )


def is_embedding(weight: str) -> bool:
    """Return whether a weight is the embedding table, by its name."""
    return _EMBEDDING.search(weight) is not None


def is_head(weight: str) -> bool:
    """Return whether a weight is the output head's own, by its name."""
    return _HEAD.search(weight) is not None


def is_token_head(weight: str) -> bool:
    """Return whether a weight is that of an output head which predicts tokens, by its name."""
    return is_head(weight) and not weight.endswith(f"{SCORE}.weight")


def saved_weights(weights: Iterable[str], adapter: Adapter | None, tied_head: bool) -> list[str]:
    """Return those of these weights that are trained whole alongside an adapter, by the name of their module or of one
    around it.

    `tied_head` says that embedding and head are one weight, which either name means.
    """
    if adapter is None or not adapter.modules_to_save:
        return []
    head = tied_head and any(is_head(f"{name}.weight") for name in adapter.modules_to_save)

    def is_saved(weight: str) -> bool:
        parts = weight.split(".")
        around = any(adapter.saves(".".join(parts[:end])) for end in range(1, len(parts)))
        return around or (head and is_embedding(weight))

    return [weight for weight in weights if is_saved(weight)]


_EXPERT = re.compile(r"(.+)\.(?:block_sparse_moe|mlp)\.experts\.\d+\.(\w+)\.weight")
_PROJECTIONS = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj"}
_PROJECTIONS |= {"down_proj": "down_proj", "w2": "down_proj"}


def _fused(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The same weights, with the experts that files hold apart put together as modules hold them: [experts, outputs,
    inputs], gate and up in one."""
    shapes_together: dict[str, tuple[int, ...]] = {}
    rows: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        expert = _EXPERT.fullmatch(name)
        if expert and expert[2] in _PROJECTIONS and len(shape) == 2:
            rows.setdefault(f"{expert[1]}.mlp.experts.{_PROJECTIONS[expert[2]]}", []).append(shape)
        else:
            shapes_together[name] = shape
    for name, parts in rows.items():
        experts = len(parts) // (2 if name.endswith("gate_up_proj") else 1) or 1
        shapes_together[name] = (experts, sum(outputs for outputs, _ in parts) // experts, parts[0][1])
    return shapes_together


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[experts, outputs, inputs] as peft's adapter sees it: the ranks of all experts one after another."""
    return tuple(shape[0] * extent for extent in shape[1:]) if len(shape) == 3 else shape


def _adapter_weights(shape: tuple[int, ...], adapter: Adapter | None) -> int:
    assert adapter is not None, "only an adapter has targets"
    return adapter.rank * sum(shape) + (shape[0] if adapter.kind == "dora" else 0)


def _in_four_bits(named: Mapping[str, tuple[int, ...]], adapter: Adapter | None) -> int:
    """Weights that QLoRA keeps in NF4: of every linear layer but the head, in rows of whole blocks."""
    if adapter is None or adapter.kind != "qlora":
        return 0
    return sum(
        prod(shape)
        for name, shape in named.items()
        if _is_linear(name, shape) and not _HEAD.search(name) and shape[1] % 64 == 0
    )


def _normed(name: str, shape: tuple[int, ...], d: ModelDimensions) -> int:
    """Elements per token that the norm of this weight sees; 0 for what is no norm."""
    if ("norm" not in name and not re.search(r"\.ln_?\d", name)) or not name.endswith(".weight"):
        return 0
    if shape == (d.head_dim,) and d.head_dim != d.dim:  # of each head: of queries or of keys
        return d.head_dim * (d.kv_heads if "k_norm" in name or "k_layernorm" in name else d.heads)
    return shape[0]


def _kept_inputs(layer: list[str], targets: set[str], d: ModelDimensions) -> int:
    """Elements per token that a layer keeps because a matrix behind them learns."""

    def learns(parts: tuple[str, ...]) -> bool:
        return any(name in targets and any(f".{part}" in name for part in parts) for name in layer)

    learned = d.dim * learns(_INTO_ATTENTION) + d.dim * learns(_INTO_FFN) + d.ffn_dim * learns(_OUT_OF_FFN)
    if d.experts and any(name in targets and ".experts." in name for name in layer):
        learned += d.dim * d.experts_per_token
    return learned
