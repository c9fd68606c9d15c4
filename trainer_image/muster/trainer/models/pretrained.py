"""A causal language model of `transformers`, as the loop needs it: shardable by layer, packed, with a chunked loss.

The class is transformers' own; what is ours is put on from outside, on the instance: a `forward` that takes packed
documents and labels, a head that never makes all logits, and recomputation around each layer. It answers to the same
call as our own decoder: tokens, positions, documents, labels -> summed loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from muster.recipe.adapter_config import SCORE
from muster.trainer.models import load_balancing
from muster.trainer.models.attention import by_blocks
from muster.trainer.models.decoder import Recompute
from muster.trainer.models.head import ByToken, Reduction, cross_entropy
from muster.trainer.models.key_value_cache import KeyValueCache
from muster.trainer.models.logits import LogitTransform
from muster.trainer.models.pooling import document_scores
from muster.trainer.models.recompute import keep_expensive
from muster.trainer.models.split_attention import cut_rows, split_attention
from muster.trainer.parallel.token_split import TokenSplit

MaskStyle = Literal["positions", "by_layer_type"]
FLEX: Final = "flex_attention"


def build(
    config: Any,
    recompute: Recompute = "none",
    masks: MaskStyle = "positions",
    draws: bool = False,
    scoring: bool = False,
    half: bool = False,
) -> Any:
    """The model of a PretrainedConfig without values, with parameters on the meta device in fp32 and real buffers.

    `masks` says how packed documents are kept apart, either by positions alone, which transformers' own masks follow,
    or, for families that don't hand positions to them (gpt-oss), by a mask for each kind of layer. `draws` tells that
    an adapter that will be put beside the model draws random numbers, which a repeated pass must draw alike. `scoring`
    makes a model that scores texts. `half` tells that it computes in half precision.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if scoring else AutoModelForCausalLM
    with empty_parameters():
        # A copy: the name of the attention, which is set for each pass, is this model's own.
        model: Any = kind.from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention(config))
    model.tie_weights()
    return with_our_forward(model, recompute, masks, draws, blocks=half and _takes_block_masks(model))


def with_our_forward(
    model: Any, recompute: Recompute, masks: MaskStyle, draws: bool = False, blocks: bool = False
) -> Any:
    """The same model with the forward pass that the loop calls, `_forward` or `_forward_scores`, and with recomputation
    around its layers. `blocks`: it may attend by block masks (attention.py), which skip what is masked, where the other
    kernels of a packed row compute all of it."""
    model.own_attention = model.config._attn_implementation
    model.split = None
    if scores_texts(model):
        model.forward = partial(_forward_scores, model, masks, blocks)
    else:
        head = model.get_output_embeddings()
        head.forward = partial(_head, head, logit_transform(model.config))
        model.forward = partial(_forward, model, masks, blocks)
    if recompute != "none":
        draws = draws or _drops(model)
        for layer in layers(model):
            layer.forward = partial(_recomputed, layer.forward, recompute, draws)
    return model.train()


def split_tokens(model: Any, split: TokenSplit) -> None:
    """Have the model compute this rank's tokens alone wherever it is asked for losses or scores.

    Rows are cut in front of the first layer, behind embeddings, positions and masks: a class makes these of whole rows,
    each in its own way. To be called before the model is sharded.
    """
    model.split = split
    cut_rows(model, layers(model), split)


def layers(model: Any) -> Sequence[nn.Module]:
    """The decoder layers, in order: what is sharded, recomputed and compiled one by one."""
    names = set(model._no_split_modules or ())
    main_lists = [
        module for module in model.modules() if type(module).__name__ in names or _name_before_sharding(module) in names
    ]
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return main_lists or max(lists, key=len)


def lone_groups(model: Any) -> Sequence[nn.Module]:
    """Modules that are sharded as groups of their own: an untied embedding and head, so that their reductions are not
    one huge one. Tied ones stay in the root group, where they are one parameter."""
    if model.all_tied_weights_keys:
        return ()
    return (model.get_input_embeddings(), *([] if scores_texts(model) else [model.get_output_embeddings()]))


def scores_texts(model: Any) -> bool:
    """Return whether the model has a head that scores texts, in place of one that predicts tokens."""
    return hasattr(model, SCORE)


def attention(config: Any) -> str | None:
    """The attention that transformers is told to use; None leaves the choice to the class (sdpa, or eager)."""
    return FLEX if torch.cuda.is_available() and not _takes_sdpa(config) else None


