"""AdamW's state per weight and its bytes: one rule for the trainer, the memory estimate and checkpoints.

In eight bits a moment is a code of one byte for each value and an fp32 scale for each block of a row: block-wise
dynamic quantisation (Dettmers et al. 2021, arXiv 2110.02861). Blocks never leave their row, so that any sharding by
rows computes the same, and a commit made by some ranks loads into any other number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

# The largest that divides a row is taken. bitsandbytes and torchao know 256 alone, over all values of a shard; rows of
# 896 values (Qwen2.5-0.5B) would keep both moments in fp32. The scale of a block of 64 adds a sixteenth.
BLOCKS: Final = (256, 128, 64)
# Smaller tensors (norms, biases) save nothing worth their error; bitsandbytes' own bound.
EIGHT_BIT_VALUES_MIN: Final = 4096
SCALE_BYTES: Final = 4
# Of a weight that are decoded, rounded or fetched at a time: enough to keep a GPU busy, some 80 MiB of fp32 at most.
UPDATE_VALUES: Final = 2**22


def block_of(shape: Sequence[int]) -> int:
    """Values of a block of this weight's moments in eight bits; 0 where they are kept in fp32."""
    if len(shape) < 2 or prod(shape) < EIGHT_BIT_VALUES_MIN:
        return 0
    return next((block for block in BLOCKS if shape[-1] % block == 0), 0)


def eight_bit_moments_bytes(shape: Sequence[int]) -> int:
    """Return the bytes of both moments of a weight that AdamW in eight bits updates."""
    block, values = block_of(shape), prod(shape)
    return 2 * (values + values // block * SCALE_BYTES) if block else 8 * values
