"""Pooling of a text's scores: it is scored at its last token that is not the padding token, as scoring.py says."""

from __future__ import annotations

import torch
from torch import Tensor


def document_scores(scores: Tensor, tokens: Tensor, documents: Tensor, pad: int) -> Tensor:
    """The scores of whole documents, of those at each token.

    The shapes are scores [B, T, N], tokens and documents [B, T]. Returns [B, T, N], where [b, d] are the scores of the
    document d of row b, as far as there is one.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    counted = (documents >= 0) & (tokens != pad)
    last = torch.zeros_like(tokens).scatter_reduce(1, documents.clamp_min(0), places * counted, "amax")
    return scores.gather(1, last[..., None].expand(-1, -1, scores.shape[-1]))
