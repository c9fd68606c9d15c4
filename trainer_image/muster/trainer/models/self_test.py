"""Self-tests that decide whether a class of transformers may be trained as we train it, in a second on a shrunken copy.

Not a list of names: families leak between packed documents in ways that their names don't tell, and new ones come with
every release. The copy has the class, its kinds of layers and its quirks, but few and small layers; it lives for the
test alone.
"""

from __future__ import annotations

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from muster.trainer.errors import UserError
from muster.trainer.models.architectures import layer_types_allow_packing
from muster.trainer.models.head import ByToken
from muster.trainer.models.pretrained import (
    MaskStyle,
    build,
    layers,
    materialize,
    split_tokens,
    with_our_forward,
)
from muster.trainer.parallel.thread_group import ThreadGroup, thread_groups
from muster.trainer.parallel.token_split import TokenSplit

# Largest difference of logits, relative to their size, that is taken for rounding. Measured leaks: 0.004 to 2.
TOLERANCE: Final = 1e-4
LOSS_TOLERANCE: Final = 1e-5
VOCABULARY: Final = 160
LENGTHS: Final = (12, 9)  # of the two documents; longer than the shrunken sliding window of 8

# Sizes that a configuration may have, by the name of their field, and what they are shrunk to.
SHRUNK: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_embd": 64,
    "n_inner": 96,
    "n_positions": 256,
    "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "decoder_vocab_size": VOCABULARY,
}
HEADS: Final = 4


@dataclass(frozen=True)
class PackingFindings:
    """Results of the self-tests about packing."""

    packs: bool  # whether several documents may share a row
    masks: MaskStyle = "positions"  # by which masks they are kept apart where they do
    why_not: str = ""  # what spoke against it, else empty


