"""Linear layers that compute in float8: torchao's, with a scale for each row of each operand (Micikevicius et al. 2022,
arXiv 2209.05433, for the formats).

Weights, gradients and activations between the layers stay as they are in bf16; the three products of a layer, forward
and backward, are of float8 operands cast for each of them. Weights keep their names and their shards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch
from torch import nn

from muster.plan.model_size import is_head
from muster.recipe.training import FP8_MULTIPLE
from muster.trainer.errors import UserError
from muster.trainer.models.layers import Linear

CAPABILITY_MIN: Final = (8, 9)  # Ada; the first whose tensor cores multiply float8


def must_compute_float8(device: torch.device) -> None:
    """Raise UserError where the device has no float8."""
    if device.type != "cuda":
        raise UserError(
            "precision fp8: this worker computes on its CPU, which has no float8; ask for GPUs (gang.gpusPerNode) of "
            "compute capability 8.9 or more (L4, L40S, H100 and later), or take bf16"
        )
    level = torch.cuda.get_device_capability(device)
    if level < CAPABILITY_MIN:
        raise UserError(
            f"precision fp8: {torch.cuda.get_device_name(device)} has compute capability {level[0]}.{level[1]}, and "
            "float8 needs 8.9 or more (L4, L40S, H100 and later); name such gang.instanceTypes, or take bf16"
        )


def use_float8(model: nn.Module, emulate: bool = False) -> list[str]:
    """Let the model's linear layers compute in float8, but the head and those whose extents the kernels don't take.
    Before it is sharded; it must be given bf16 weights in each pass.

    Returns the names of the layers. `emulate` computes what float8 would give in fp32, on any device: for tests. Raises
    UserError where torchao can't be loaded, or no layer is fit for it.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise UserError(
            f"precision fp8 needs torchao, which can't be loaded here: {error}; use the trainer's image, or install "
            "muster-train[trainer]"
        ) from None
    _as_torch_s_own(model)
    chosen = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and _is_fit(name, module)]
    if not chosen:
        raise UserError(
            f"precision fp8: the model has no linear layer whose inputs and outputs are multiples of "
            f"{FP8_MULTIPLE}; take bf16"
        )
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate)
    names = {*chosen}
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in names)
    return chosen


def _is_fit(name: str, layer: nn.Linear) -> bool:
    extents = (layer.in_features, layer.out_features)
    return not is_head(f"{name}.weight") and all(extent % FP8_MULTIPLE == 0 for extent in extents)


def _as_torch_s_own(model: nn.Module) -> None:
    """Our decoder's linear layers as torch's, which torchao knows. Those cast no weights, so they must arrive cast."""
    for name, layer in [(name, module) for name, module in model.named_modules() if type(module) is Linear]:
        parent, _, own = name.rpartition(".")
        outputs, inputs = layer.weight.shape
        with torch.device("meta"):
            made = nn.Linear(inputs, outputs, bias=False)
        made.weight = layer.weight
        setattr(model.get_submodule(parent), own, made)
