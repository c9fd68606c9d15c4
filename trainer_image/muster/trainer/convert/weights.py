"""Another job's weights, to begin with: its whole model, and what its adapter learnt merged into it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from muster.plan.model_size import is_head
from muster.recipe.adapter_config import Adapter
from muster.trainer.checkpoint import CheckpointMismatch, load_weights, read_commit
from muster.trainer.checkpoint.tensors import model_tensors
from muster.trainer.models.adapter import adapter_of, is_part, parts_of, weight_of
from muster.trainer.models.lazy_tensors import TORCH_DTYPES
from muster.trainer.models.lora import set_magnitudes
from muster.trainer.models.nf4 import decode, need_kernels
from muster.trainer.models.nf4_format import absmax_name, packed_name, weights_among
from muster.trainer.models.parameter_lora import added_to, is_transposed, of_experts, shape_of
from muster.trainer.models.scoring import WEIGHT as SCORE_WEIGHT
from muster.trainer.parallel.shards import local, local_rows, rows_alongside
from muster.words.checkpoint import Commit

_MODEL = "model/"


def begin_with(folder: str, step: int | Literal["best", "last"], model: nn.Module) -> Commit:
    """Load a commit's weights, merged (in fp32) with its adapter where it has one. Collective.

    The model's own adapter, if there is one, keeps its values, and so does a head that scores texts where the commit
    has none. Raises as `load` does.
    """
    commit = read_commit(folder, step)
    adapter = adapter_of(commit)
    own = {name: tensor for name, tensor in model_tensors(model) if not is_part(name)}
    head, left_out = _MODEL + SCORE_WEIGHT, frozenset[str]()
    if head in own and head not in commit.tensors:  # it begins anew, in the place of one that predicts tokens
        del own[head]
        left_out = frozenset(
            name for name in commit.tensors if name.startswith(_MODEL) and is_head(name.removeprefix(_MODEL))
        )
    device = next(model.parameters()).device
    transposed = {
        f"{_MODEL}{name}.{part}"
        for name, module in model.named_modules()
        if is_transposed(module)
        for part in module._parameters
    }
    _parts_must_fit(commit, adapter, own, transposed, folder)
    # Small, so every rank holds it whole; each merges it into its own rows.
    parts = {
        name: torch.empty(tuple(entry.shape), device=device)
        for name, entry in commit.tensors.items()
        if adapter is not None and name.startswith(_MODEL) and is_part(name)
    }
    # Frozen weights keep the dtype that they came in; where all is trained now, they are fp32 from here on.
    cast = {
        name: torch.empty_like(tensor, dtype=TORCH_DTYPES[commit.tensors[name].dtype], requires_grad=False)
        for name, tensor in own.items()
        if name in commit.tensors and TORCH_DTYPES[commit.tensors[name].dtype] != tensor.dtype
    }
    packed = _places_for_bytes(commit, own)
    whole = {name: tensor for name, tensor in own.items() if packed_name(name) not in packed}
    load_weights(folder, commit.step, whole | parts | cast | packed, left_out)
    with torch.no_grad():
        for name in weights_among(packed):
            bytes_ = local(packed[packed_name(name)]), local(packed[absmax_name(name)])
            local_rows(own[name])[0].copy_(decode(*bytes_, torch.float32))
        for name, tensor in cast.items():
            own[name].copy_(tensor)
        for name in sorted({weight_of(part) for part in parts}):
            a, b, *magnitude = (parts[part] for part in parts_of(name) if part in parts)
            rows, first = local_rows(own[name])
            assert adapter is not None
            own_rows = slice(first, first + len(rows))
            if rows.ndim == 2:
                merged = rows.float().addmm_(b[own_rows], a, alpha=adapter.scale)
            elif len(rows):
                merged = added_to(
                    rows.float(), *of_experts(a, b, adapter.rank, own_rows), adapter.scale, name in transposed
                )
            else:
                continue  # this rank has none of the experts
            if magnitude:
                merged *= (magnitude[0][first : first + len(rows)] / merged.norm(dim=1))[:, None]
            rows.copy_(merged)
        set_magnitudes(model)
    return commit


def _places_for_bytes(commit: Commit, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return memory for the bytes of this rank's rows, by name, for weights that the commit holds in four bits."""
    places = {}
    for weight in weights_among(commit.tensors):
        if weight not in own:
            continue
        need_kernels()
        for name in (packed_name(weight), absmax_name(weight)):
            width = commit.tensors[name].shape[1] if name in commit.tensors else 0
            places[name] = rows_alongside(own[weight], width, torch.uint8, own[weight].device)
    return places


def _parts_must_fit(
    commit: Commit, adapter: Adapter | None, own: dict[str, torch.Tensor], transposed: set[str], folder: str
) -> None:
    """Raises CheckpointMismatch where A is not [rank, inputs], B not [outputs, rank] or, with DoRA, the magnitudes are
    not [outputs] of a weight that is here; of experts held together, A and B have their ranks one after another."""
    if adapter is None:
        return
    wrong = []
    for weight in sorted({weight_of(n) for n in commit.tensors if n.startswith(_MODEL) and is_part(n)}):
        there = tuple(own[weight].shape) if weight in own else ()
        is_matrix = len(there) in (2, 3)
        experts, outputs, inputs = shape_of(there, weight in transposed) if is_matrix else (0, 0, 0)
        a, b, magnitudes = parts_of(weight)
        ranks = adapter.rank * experts
        shapes: dict[str, tuple[int, ...]] = {a: (ranks, inputs), b: (outputs, ranks)}
        if adapter.kind == "dora":
            shapes[magnitudes] = (outputs,)
        for part, expected in shapes.items():
            shape = tuple(commit.tensors[part].shape) if part in commit.tensors else ()
            if not is_matrix or shape != expected:
                wrong.append(f"{part}: shape {list(shape)} beside {weight} of {list(there)}, at rank {adapter.rank}")
    if wrong:
        raise CheckpointMismatch(f"{folder} step {commit.step}", tuple(wrong))
