"""Initial weights that depend on the seed and the parameter's name alone: the same for every sharding and world size.

Normal with standard deviation 0.02; projections back into the residual stream are scaled by 1/sqrt(2 * layers), so that
the stream's variance does not grow with depth (GPT-2, Radford et al. 2019); norms are 1; an untied head has
1/sqrt(dim), so that the first logits have unit variance. Each parameter is drawn in blocks of rows with a generator of
their own, and a rank draws only the blocks that its shard touches.

An adapter begins as nothing: its B is 0, its A uniform within 1/sqrt(inputs) (He et al. 2015, arXiv 1502.01852, with
a slope of sqrt(5), as `peft` does).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from muster.recipe.architecture import Architecture
from muster.trainer.models.adapter import is_part
from muster.trainer.models.lora import set_magnitudes
from muster.trainer.models.scoring import WEIGHT as SCORE_WEIGHT
from muster.trainer.parallel.shards import local_part

BLOCK_ELEMENTS = 2**20


# A parameter's part on this rank, and the global index of its first element.
PartOf = Callable[[Tensor], tuple[Tensor, tuple[int, ...]]]


def initialize(model: nn.Module, architecture: Architecture, seed: int, part_of: PartOf = local_part) -> None:
    """Fill every parameter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_part(name):
                continue
            std = deviation(name, architecture)
            if std is None:
                part_of(parameter)[0].fill_(1.0)
            else:
                _fill(parameter, _normal(std), f"{seed}/{name}", part_of)


def initialize_adapter(model: nn.Module, seed: int) -> None:
    """Fill an adapter's parameters; DoRA's magnitudes too, so what it is beside must have its values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                local_part(parameter)[0].zero_()
            elif ".lora_A." in name:
                _fill(parameter, _uniform(parameter.shape[1] ** -0.5), f"{seed}/{name}")
    set_magnitudes(model)


def initialize_scores(model: nn.Module, seed: int) -> None:
    """Fill the head that scores texts, where a folder or commit of a model that predicts tokens has none."""
    with torch.no_grad():
        _fill(model.get_parameter(SCORE_WEIGHT), _normal(0.02), f"{seed}/{SCORE_WEIGHT}")


def deviation(name: str, architecture: Architecture) -> float | None:
    """The standard deviation of a parameter's initial values; None where all of them are ones."""
    if name.endswith("norm.weight"):
        return None
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return float(0.02 / (2 * architecture.layers) ** 0.5)
    if name == "head.weight":
        return float(architecture.dim**-0.5)
    return 0.02


Fill = Callable[[Tensor, torch.Generator], Tensor]


def _normal(std: float) -> Fill:
    return lambda values, dice: values.normal_(0.0, std, generator=dice)


def _uniform(bound: float) -> Fill:
    return lambda values, dice: values.uniform_(-bound, bound, generator=dice)


def _fill(parameter: Tensor, fill: Fill, key: str, part_of: PartOf = local_part) -> None:
    """Fill this rank's part of a parameter.

    Each block of whole rows is drawn from a key of its own, so that the values do not depend on which rank holds which
    part: a rank that holds some of the columns draws all of them, and keeps its own.
    """
    part, (first, *columns) = part_of(parameter)
    inner = tuple(parameter.shape[1:])
    mine = tuple(slice(begin, begin + count) for begin, count in zip(columns, part.shape[1:], strict=True))
    height = min(len(parameter), max(1, BLOCK_ELEMENTS // max(1, math.prod(inner))))
    for block in range(first // height, (first + len(part) + height - 1) // height):
        values = _draw(f"{key}/{block}", (height, *inner), fill, part.device)[(slice(None), *mine)]
        start = max(first, block * height)
        end = min(first + len(part), (block + 1) * height)
        part[start - first : end - first] = values[start - block * height : end - block * height]


def _draw(key: str, shape: tuple[int, ...], fill: Fill, device: torch.device) -> Tensor:
    generator = torch.Generator(device)
    generator.manual_seed(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1)
    return fill(torch.empty(shape, device=device), generator)