def examine(config: Any) -> PackingFindings:
    """Run the self-tests for a configuration's class. Raises UserError where our loss is not the class's own.

    Global random numbers stay as they were.
    """
    small = shrunken(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, own_logits, sample = _probe(small, config)
        _must_have_our_loss(model, own_logits, sample, config)
        if not layer_types_allow_packing(config):
            types = sorted(set(config.layer_types))
            return PackingFindings(False, why_not=f"it has layers that carry a state over ({', '.join(types)})")
        leak = math.inf
        styles: tuple[MaskStyle, ...] = ("positions", "by_layer_type")
        for style in styles if getattr(config, "layer_types", None) else styles[:1]:
            try:
                leak = min(leak, style_leak := _leak(with_our_forward(model, "none", style), sample))
            except (RuntimeError, ValueError, TypeError, AttributeError, KeyError):
                continue  # this class does not take such masks
            if style_leak <= TOLERANCE:
                return PackingFindings(True, style)
    return PackingFindings(
        False, why_not=f"documents in one row see each other (logits differ by {leak:.1e} of their size)"
    )


def shrunken(config: Any) -> Any:
    """The configuration of a small model of the same class with the same kinds of layers."""
    small, document = copy.deepcopy(config), config.to_dict()
    kinds, count = _kinds_of_layers(config)
    for name, value in SHRUNK.items():
        if _is_number(document.get(name)):
            setattr(small, name, value)
    heads, kv_heads = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    for name in ("num_attention_heads", "n_head"):
        if _is_number(document.get(name)):
            setattr(small, name, HEADS)
    if _is_number(document.get("num_key_value_heads")):
        small.num_key_value_heads = HEADS if kv_heads == heads else (1 if kv_heads == 1 else HEADS // 2)
    for name in ("num_hidden_layers", "n_layer"):
        if _is_number(document.get(name)):
            setattr(small, name, count)
    for name, values in kinds.items():
        setattr(small, name, values)
    small.pad_token_id, small.bos_token_id, small.eos_token_id = 0, 1, 2
    if isinstance(getattr(config, "rope_parameters", None), dict):
        small.rope_parameters = _plain_rope(config.rope_parameters)
    if hasattr(small, "mlp_only_layers"):
        small.mlp_only_layers = []
    return _shallow(small, count)


def _shallow(small: Any, count: int) -> Any:
    """The configuration with no more than `count` layers, whatever its field for them is called (`decoder_layers`).

    Random layers in great number hide what one of them lets through. The field is found by what it does: each one that
    has the number of layers as its value is tried.
    """
    depth = _depth(small)
    if depth is None or depth <= count:
        return small
    for name in [name for name, value in small.to_dict().items() if _is_number(value) and value == depth]:
        tried = copy.deepcopy(small)
        setattr(tried, name, count)
        if _depth(tried) == count:
            return tried
    return small


def _depth(config: Any) -> int | None:
    """The decoder layers of the model that a configuration makes; None where it makes none."""
    try:
        return len(layers(build(config)))
    except Exception:  # of many kinds; the test itself says what is wrong
        return None


def _kinds_of_layers(config: Any) -> tuple[dict[str, list[Any]], int]:
    """Per-layer lists cut down to a few layers that have each combination of their values, and how many those are."""
    total = getattr(config, "num_hidden_layers", None)
    document = config.to_dict()
    lists = {
        name: value
        for name, value in document.items()
        if isinstance(value, list) and total is not None and len(value) == total and total > 1
    }
    rows = list(zip(*lists.values(), strict=True)) if lists else []
    chosen = [n for n, row in enumerate(rows) if row not in rows[:n]][:4]
    chosen += [0] * (2 - len(chosen)) if rows else []
    return {name: [value[n] for n in chosen] for name, value in lists.items()}, len(chosen) if rows else 2


def _plain_rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Unscaled rotation of the same base: scaling has tables of the model's own size, and keeps nothing apart."""
    if any(isinstance(value, dict) for value in parameters.values()):
        return {name: _plain_rope(value) if isinstance(value, dict) else value for name, value in parameters.items()}
    kept: dict[str, Any] = {
        name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters
    }
    return {"rope_type": "default", **kept}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _probe(small: Any, config: Any) -> tuple[Any, Any, Tensor]:
    """The small model with random weights, its class's own logits of a row, and that row. Raises UserError."""
    kind = getattr(config, "model_type", "?")
    try:
        model = build(small)
        own = type(model).forward
        materialize(model, torch.device("cpu"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.15 if parameter.ndim > 1 else 0.05)
                if parameter.ndim == 1:
                    parameter.add_(0.5)
        model.eval()
        tokens = torch.randint(3, VOCABULARY, (1, sum(LENGTHS)))
        positions = torch.arange(tokens.shape[1])[None]
        head = model.get_output_embeddings()
        ours = head.__dict__.pop("forward")
        with torch.no_grad():
            logits = own(model, input_ids=tokens, position_ids=positions, use_cache=False).logits.float()
        head.forward = ours
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"model.source: a small copy of {kind} can't be tested ({type(error).__name__}: {error}), and without the "
            "test nobody knows whether its loss would be right; please report this with its config.json"
        ) from error
    return model, logits, tokens


def _must_have_our_loss(model: nn.Module, logits: Tensor, tokens: Tensor, config: Any) -> None:
    """The chunked loss, and the logits, against what the class itself computes."""
    positions = torch.arange(tokens.shape[1])[None]
    documents = torch.zeros_like(tokens)
    labels = torch.roll(tokens, -1, dims=1)
    expected = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum").item()
    with torch.no_grad():
        loss = model(tokens, positions, documents, labels).item()
        apart = _difference(model(tokens, positions, documents), logits)
    if abs(loss - expected) > LOSS_TOLERANCE * abs(expected) or apart > TOLERANCE:
        raise UserError(
            f"model.source: {config.model_type} computes its logits in a way that Muster does not know (its own loss "
            f"of a test row is {expected:.6f}, ours {loss:.6f}); it can't be trained here"
        )


def divides_heads(config: Any, findings: PackingFindings, by_heads: bool) -> bool:
    """Return whether ranks that divide the tokens of a row exchange heads for tokens in a class's attention, or else
    all have the keys and values of all tokens. `by_heads`: the number of heads allows the first.

    Each is tried between two threads in the place of ranks. Raises UserError where the losses of tokens, or gradients,
    are not what they are without a split.
    """
    small = shrunken(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole, _, _ = _probe(small, config)
    why = ""
    for style in (True, False) if by_heads else (False,):
        try:
            apart = _apart(small, whole, findings, style)
        except Exception as error:  # of many kinds: shapes that don't fit, what a class's own attention does not take
            why = why or f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            continue
        if apart <= TOLERANCE:
            return style
        why = why or f"losses and gradients differ by {apart:.1e} of their size"
    raise UserError(
        f"parallel.context: the layers of a {config.model_type} can't have the tokens of their rows divided over ranks "
        f"({why}); leave parallel.context out"
    )


def _apart(small: Any, whole: Any, findings: PackingFindings, by_heads: bool) -> float:
    """Return the largest difference that dividing the tokens of packed rows between two threads makes, relative to
    their size: of each token's loss, and of each weight's gradient."""
    lengths = LENGTHS if findings.packs else (sum(LENGTHS),)
    padding = 2 + sum(lengths) % 2  # rows of an even number of tokens
    row = torch.randint(3, VOCABULARY, (2, sum(lengths) + padding), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(n) for n in (*lengths, padding)]).expand_as(row)
    numbers = [torch.full((n,), i) for i, n in enumerate(lengths)]
    documents = torch.cat([*numbers, torch.full((padding,), -1)]).expand_as(row)
    labels = torch.where(documents >= 0, torch.roll(row, -1, dims=1), -100)

    def learnt(model: Any) -> tuple[Tensor, list[Tensor | None]]:
        losses = model(row, positions, documents, labels, 0.0, ByToken())
        weights = torch.linspace(0.5, 1.5, losses.numel()).view_as(losses)
        (losses * weights).sum().backward()
        return losses.detach(), [parameter.grad for parameter in model.parameters()]

    def rank(model: Any, group: ThreadGroup) -> tuple[Tensor, list[Tensor | None]]:
        with group.leaving_none_waiting():
            return learnt(model)

    alone, gradients = learnt(_copy(small, whole, findings))
    places = thread_groups(2)
    # Made before the threads begin: while a model is made, the modules of the whole process are made another way.
    models = [_copy(small, whole, findings) for _ in places]
    for model, place in zip(models, places, strict=True):
        split_tokens(model, TokenSplit(place, by_heads))
    with ThreadPoolExecutor(2) as threads:
        pending = [threads.submit(rank, *each) for each in zip(models, places, strict=True)]
    # Of a thread that failed, not of the one that had waited for it in vain.
    if errors := [error for each in pending if (error := each.exception()) is not None]:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    first, second = (each.result() for each in pending)
    # Some gradients are nothing but rounding: of a bias of keys, which moves all scores of a query alike.
    least = 1e-3 * max(float(gradient.abs().max()) for gradient in gradients if gradient is not None)
    differences = [_difference(losses, alone) for losses, _ in (first, second)]
    for gradient, *parts in zip(gradients, first[1], second[1], strict=True):
        if gradient is not None:
            together = torch.stack([part for part in parts if part is not None]).sum(0)
            differences.append(float((together - gradient).abs().max()) / max(float(gradient.abs().max()), least))
    return max(differences)


def _copy(small: Any, whole: Any, findings: PackingFindings) -> Any:
    """Another model with the same weights, in evaluation: nothing is drawn."""
    model = with_our_forward(build(small), "none", findings.masks)
    materialize(model, torch.device("cpu"))
    model.load_state_dict(whole.state_dict())
    return model.eval()


def _leak(model: nn.Module, tokens: Tensor) -> float:
    """Return the largest difference between the logits of two documents in one row, with padding behind, and those of
    each document alone."""
    pieces = torch.split(tokens, list(LENGTHS), dim=1)
    padding = torch.zeros((1, 3), dtype=tokens.dtype)
    row = torch.cat((*pieces, padding), dim=1)
    positions = torch.cat([torch.arange(n) for n in (*LENGTHS, 3)])[None]
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)] + [torch.full((3,), -1)])[None]
    with torch.no_grad():
        packed = torch.split(model(row, positions, documents), [*LENGTHS, 3], dim=1)
        return max(
            _difference(together, model(piece, torch.arange(piece.shape[1])[None], torch.zeros_like(piece)))
            for together, piece in zip(packed, pieces, strict=False)
        )


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-6))
