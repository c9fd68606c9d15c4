"""Attention of the classes of transformers over the tokens of several ranks (parallel/token_split.py).

Every class with the library's attention interface looks its attention up by a name in its configuration. Here such a
name stands for the class's own function with the ranks' exchange around it, and for its own masks. Whether a class does
what is assumed here, self_test.py finds out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from muster.trainer.parallel.token_split import TokenSplit

_MASK = "attention_mask"  # which stays whole: it says what all tokens see


def split_attention(own: str, split: TokenSplit) -> str:
    """Return the name of an attention of transformers with the exchange between ranks around it."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = f"muster_{own}_{id(split)}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(name, partial(_attend, own, split))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[own])
    return name


def cut_rows(model: Any, layers: Sequence[nn.Module], split: TokenSplit) -> None:
    """Have the layers, where `cut_length` of the model is the length of whole rows, get this rank's tokens of what they
    are called with: hidden states [B, T, dim], and angles and positions of each token."""
    model.cut_length = None
    for layer in layers:
        layer.register_forward_pre_hook(partial(_cut_arguments, model, split), with_kwargs=True)


class _RegroupedHeads:
    """An attention module whose keys and values have been repeated, so that fewer queries share one of them."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module, self.num_key_value_groups = module, groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _attend(
    own: str,
    split: TokenSplit,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The interface of transformers: query [B, H, T / size, D] to [B, T / size, H, D], and no weights."""
    function = _function(own, module)

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        regrouped = groups != getattr(module, "num_key_value_groups", groups)
        asks: Any = _RegroupedHeads(module, groups) if regrouped else module
        mixed: Tensor = function(asks, query, key, value, mask, **kwargs)[0]
        return mixed.transpose(1, 2)

    return split.attend(attention, query, key, value, attention_mask).transpose(1, 2).contiguous(), None


def _function(own: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function of this name. `eager` is one that each family has in the file of its classes."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: Callable[..., Any]
    if own in ALL_ATTENTION_FUNCTIONS:
        function = ALL_ATTENTION_FUNCTIONS[own]
    else:
        files = (sys.modules.get(kind.__module__) for kind in type(module).__mro__)
        function = next(f for file in files if (f := getattr(file, "eager_attention_forward", None)))
    return function


def _cut_arguments(model: Any, split: TokenSplit, _: nn.Module, args: Any, kwargs: Any) -> Any:
    length = model.cut_length
    if length is None:
        return None
    cut = partial(_cut, length, split)
    return tuple(map(cut, args)), {name: each if name == _MASK else cut(each) for name, each in kwargs.items()}


def _cut(length: int, split: TokenSplit, given: Any) -> Any:
    """This rank's tokens of a tensor with a value for each token of whole rows, or of several in a tuple; anything else
    as it is."""
    if isinstance(given, tuple):
        return tuple(_cut(length, split, each) for each in given)
    whole = isinstance(given, Tensor) and given.dim() in (2, 3) and given.shape[1] == length
    return split.own(given) if whole else given
