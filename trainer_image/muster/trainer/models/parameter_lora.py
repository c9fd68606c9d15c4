"""LoRA and rsLoRA beside weights that are no linear layer's, such as experts that are held together; `peft` calls them
`target_parameters`, and its layout is ours.

Such a weight is [experts, outputs, inputs], or [experts, inputs, outputs] where its module says `is_transposed`, or one
matrix [outputs, inputs]. Beside it stand A [experts x rank, inputs] and B [outputs, rank x experts], in which the
expert counts fastest. Their product is added to the whole weight in each pass, so the sum is in memory too
(memory.py counts it), as in `peft`: no family's own way through its experts has to be written again.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from muster.recipe.adapter_config import Adapter, is_named
from muster.trainer.errors import UserError
from muster.trainer.models.layers import Embedding, Linear
from muster.trainer.models.nf4 import NF4Linear


def attach_to_parameters(model: nn.Module, adapter: Adapter, left_out: set[nn.Module]) -> None:
    """Put the adapter, without values, beside the weights that `targetParameters` names. `left_out` are modules that
    are trained whole. Raises UserError for names that fit none, fit one twice, or fit what has its own way."""
    for module, names in _targets(model, adapter, left_out).items():
        module.adapter_off = False
        module.lora_A, module.lora_B = nn.ParameterDict(), nn.ParameterDict()
        for name in names:
            weight = getattr(module, name)
            experts, outputs, inputs = shape_of(weight.shape, is_transposed(module))
            with torch.device(weight.device):
                module.lora_A[name] = nn.Parameter(torch.empty(experts * adapter.rank, inputs))
                module.lora_B[name] = nn.Parameter(torch.empty(outputs, adapter.rank * experts))
        module.adapter_scale, module.adapted_weights = adapter.scale, tuple(names)
        module.__class__ = _adapted(type(module))  # type: ignore[arg-type]  # a class is hashable


def is_transposed(module: Any) -> bool:
    """Return whether a module holds its experts as [experts, inputs, outputs]."""
    return bool(getattr(module, "is_transposed", False))


def shape_of(shape: tuple[int, ...] | torch.Size, transposed: bool) -> tuple[int, int, int]:
    """Experts, outputs and inputs of a weight."""
    if len(shape) == 2:
        return 1, int(shape[0]), int(shape[1])
    experts, first, second = map(int, shape)
    return (experts, second, first) if transposed else (experts, first, second)


def added_to(weight: Tensor, a: Tensor, b: Tensor, scale: float, transposed: bool) -> Tensor:
    """weight + scale x B A, with A and B as they stand beside it."""
    a, b = a.to(weight.dtype), b.to(weight.dtype)
    if weight.ndim == 2:
        return torch.addmm(weight, b, a, alpha=scale)
    experts = weight.shape[0]
    a = a.reshape(experts, -1, a.shape[-1])  # [experts, rank, inputs]
    b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)  # [experts, outputs, rank]
    if transposed:
        return torch.baddbmm(weight, a.transpose(1, 2), b.transpose(1, 2), alpha=scale)
    return torch.baddbmm(weight, b, a, alpha=scale)


def of_experts(a: Tensor, b: Tensor, rank: int, experts: slice) -> tuple[Tensor, Tensor]:
    """A and B of some of the experts, at least one of them."""
    some = b.reshape(len(b), rank, -1)[:, :, experts]
    return a[experts.start * rank : experts.stop * rank], some.reshape(len(b), -1)


class _WithWeights:
    """A module as its own forward pass is to see it: some of its weights are others."""

    def __init__(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self._seen_module, self._seen_weights = module, weights

    def __getattr__(self, name: str) -> Any:
        return self._seen_weights[name] if name in self._seen_weights else getattr(self._seen_module, name)


@cache
def _adapted(plain: type[nn.Module]) -> type[nn.Module]:
    """The class of a module of that kind with an adapter: a class, for the reason that lora.py gives."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.adapter_off:
            return plain.forward(self, *args, **kwargs)
        transposed = is_transposed(self)
        weights = {
            name: added_to(getattr(self, name), self.lora_A[name], self.lora_B[name], self.adapter_scale, transposed)
            for name in self.adapted_weights
        }
        return plain.forward(_WithWeights(self, weights), *args, **kwargs)

    return type(f"{plain.__name__}WithLora", (plain,), {"forward": forward})


def _targets(model: nn.Module, adapter: Adapter, left_out: set[nn.Module]) -> dict[Any, list[str]]:
    """The names of the weights that an adapter goes beside, by their modules, in the modules' own order."""
    within = {part for module in left_out for part in module.modules()}
    places: dict[str, tuple[nn.Module, str]] = {
        f"{name}.{own}" if name else own: (module, own)
        for name, module in model.named_modules()
        for own, _ in module.named_parameters(recurse=False)
    }
    free = {name: place for name, place in places.items() if _is_free(*place)}
    for target in adapter.target_parameters:
        matches = [name for name in places if is_named(name, target)]
        if not matches:
            raise UserError(
                f"adapter.targetParameters: {target!r} matches no weight of this model; {_near(target, free)}"
            )
        if whole := next((name for name in matches if places[name][0] in within), None):
            raise UserError(
                f"adapter.targetParameters: {target!r} is {whole}, which adapter.modulesToSave trains whole; leave it "
                "out of one of them"
            )
        if layer := next((name for name in matches if name not in free), None):
            raise UserError(f"adapter.targetParameters: {target!r} is {layer}, {_why_not_free(*places[layer])}")
    chosen: dict[Any, list[str]] = {}
    for name, (module, own) in free.items():
        matching = [target for target in adapter.target_parameters if is_named(name, target)]
        if len(matching) > 1:
            raise UserError(
                f"adapter.targetParameters: {' and '.join(matching)} both match {name}; leave one of them out"
            )
        if matching:
            chosen.setdefault(module, []).append(own)
    return chosen


def _is_free(module: nn.Module, own: str) -> bool:
    own_way = isinstance(module, nn.Linear | Linear | NF4Linear | nn.Embedding | Embedding)
    return not own_way and getattr(module, own).ndim in (2, 3)


def _why_not_free(module: nn.Module, own: str) -> str:
    if getattr(module, own).ndim < 2:
        return "which is no matrix: train its module whole (adapter.modulesToSave)"
    if isinstance(module, nn.Embedding | Embedding):
        return "a table that is looked up: train it whole (adapter.modulesToSave)"
    return "the weight of a linear layer: name the layer in adapter.targets"


def _near(asked: str, there: Mapping[str, Any]) -> str:
    """The names that may have been meant, each without the number of its layer."""
    ends = sorted({name.rpartition(".layers.")[2].partition(".")[2] or name for name in there})
    if not ends:
        return "all its matrices are of linear layers, which adapter.targets names"
    by_own = {end.rpartition(".")[2]: end for end in ends}
    close = [by_own[own] for own in difflib.get_close_matches(asked.rpartition(".")[2], [*by_own], 3, 0.4)]
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}There are {', '.join(ends)}"
