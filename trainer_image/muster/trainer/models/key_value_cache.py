"""Keys and values of the tokens that a model has read, so that each new token costs a pass over that token alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class KeyValueCache:
    """The keys and values of all tokens of some rows so far. A pass with a cache gives the logits of its last token.

    Our own decoder keeps them by attention layer; a model of transformers keeps an object of its own.
    """

    documents: Tensor | None = None  # integers [B, S] of all tokens so far; negative is padding
    of_layers: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)  # [B, KV, S, head_dim] each
    of_transformers: Any = None

    def extend(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Remember the keys and values [B, KV, T, head_dim] of new tokens; returns those of all tokens."""
        if layer in self.of_layers:
            keys, values = self.of_layers[layer]
            key, value = torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)
        self.of_layers[layer] = key, value
        return key, value

    def read(self, documents: Tensor) -> Tensor:
        """Note that the tokens of `documents` [B, T] are read now; returns the documents of all tokens, [B, S]."""
        self.documents = documents if self.documents is None else torch.cat((self.documents, documents), dim=1)
        return self.documents
