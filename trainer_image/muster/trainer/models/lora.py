"""LoRA (Hu et al. 2021, arXiv 2106.09685), rsLoRA (Kalajdzievski 2023, arXiv 2312.03732) and DoRA (Liu et al. 2024,
arXiv 2402.09353): small trained matrices beside frozen ones, on any linear layer of any model.

A target keeps its weight under its own name, so that folders, commits and conversions see the model they know; beside
it stand `lora_A`, `lora_B` and, for DoRA, `lora_magnitude_vector`, as in `peft`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.contract.adapter_config import ALL_LINEAR, Adapter
from muster.trainer.errors import UserError
from muster.trainer.models.adapter import is_part
from muster.trainer.models.layers import Linear
from muster.trainer.models.nf4 import NF4Linear
from muster.trainer.models.shards import local


def attach(model: nn.Module, adapter: Adapter, head: nn.Module | None = None) -> None:
    """Put the adapter, without values, beside its targets and freeze the rest. To be called before the model is
    sharded.

    `head` is the output head, which `all-linear` leaves out. Raises UserError for targets that are not there.
    """
    for module in _targets(model, adapter, head):
        outputs, inputs = _shape(module)
        with torch.device(next(module.parameters()).device):
            module.lora_A, module.lora_B = Linear(inputs, adapter.rank), Linear(adapter.rank, outputs)
            if adapter.kind == "dora":
                module.lora_magnitude_vector = nn.Parameter(torch.empty(outputs))
        module.forward = partial(_dora if adapter.kind == "dora" else _lora, module, module.forward, adapter)
    for module in model.modules():
        if hasattr(module, "draws"):  # our own layers draw random numbers for the adapter alone
            module.draws = adapter.dropout > 0  # type: ignore[assignment]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_part(name))


@torch.no_grad()
def set_magnitudes(model: nn.Module) -> None:
    """DoRA's magnitudes as they begin: the norm of each row of W + scale × B A, where B is 0. Rows and magnitudes are
    sharded alike, so each rank has what it needs."""
    for module in model.modules():
        magnitude: Any = getattr(module, "lora_magnitude_vector", None)
        if magnitude is not None:
            weight: Any = module.weight
            local(magnitude).copy_(local(weight).float().norm(dim=1))


def _lora(module: Any, plain: Callable[[Tensor], Tensor], adapter: Adapter, x: Tensor) -> Tensor:
    """W x + b + scale × B A dropout(x)."""
    beside: Tensor = module.lora_B(module.lora_A(F.dropout(x, adapter.dropout, module.training)))
    return plain(x) + adapter.scale * beside


def _dora(module: Any, plain: Callable[[Tensor], Tensor], adapter: Adapter, x: Tensor) -> Tensor:
    """m / |W + scale × B A| × (W x + scale × B A dropout(x)) + b; the norm, of each row, is taken as a constant."""
    weight = module.weight.to(x.dtype)
    product: Tensor = module.lora_B.weight.to(x.dtype) @ module.lora_A.weight.to(x.dtype)
    norm = (weight + adapter.scale * product).detach().norm(dim=1)
    ratio = module.lora_magnitude_vector.to(x.dtype) / norm
    base: Tensor = plain(x)
    dropped = F.dropout(x, adapter.dropout, module.training)
    unbiased = F.linear(dropped, weight) if adapter.dropout and module.training else base - _bias(module, x)
    beside: Tensor = module.lora_B(module.lora_A(dropped))
    out: Tensor = base + (ratio - 1) * unbiased + ratio * adapter.scale * beside
    return out


def _bias(module: Any, x: Tensor) -> Tensor | float:
    bias = getattr(module, "bias", None)
    return 0.0 if bias is None else bias.to(x.dtype)


def _shape(module: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    if isinstance(module, NF4Linear):
        return module.out_features, module.in_features
    outputs, inputs = module.weight.shape
    return int(outputs), int(inputs)


def _targets(model: nn.Module, adapter: Adapter, head: nn.Module | None) -> list[Any]:
    kinds = nn.Linear | Linear | NF4Linear
    linear: dict[str, nn.Module] = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    by_target: dict[str, list[str]] = {}
    for target in adapter.targets:
        if target == ALL_LINEAR:
            by_target[target] = [name for name, module in linear.items() if module is not head]
        else:
            by_target[target] = [name for name in linear if name == target or name.endswith(f".{target}")]
    if missing := [target for target, names in by_target.items() if not names]:
        raise UserError("\n".join(_missing(target, model, linear) for target in missing))
    chosen = [name for names in by_target.values() for name in names]
    if twice := sorted({name for name in chosen if chosen.count(name) > 1}):
        both = [target for target, names in by_target.items() if twice[0] in names]
        raise UserError(
            f"adapter.targets: {' and '.join(both)} both match {twice[0]}"
            f"{f' and {len(twice) - 1} other layers' if len(twice) > 1 else ''}; leave one of them out"
        )
    return [linear[name] for name in chosen]


def _missing(target: str, model: nn.Module, linear: dict[str, nn.Module]) -> str:
    there = sorted({name.rpartition(".")[2] for name in linear})
    if any(name == target or name.endswith(f".{target}") for name, _ in model.named_modules()):
        return f"adapter.targets: {target!r} is no linear layer; an adapter goes beside {', '.join(there)}"
    if any(f".{target}" in f".{name}" for name, _ in model.named_parameters()):
        return (
            f"adapter.targets: {target!r} is part of fused experts, beside which no adapter is trained yet; "
            f"linear layers are {', '.join(there)}"
        )
    near = difflib.get_close_matches(target.rpartition(".")[2], there, 3, 0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"adapter.targets: {target!r} matches no layer of this model; {hint}There are {', '.join(there)}"