def logit_transform(config: Any) -> LogitTransform:
    """Return the transformation that the family applies to its logits, by its configuration. A self-test compares it
    with the class's own forward pass (self_test.py), so a family that does something else is refused, and is never
    trained on a wrong loss."""
    divide = float(getattr(config, "logits_scaling", None) or 1.0)
    multiply = float(getattr(config, "logit_scale", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return LogitTransform(multiply / divide, None if cap is None else float(cap))


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules built here have their parameters on the meta device, but real buffers: a rotary table that is made anew
    after the fact is wrong in some families (embedding scales, rotations per kind of layer)."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(self, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def materialize(model: Any, device: torch.device) -> None:
    """Memory, without values, for every parameter that is on the meta device. Unlike `to_empty`, buffers stay."""
    learns = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    model.tie_weights()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learns[name])


def _forward(
    model: Any,
    masks: MaskStyle,
    blocks: bool,
    tokens: Tensor,
    positions: Tensor,
    documents: Tensor,
    labels: Tensor | None = None,
    smoothing: float = 0.0,
    reduction: Reduction = "sum",
    cache: KeyValueCache | None = None,
) -> Tensor:
    """The counterpart of Decoder.forward, with the same arguments and results. `documents` only tells padding
    from the rest, for positions restart with each of them. A mixture's load-balancing loss is added to a sum while
    training.
    """
    if cache is not None:
        return _next_logits(model, tokens, positions, documents, cache)
    balances = (
        labels is not None
        and not isinstance(reduction, ByToken)
        and model.training
        and load_balancing.weight_of(model) > 0
    )
    more = {"output_router_logits": True} if balances else {}
    # Logits are no loss: every rank computes all of them.
    split = None if labels is None else model.split
    output = _backbone(model, masks, blocks, tokens, positions, split, **more)
    own = labels if labels is None or split is None else split.own(labels)
    out: Tensor = model.get_output_embeddings()(output.last_hidden_state, own, smoothing, reduction)
    out = out if split is None else split.whole(out)
    if balances and labels is not None:
        routers = output.router_logits
        if split is not None:
            routers = tuple(_of_all_tokens(split, each, len(tokens)) for each in routers)
        balance = load_balancing.weighted(model, routers, documents, labels)
        # With a teacher the loss is the first of three.
        out = out + (balance if out.dim() == 0 else balance * torch.eye(len(out), device=out.device)[0])
    return out


def _forward_scores(
    model: Any, masks: MaskStyle, blocks: bool, tokens: Tensor, positions: Tensor, documents: Tensor
) -> Tensor:
    """The scores of each document, fp32 [B, T, scores]."""
    hidden = _backbone(model, masks, blocks, tokens, positions, model.split).last_hidden_state
    scores = nn.functional.linear(hidden, model.score.weight.to(hidden.dtype)).float()
    if model.split is not None:
        scores = model.split.whole(scores)
    return document_scores(scores, tokens, documents, model.config.pad_token_id)


def _of_all_tokens(split: TokenSplit, routers: Tensor, rows: int) -> Tensor:
    """Logits of a router [B * T / size, experts] as those of all tokens [B * T, experts]."""
    return split.whole(routers.view(rows, -1, routers.shape[-1])).flatten(0, 1)


def _backbone(
    model: Any,
    masks: MaskStyle,
    blocks: bool,
    tokens: Tensor,
    positions: Tensor,
    split: TokenSplit | None,
    **more: Any,
) -> Any:
    own = FLEX if blocks and by_blocks(tokens, half=True) else model.own_attention
    # Not set back afterwards: layers that are recomputed in the backward pass ask again.
    model.config._attn_implementation = own if split is None else split_attention(own, split)
    model.cut_length = None if split is None else tokens.shape[1]
    # Never a 2-D mask and never a cache: with either, transformers does not look for packed documents.
    mask = None if masks == "positions" else _masks_by_layer_type(model, tokens, positions)
    return model.base_model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False, **more)


def _next_logits(model: Any, tokens: Tensor, positions: Tensor, documents: Tensor, cache: KeyValueCache) -> Tensor:
    """The logits [B, 1, vocab] of the last tokens, as transformers' own `generate` has them computed: with the class's
    own cache, and a 2-D mask for padding on the left. Never by blocks, whose mask would be another for each token."""
    model.config._attn_implementation, model.cut_length = model.own_attention, None
    output = model.base_model(
        input_ids=tokens,
        attention_mask=(cache.read(documents) >= 0).long(),
        position_ids=positions,
        past_key_values=cache.of_transformers,
        use_cache=True,
    )
    cache.of_transformers = output.past_key_values
    out: Tensor = model.get_output_embeddings()(output.last_hidden_state[:, -1:])
    return out


def _head(
    head: Any,
    transform: LogitTransform,
    hidden: Tensor,
    labels: Tensor | None = None,
    smoothing: float = 0.0,
    reduction: Reduction = "sum",
) -> Tensor:
    """hidden [B, T, dim] -> fp32 logits [B, T, vocab], or with labels [B, T] the loss, summed over scored tokens or of
    each token."""
    if labels is None:
        return transform.apply_(nn.functional.linear(hidden, head.weight.to(hidden.dtype), head.bias).float())
    return cross_entropy(hidden, head.weight, labels, smoothing, reduction, head.bias, transform)


def _masks_by_layer_type(model: Any, tokens: Tensor, positions: Tensor) -> dict[str, Any]:
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    embedding = model.get_input_embeddings().weight
    like = torch.empty((*tokens.shape, 1), dtype=embedding.dtype, device=tokens.device)
    given = {
        "config": model.config,
        "inputs_embeds": like,
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions,
    }
    made = {"full_attention": create_causal_mask(**given)}
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        made["sliding_attention"] = create_sliding_window_causal_mask(**given)
    return made


def _recomputed(forward: Callable[..., Any], recompute: Recompute, draws: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Two calls, because torch.compile must see which function makes the contexts.
    if recompute == "full":
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=draws, **kwargs)
    return checkpoint(
        forward, *args, use_reentrant=False, preserve_rng_state=draws, context_fn=keep_expensive, **kwargs
    )


def _drops(model: Any) -> bool:
    """Return whether the model draws random numbers in functional dropout: of attention, for the most part."""
    document = model.config.to_dict()
    return any(bool(value) for name, value in document.items() if "dropout" in name or "jitter" in name)


def _takes_block_masks(model: Any) -> bool:
    """Return whether the model's class supports flex_attention, which has no dropout, and its heads are wide enough for
    the kernel."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return width >= 16 and bool(getattr(type(model), "_supports_flex_attn", False)) and not _drops(model)


def _takes_sdpa(config: Any) -> bool:
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping[type(config)]
    return bool(getattr(kind, "_supports_sdpa", False))


def _name_before_sharding(module: nn.Module) -> str:
    """The name of the module's class without what FSDP has put before it."""
    return type(module).__name__.removeprefix("FSDP")
