"""The optimizer's state while it is loaded: what a commit must have of it, and the tensors that it is loaded into."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import nn

from muster.trainer.checkpoint.failures import CheckpointMismatch, UnusableCommit
from muster.trainer.checkpoint.fit import ExpectedTensor
from muster.trainer.checkpoint.tensors import DTYPES, trained_parameters
from muster.words.checkpoint import Commit

ADAM_STATE = frozenset({"step", "exp_avg", "exp_avg_sq"})
State = dict[nn.Parameter, dict[str, torch.Tensor]]  # of each trained parameter by the full name in the commit

# By these a step is computed on the hardware of now; they are no state of training.
_OF_THE_HARDWARE: Final = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@runtime_checkable
class DescribesState(Protocol):
    """An optimizer that says what it keeps before its first step. Of any other, state is one number, or of the shape of
    its weight."""

    def state_layout(self, parameter: nn.Parameter) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The dtype and the global shape of each tensor, by name."""

    def new_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """The tensors, sharded as the parameter is."""


def wanted_state(commit: Commit, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, ExpectedTensor]:
    """Return the dtype and the shape that each tensor of the optimizer's state in a commit must have, by full name."""
    expected = {}
    for name, parameter in trained_parameters(model, optimizer):
        names = state_names(commit, name)
        if isinstance(optimizer, DescribesState) and names:
            for kind, (dtype, shape) in optimizer.state_layout(parameter).items():
                expected[f"optimizer/{name}/{kind}"] = ExpectedTensor(DTYPES[dtype], shape)
            continue
        for full_name in names:
            entry = commit.tensors[full_name]
            expected[full_name] = ExpectedTensor(entry.dtype, tuple(parameter.shape) if entry.shape else ())
    return expected


