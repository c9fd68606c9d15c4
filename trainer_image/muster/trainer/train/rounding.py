"""Rounding fp32 to bf16 up or down at random, so that the mean is right: what lets weights be kept in bf16 alone.

A weight in bf16 has 8 bits; an update smaller than 1/512 of it would always be rounded away. Rounded up with the
probability of the remainder, it counts on the average (Gupta et al. 2015, arXiv 1502.02551; Zamirai et al. 2020,
arXiv 2010.06192). The dice are thrown anew for each block of rows of each weight at each step, from a key of their own:
the result depends on neither the sharding nor where a run was interrupted.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """fp32 values to bf16. `noise` holds int32 from 0 to 65,535, uniform. `values` is used up."""
    bits = values.view(torch.int32)
    # The lower half of the bits is the remainder; added to noise it carries into the upper half with its probability.
    return bits.add_(noise).bitwise_and_(-65_536).view(torch.float32).to(torch.bfloat16)


class RoundingNoise:
    """Noise for rounding, by key. `device` is where it is made; a GPU makes other numbers than a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device)

    def of(self, key: str, shape: tuple[int, ...]) -> Tensor:
        """int32 from 0 to 65,535 of this shape; the same for the same key and shape."""
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
        self._generator.manual_seed(seed)
        empty = torch.empty(shape, dtype=torch.int32, device=self._generator.device)
        return empty.random_(0, 65_536, generator=self._generator)
