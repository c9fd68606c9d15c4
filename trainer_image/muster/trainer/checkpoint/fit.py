"""Does a commit fit the model? Every difference is found before a byte is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from muster.words.checkpoint import TensorEntry


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor of the live model or optimizer: global shape, and dtype as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]


def differences(expected: Mapping[str, ExpectedTensor], there: Mapping[str, TensorEntry]) -> tuple[str, ...]:
    """One line for each tensor that is missing, left over, or of another shape or dtype."""
    problems = []
    for name in sorted({*expected, *there}):
        ours, theirs = expected.get(name), there.get(name)
        if theirs is None and ours is not None:
            problems.append(f"{name}: the model has it ({ours.dtype} {_shape(ours.shape)}), the checkpoint does not")
        elif ours is None and theirs is not None:
            problems.append(
                f"{name}: the checkpoint has it ({theirs.dtype} {_shape(theirs.shape)}), the model does not"
            )
        elif ours is not None and theirs is not None and ours.shape != tuple(theirs.shape):
            problems.append(
                f"{name}: shape {_shape(ours.shape)} in the model, {_shape(theirs.shape)} in the checkpoint"
            )
        elif ours is not None and theirs is not None and ours.dtype != theirs.dtype:
            problems.append(f"{name}: dtype {ours.dtype} in the model, {theirs.dtype} in the checkpoint")
    return tuple(problems)


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
