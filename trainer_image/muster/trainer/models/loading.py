"""Weights of a model's folder into a live model, whatever shards it: ranged reads of this rank's rows alone.

The conversion between the names and layouts of files and modules (fused experts, renamed layers) is transformers' own,
`core_model_loading`; it is given objects that read from storage only what it slices. That is internal API: transformers
is pinned, and tests hold every family against `from_pretrained`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from muster.plan.model_size import is_head
from muster.storage.model_folder import ModelFolder
from muster.trainer.errors import UserError
from muster.trainer.models.adapter import is_part
from muster.trainer.models.lazy_tensors import BLOCK_BYTES, GrownTable, LazyTensor, ReadRange, ShapeOnly
from muster.trainer.models.new_tokens import NewTokens
from muster.trainer.models.nf4 import NF4Linear, receiving
from muster.trainer.models.pretrained import materialize, scores_texts
from muster.trainer.models.scoring import WEIGHT as SCORE_WEIGHT

LISTED: Final = 40  # names in a message; a model of another shape differs in all of them


def check_shapes(model: nn.Module, folder: ModelFolder, new: NewTokens | None = None) -> None:
    """Check that the folder has exactly the weights that the model expects. The model is on the meta device, and must
    not be used afterwards. Raises UserError listing all that differ."""
    names = _wanted_names(model, folder)
    tables = {name: new.rows_of(folder.tensors[name]) for name in new.tables(model, names)} if new else {}
    slices = {name: ShapeOnly(folder.tensors[name], tables.get(name)) for name in names}
    info = _convert(model, slices, torch.device("meta"))
    _must_fit(model, info, folder)


def means(model: nn.Module, folder: ModelFolder, new: NewTokens) -> dict[str, Tensor]:
    """Return the first values of new tokens: for each table of tokens, by its name in the folder, the mean in fp32 of
    the rows of the tokens that it already had. They are added up from the first row to the last in fp64, so that the
    mean is the same on every machine.
    """
    by_name = {}
    for name in new.tables(model, _wanted_names(model, folder)):
        lazy, inner = LazyTensor(folder, folder.tensors[name], None, lambda _: None), folder.tensors[name].shape[1:]
        old_rows, height = (
            min(new.ids_before, lazy.get_shape()[0]),
            max(1, BLOCK_BYTES // (8 * max(1, math.prod(inner)))),
        )
        total = torch.zeros(inner, dtype=torch.float64)
        for row in range(0, old_rows, height):
            total += lazy[slice(row, min(row + height, old_rows))].double().sum(dim=0)
        by_name[name] = (total / old_rows).float()
    return by_name


def load(
    model: nn.Module,
    folder: ModelFolder,
    device: torch.device,
    new: NewTokens | None = None,
    begin_with: Mapping[str, Tensor] | None = None,
) -> list[ReadRange]:
    """Give a model its values. Its parameters may lie on the meta device, sharded or whole; each is cast to the dtype
    that it has there. `begin_with` is what `means` found for the new tokens. Returns what was read. Raises UserError
    where the folder does not fit, or holds NaN.
    """
    ranges: list[ReadRange] = []
    own = [p for n, p in model.named_parameters() if p.dtype.is_floating_point and not is_part(n)]
    dtypes = {p.dtype for p in own}
    dtype = dtypes.pop() if len(dtypes) == 1 else None  # else each tensor is cast once it is read
    frozen = next((p.dtype for p in own if not p.requires_grad), torch.float32)
    slices: dict[str, LazyTensor | GrownTable] = {
        name: LazyTensor(folder, folder.tensors[name], dtype, ranges.append) for name in _wanted_names(model, folder)
    }
    for name, mean in (begin_with or {}).items():
        stored = slices[name]
        assert new is not None
        assert isinstance(stored, LazyTensor)
        slices[name] = GrownTable(stored, new.rows_of(folder.tensors[name]), new.ids, mean)
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    quantized = {name: module for name, module in model.named_modules() if isinstance(module, NF4Linear)}
    if quantized:
        info: Any = _convert_by_layer(model, slices, device, quantized, frozen, folder.address)
    else:
        info = _convert(model, slices, device)
    _must_fit(model, info, folder)
    materialize(model, device)  # an adapter's, and tie anew what setting values has parted
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in learns)
    if begins_anew(model, folder):
        _local(model.get_parameter(SCORE_WEIGHT).detach()).zero_()  # its values follow
    _must_be_numbers(model, folder.address)
    return ranges


def begins_anew(model: Any, folder: ModelFolder) -> bool:
    """Return whether the model has a head that scores texts, and the folder does not."""
    return scores_texts(model) and SCORE_WEIGHT not in folder.tensors


def _wanted_names(model: Any, folder: ModelFolder) -> list[str]:
    """The names of the folder's tensors that the model takes.

    Left out are copies of what is tied, buffers that older files carry along, and a head that predicts tokens where the
    model scores texts."""
    scoring = scores_texts(model)
    tied: dict[str, str] = model.all_tied_weights_keys
    return [
        name
        for name in folder.tensors
        if not (name in tied and tied[name] in folder.tensors)
        and not name.endswith("rotary_emb.inv_freq")
        and not (scoring and is_head(name) and name != SCORE_WEIGHT)
    ]


def _convert(model: Any, slices: dict[str, Any], device: torch.device) -> Any:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LoadStateDictConfig(
        weight_mapping=get_model_conversion_mapping(model),
        dtype=torch.float32,
        device_map={"": device},
    )
    with torch.no_grad():
        info, _ = convert_and_load_state_dict_in_model(model, slices, config)
    # Of a weight of which this rank holds no row (fewer experts than ranks) there is nothing to convert, and merging no
    # experts is an error of transformers. Whoever holds a row converts it, and every rank has compared the shapes.
    for name, parameter in model.named_parameters():
        if parameter.numel() and not _local(parameter).numel():
            info.conversion_errors.pop(name, None)
            info.missing_keys.discard(name)
    return info


@dataclass
class _ConversionResult:
    """Combined result of several conversions, in the form in which transformers reports a single one."""

    missing_keys: set[str]
    unexpected_keys: set[str] = field(default_factory=set)
    mismatched_keys: set[Any] = field(default_factory=set)
    conversion_errors: dict[str, Any] = field(default_factory=dict)


def _convert_by_layer(
    model: Any,
    slices: dict[str, LazyTensor | GrownTable],
    device: torch.device,
    quantized: dict[str, NF4Linear],
    dtype: torch.dtype,
    where: str,
) -> _ConversionResult:
    """Convert a decoder layer at a time. Its linear weights become the bytes of NF4 before the next layer is read."""
    for module in quantized.values():
        for name, placeholder in [*module.named_parameters(recurse=False)]:
            if placeholder.dtype == torch.uint8:
                setattr(module, name, nn.Parameter(torch.empty_like(placeholder, device=device), requires_grad=False))
    merged = _ConversionResult({name for name, _ in model.named_parameters()})
    for number in sorted({_layer_of(name) for name in slices}):
        layers = [module for name, module in quantized.items() if _layer_of(name) == number]
        part = {name: lazy for name, lazy in slices.items() if _layer_of(name) == number}
        with receiving(layers, dtype, where):
            info = _convert(model, part, device)
        merged.missing_keys &= set(info.missing_keys)
        merged.unexpected_keys |= set(info.unexpected_keys)
        merged.mismatched_keys |= set(info.mismatched_keys)
        merged.conversion_errors |= info.conversion_errors
    merged.missing_keys -= {name for name, parameter in model.named_parameters() if parameter.dtype == torch.uint8}
    return merged


def _layer_of(name: str) -> int:
    """The decoder layer that a weight belongs to, in files and modules alike; -1: none."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(number[1]) if number else -1


