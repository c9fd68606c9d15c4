"""The decoder's small parts. Weights are cast to the activations' dtype where they are used.

So master weights may stay fp32 (one rank, DDP) or arrive already cast (FSDP's mixed precision), and the model's
arithmetic is the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x Wᵀ, without a bias. The weight is [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Module):
    """Looks up tokens [B, T] and returns [B, T, dim] in `dtype`. The weight is [vocab, dim]."""

    def __init__(self, vocab_size: int, dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight).to(self.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in fp32 and returned in x's dtype (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): down(silu(gate x) * up x)."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.gate_proj = Linear(dim, ffn_dim)
        self.up_proj = Linear(dim, ffn_dim)
        self.down_proj = Linear(ffn_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