def expect_whole_state(commit: Commit, model: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> None:
    """Raises UnusableCommit where a trained parameter has less optimizer state than its optimizer keeps."""
    adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    for name, parameter in trained_parameters(model, optimizer):
        kinds = ADAM_STATE if adam else frozenset[str]()
        if isinstance(optimizer, DescribesState):
            kinds = frozenset(optimizer.state_layout(parameter))
        stored = {full_name.rpartition("/")[2] for full_name in state_names(commit, name)}
        if name not in commit.stateless and (not stored or not kinds <= stored):
            missing = ", ".join(sorted(kinds - stored)) or "everything"
            raise UnusableCommit(f"{where}: of the optimizer's state of {name}, {missing} is missing")


def state_names(commit: Commit, parameter: str) -> list[str]:
    """The full names of what a commit has of a parameter's state."""
    prefix = f"optimizer/{parameter}/"
    return [name for name in commit.tensors if name.startswith(prefix) and "/" not in name[len(prefix) :]]


def state_to_fill(commit: Commit, model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the state that the commit has for each trained parameter, by full name: the live tensor, or a new one of
    its kind."""
    by_parameter: dict[str, list[str]] = {}
    for full_name in commit.tensors:
        if full_name.startswith("optimizer/"):
            by_parameter.setdefault(full_name.removeprefix("optimizer/").rpartition("/")[0], []).append(full_name)
    state: State = {}
    for name, parameter in trained_parameters(model, optimizer):
        names = by_parameter.get(name, [])
        live = optimizer.state.get(parameter, {})
        if isinstance(optimizer, DescribesState):
            live = live or (optimizer.new_state(parameter) if names else {})
            state[parameter] = {full_name: live[full_name.rpartition("/")[2]] for full_name in names}
        else:
            state[parameter] = _of_a_stranger(commit, parameter, names, live, optimizer)
    return state


def state_bytes(tensor: torch.Tensor, optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the size in bytes, over all ranks, of each tensor that an optimizer will keep for one of a model's. A
    buffer has none. For an optimizer that does not say what it keeps, AdamW's two moments are assumed."""
    if not (isinstance(tensor, nn.Parameter) and tensor.requires_grad):
        return []
    if isinstance(optimizer, DescribesState):
        return [math.prod(shape) * dtype.itemsize for dtype, shape in optimizer.state_layout(tensor).values()]
    return [tensor.numel() * tensor.element_size()] * 2


def adopt_state(optimizer: torch.optim.Optimizer, state: State) -> None:
    for parameter, tensors in state.items():
        if tensors:
            optimizer.state[parameter] = {name.rpartition("/")[2]: tensor for name, tensor in tensors.items()}
        else:
            optimizer.state.pop(parameter, None)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each of the optimizer's groups as JSON types. A scheduler changes them from step to step.
    What is no number, text or list of these (a function) is the program's to make again, as it made it at first."""
    return [
        {
            name: value
            for name in group
            if name not in _OF_THE_HARDWARE and (value := _as_json(group[name])) is not _NONE
        }
        for group in optimizer.param_groups
    ]


def settings_to_adopt(
    commit: Commit, model: nn.Module, optimizer: torch.optim.Optimizer, where: str
) -> list[dict[str, Any]]:
    """Return the settings that the commit has for each of the optimizer's groups; none for a group of which it knows
    nothing. Groups are matched by their parameters, whatever their order. Raises CheckpointMismatch where the commit
    has several settings for one group, or one of another kind than the optimizer's."""
    names = {parameter: name for name, parameter in trained_parameters(model, optimizer)}
    there = {name: group.settings for group in commit.optimizer_groups for name in group.parameters}
    groups, wrong = [], []
    for number, group in enumerate(optimizer.param_groups):
        settings = [there[names[parameter]] for parameter in group["params"] if names[parameter] in there]
        if any(each != settings[0] for each in settings):
            wrong.append(
                f"optimizer.param_groups[{number}]: the checkpoint has several groups, of different settings, for its "
                "parameters"
            )
        groups.append(settings[0] if settings else {})
        wrong += [
            f"optimizer.param_groups[{number}]: {name} is {repr(value)[:100]} in the checkpoint, and "
            f"{repr(group[name])[:100]} here"
            for name, value in groups[-1].items()
            if name in group and name not in _OF_THE_HARDWARE and not _is_of_a_kind(group[name], value)
        ]
    if wrong:
        raise CheckpointMismatch(where, tuple(wrong))
    return groups


def adopt_settings(optimizer: torch.optim.Optimizer, settings: Iterable[Mapping[str, Any]]) -> None:
    """Set what `settings_to_adopt` returned."""
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        for name, value in saved.items():
            live = group.get(name)
            if isinstance(live, torch.Tensor) and isinstance(value, int | float):
                live.fill_(float(value))  # a captured graph reads it where it lies
            elif name not in _OF_THE_HARDWARE:
                group[name] = tuple(value) if isinstance(live, tuple) else value


def _is_of_a_kind(live: Any, saved: Any) -> bool:
    """Return whether a setting that was saved can take the place of one that the optimizer has."""
    if isinstance(live, tuple | list):
        fits = isinstance(saved, list) and len(saved) == len(live)
        return fits and all(map(_is_of_a_kind, live, saved))
    if isinstance(live, bool | str):
        return isinstance(saved, type(live))
    if isinstance(live, int | float | torch.Tensor):
        is_number = isinstance(saved, int | float) and not isinstance(saved, bool) and abs(saved) <= sys.float_info.max
        return is_number and (not isinstance(live, torch.Tensor) or _can_hold(live, float(saved)))
    return live is None


def _can_hold(tensor: torch.Tensor, value: float) -> bool:
    try:
        torch.empty((), dtype=tensor.dtype).fill_(value)
    except RuntimeError:  # it overflows
        return False
    return True


_NONE: Final = object()  # no value of JSON's


def _as_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else _NONE
    if isinstance(value, tuple | list):
        values = [_as_json(each) for each in value]
        return _NONE if _NONE in values else values
    if isinstance(value, float):
        return value if math.isfinite(value) else _NONE
    return value if value is None or isinstance(value, bool | int | str) else _NONE


def _of_a_stranger(
    commit: Commit,
    parameter: nn.Parameter,
    names: Iterable[str],
    live: Mapping[str, object],
    optimizer: torch.optim.Optimizer,
) -> dict[str, torch.Tensor]:
    """The same for an optimizer of torch's: its names for what it keeps tell nothing of where it wants it."""
    group = next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
    on_device = bool(group.get("fused") or group.get("capturable"))
    state = {}
    for full_name in names:
        dtype, shape = _TORCH_DTYPES[commit.tensors[full_name].dtype], tuple(commit.tensors[full_name].shape)
        there = live.get(full_name.rpartition("/")[2])
        if isinstance(there, torch.Tensor) and (there.dtype, tuple(there.shape)) == (dtype, shape):
            state[full_name] = there
        elif shape:
            state[full_name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        else:
            state[full_name] = torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
    return state