def _must_fit(model: Any, info: Any, folder: ModelFolder) -> None:
    where = folder.address
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    tied: dict[str, str] = model.all_tied_weights_keys
    missing = {name for name in info.missing_keys if name not in tied or tied[name] in info.missing_keys}
    persistent = {name for name, _ in model.named_parameters(remove_duplicate=False) if not is_part(name)}
    new = {SCORE_WEIGHT} if begins_anew(model, folder) else set()
    problems = [f"{name}: the model has it, the folder does not" for name in sorted((missing & persistent) - new)]
    problems += [
        f"{name}: the folder has it, the model does not"
        for name in sorted(info.unexpected_keys)
        if not any(pattern.search(name) for pattern in ignored)
    ]
    problems += [
        f"{name}: shape {list(there)} in the folder, {list(expected)} by config.json"
        for name, there, expected in sorted(info.mismatched_keys)
    ]
    problems += [f"{name}: {str(error).strip().splitlines()[-1]}" for name, error in info.conversion_errors.items()]
    if problems:
        more = [f"and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
        raise UserError(
            f"model.source {where}: its weights contradict its config.json:\n"
            + "\n".join(f"  {line}" for line in [*problems[:LISTED], *more])
            + "\ngive the config.json that belongs to these weights"
        )


def _must_be_numbers(model: nn.Module, where: str) -> None:
    named = [(name, _local(parameter)) for name, parameter in model.named_parameters()]
    named = [(n, tensor) for n, tensor in named if tensor.is_floating_point() and tensor.numel() and not is_part(n)]
    bad = [name for name, tensor in named if not is_finite(tensor.detach())]
    if not bad:
        return
    raise UserError(
        f"model.source {where}: holds values that are no numbers (NaN or infinite) in {', '.join(bad[:10])}"
        f"{f' and {len(bad) - 10} more' if len(bad) > 10 else ''}; training from them can't work, so take another copy"
    )


def is_finite(tensor: Tensor) -> bool:
    # What is no number makes a sum none, and a sum takes half as long as the extremes. Those decide where it overflows,
    # as float16's does at once; and never the absolute values: those are a copy of the tensor, and what is kept of each
    # would lie behind the freed copy, so that the heap grows to a second shard.
    if tensor.dtype != torch.float16 and math.isfinite(tensor.sum()):
        return True
    return all(map(math.isfinite, tensor.aminmax()))


def _local(tensor: Any) -> Tensor:
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard
