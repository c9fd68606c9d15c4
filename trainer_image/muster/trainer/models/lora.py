"""LoRA (Hu et al. 2021, arXiv 2106.09685), rsLoRA (Kalajdzievski 2023, arXiv 2312.03732) and DoRA (Liu et al. 2024,
arXiv 2402.09353): small trained matrices beside frozen ones, on any linear layer of any model
(beside other weights: parameter_lora.py).

A target keeps its weight under its own name, so that folders, commits and conversions see the model they know; beside
it stand `lora_A`, `lora_B` and, for DoRA, `lora_magnitude_vector`, as in `peft`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muster.recipe.adapter_config import ALL_LINEAR, Adapter, is_named
from muster.trainer.errors import UserError
from muster.trainer.models.adapter import is_part
from muster.trainer.models.layers import Linear
from muster.trainer.models.named import near
from muster.trainer.models.nf4 import NF4Linear
from muster.trainer.models.parameter_lora import attach_to_parameters
from muster.trainer.parallel.shards import local, local_rows


def attach(model: nn.Module, adapter: Adapter, head: nn.Module | None = None) -> None:
    """Put the adapter, without values, beside its targets and freeze the rest. To be called before the model is
    sharded.

    `head` is the output head, which `all-linear` leaves out. Raises UserError for targets that are not there.
    """
    saved = saved_modules(model, adapter)
    for module in _targets(model, adapter, {*saved.values()} if head is None else {head, *saved.values()}):
        outputs, inputs = _shape(module)
        module.adapter_off = False
        with torch.device(next(module.parameters()).device):
            module.lora_A, module.lora_B = Linear(inputs, adapter.rank), Linear(adapter.rank, outputs)
            if adapter.kind == "dora":
                module.lora_magnitude_vector = nn.Parameter(torch.empty(outputs))
        module.adapter_scale, module.adapter_dropout = adapter.scale, adapter.dropout
        module.__class__ = _adapted(type(module), adapter.kind == "dora")  # type: ignore[arg-type]  # a class is hashable
    attach_to_parameters(model, adapter, {*saved.values()})
    for module in model.modules():
        if hasattr(module, "draws"):  # our own layers draw random numbers for the adapter alone
            module.draws = adapter.dropout > 0  # type: ignore[assignment]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_part(name))
    for module in saved.values():
        module.requires_grad_(True)


def saved_modules(model: nn.Module, adapter: Adapter) -> dict[str, nn.Module]:
    """The modules that are trained whole, by name. Raises UserError for names that match none, or a target."""
    modules = {name: m for name, m in model.named_modules() if name and next(m.parameters(), None) is not None}
    saved = {name: module for name, module in modules.items() if adapter.saves(name)}
    for asked in adapter.modules_to_save:
        names = [name for name in saved if is_named(name, asked)]
        if not names:
            own = sorted({name.rpartition(".")[2] for name in modules if not name.rpartition(".")[2].isdecimal()})
            raise UserError(f"adapter.modulesToSave: {asked!r} matches no module of this model; {near(asked, own)}")
        within = [name for name in modules if any(f"{name}.".startswith(f"{whole}.") for whole in names)]
        if target := next((target for target in adapter.targets for name in within if is_named(name, target)), None):
            raise UserError(
                f"adapter.modulesToSave: {asked!r} trains {names[0]} whole, which adapter.targets has as {target!r} "
                "too; leave it out of one of them"
            )
    return saved


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Within the block the model computes as if it had no adapter. It must have one."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "adapter_off")]
    assert modules, "there is an adapter to be left out"
    for module in modules:
        module.adapter_off = True
    try:
        yield
    finally:
        for module in modules:
            module.adapter_off = False


@torch.no_grad()
def set_magnitudes(model: nn.Module) -> None:
    """DoRA's magnitudes as they begin: the norm of each row of W + scale × B A, where B is 0. Rows and magnitudes are
    sharded alike, so each rank has what it needs."""
    for module in model.modules():
        magnitude: Any = getattr(module, "lora_magnitude_vector", None)
        if magnitude is not None:
            weight: Any = module.weight
            local(magnitude).copy_(local_rows(weight)[0].float().norm(dim=1))


class _WithLora:
    """W x + b + scale × B A dropout(x): the forward pass of a linear layer with an adapter beside it.

    A class, and no function that is put on each layer: torch.compile compiles the layers of a model once where they
    differ in their weights alone, and up to eight times, then no more, where each has a function of its own.
    """

    adapter_off: bool
    adapter_scale: float
    adapter_dropout: float

    def forward(self: Any, x: Tensor) -> Tensor:
        plain: Tensor = super().forward(x)  # type: ignore[misc]
        if self.adapter_off:
            return plain
        beside: Tensor = self.lora_B(self.lora_A(F.dropout(x, self.adapter_dropout, self.training)))
        out: Tensor = plain + self.adapter_scale * beside
        return out


class _WithDora:
    """m / |W + scale × B A| × (W x + scale × B A dropout(x)) + b; the norm, of each row, is taken as a constant."""

    def forward(self: Any, x: Tensor) -> Tensor:
        base: Tensor = super().forward(x)  # type: ignore[misc]
        if self.adapter_off:
            return base
        weight = self.weight.to(x.dtype)
        product: Tensor = self.lora_B.weight.to(x.dtype) @ self.lora_A.weight.to(x.dtype)
        norm = (weight + self.adapter_scale * product).detach().norm(dim=1)
        ratio = self.lora_magnitude_vector.to(x.dtype) / norm
        dropped = F.dropout(x, self.adapter_dropout, self.training)
        drops = self.adapter_dropout and self.training
        unbiased = F.linear(dropped, weight) if drops else base - _bias(self, x)
        beside: Tensor = self.lora_B(self.lora_A(dropped))
        out: Tensor = base + (ratio - 1) * unbiased + ratio * self.adapter_scale * beside
        return out


@cache
def _adapted(kind: type[nn.Module], dora: bool) -> type[nn.Module]:
    """The class of a linear layer with an adapter."""
    return type(f"{kind.__name__}With{'Dora' if dora else 'Lora'}", (_WithDora if dora else _WithLora, kind), {})


def _bias(module: Any, x: Tensor) -> Tensor | float:
    bias = getattr(module, "bias", None)
    return 0.0 if bias is None else bias.to(x.dtype)


def _shape(module: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    if isinstance(module, NF4Linear):
        return module.out_features, module.in_features
    outputs, inputs = module.weight.shape
    return int(outputs), int(inputs)


def _targets(model: nn.Module, adapter: Adapter, left_out: set[nn.Module]) -> list[Any]:
    """The linear layers that an adapter goes beside; `all-linear` means none of those that are left out, nor parts of
    them. Raises UserError."""
    left_out = {part for module in left_out for part in module.modules()}
    kinds = nn.Linear | Linear | NF4Linear
    linear: dict[str, nn.Module] = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    by_target: dict[str, list[str]] = {}
    for target in adapter.targets:
        if target == ALL_LINEAR:
            by_target[target] = [name for name, module in linear.items() if module not in left_out]
        else:
            by_target[target] = [name for name in linear if is_named(name, target)]
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
    if any(is_named(name, target) for name, _ in model.named_modules()):
        return f"adapter.targets: {target!r} is no linear layer; an adapter goes beside {', '.join(there)}"
    if any(f".{target}" in f".{name}" for name, _ in model.named_parameters()):
        return (
            f"adapter.targets: {target!r} is a weight of experts that are held together, and no linear layer; name it "
            f"in adapter.targetParameters (as in peft). Linear layers are {', '.join(there)}"
        )
    return f"adapter.targets: {target!r} matches no layer of this model; {near(target, there)}"
