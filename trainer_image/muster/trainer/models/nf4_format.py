"""NF4 as commits hold it, in names and numbers alone: exporting needs no torch.

In the place of `<module>.weight` [outputs, inputs] stand `<module>.weight_nf4` [outputs, inputs / 2], two values to a
byte, the first in the upper half, and `<module>.weight_absmax` [outputs, inputs / 64 x 4], the bytes of one fp32 for
each block of 64 values. A value is its block's fp32 times one of 16 numbers (Dettmers et al. 2023, arXiv 2305.14314,
appendix E).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BLOCK: Final = 64
ABSMAX_BYTES: Final = 4
_PACKED, _ABSMAX = "_nf4", "_absmax"
CODE: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def packed_name(weight: str) -> str:
    return weight + _PACKED


def absmax_name(weight: str) -> str:
    return weight + _ABSMAX


def weights_among(names: Iterable[str]) -> list[str]:
    """The weights, by the names that they would have, of which these names hold the bytes."""
    return [name.removesuffix(_PACKED) for name in names if name.endswith(f".weight{_PACKED}")]


def decode(packed: NDArray[np.uint8], absmax: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[outputs, inputs] in fp32."""
    import numpy as np

    rows, half = packed.shape
    halves = np.stack((packed >> 4, packed & 15), axis=-1).reshape(rows, -1, BLOCK)
    scales = np.ascontiguousarray(absmax).view("<f4").reshape(rows, -1, 1)
    weight: NDArray[np.float32] = (np.array(CODE, np.float32)[halves] * scales).reshape(rows, 2 * half)
    return weight
