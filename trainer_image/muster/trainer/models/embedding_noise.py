"""NEFTune: noise on the embeddings while training (Jain et al. 2023, arXiv 2310.05914)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


def add_noise(embedding: nn.Module, alpha: float) -> None:
    """Have a module that looks tokens up, [B, T, dim], add noise while it is training: uniform within
    alpha / sqrt(T × dim), as transformers does it.

    It is drawn by torch's own generator, which each pass seeds. To be called before the model is sharded.
    """

    def with_noise(module: nn.Module, _: Any, embedded: Tensor) -> Tensor | None:
        if not module.training:
            return None
        bound = alpha / math.sqrt(embedded.shape[1] * embedded.shape[2])
        return embedded + torch.zeros_like(embedded).uniform_(-bound, bound)

    embedding.register_forward_hook(with_noise)
