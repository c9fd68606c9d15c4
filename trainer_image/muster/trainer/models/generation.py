"""Tokens that follow a prompt, chosen one by one: several rows at once, with a key-value cache.

Whoever generates calls the model itself, so that a sharded one gathers its weights as in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from muster.trainer.models.key_value_cache import KeyValueCache

PADDING = -1  # the document of what only fills a row


@dataclass(frozen=True)
class SamplingSettings:
    """Settings by which tokens are chosen."""

    max_tokens: int = 128
    temperature: float = 0.0  # 0 takes the likeliest token
    top_p: float = 1.0  # drawn from the likeliest tokens that have this probability together
    seed: int = 0


class TokenContinuation:
    """Rows of tokens that a model goes on with.

    `pad` fills rows on the left up to the longest. `positions_max` is the model's limit, None for no limit: behind it,
    it goes on from the last half of what it can see. Without `cached` every token is a pass over the whole row.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        pad: int,
        positions_max: int | None,
        device: torch.device,
        cached: bool = True,
    ) -> None:
        self._model, self._pad, self._device, self._cached = model, pad, device, cached
        self._limit = positions_max
        self._rows = [list(prompt) for prompt in prompts]
        self._cache, self._seen = KeyValueCache(), 0

    def next_logits(self) -> Tensor:
        """fp32 [B, vocab]: the logits of the token that follows each row. Collective where the model is sharded."""
        if self._limit is not None and max(map(len, self._rows)) > self._limit:
            self._rows = [row[-max(self._limit // 2, 1) :] for row in self._rows]
            self._cache, self._seen = KeyValueCache(), 0
        longest = max(map(len, self._rows))
        rows = [[self._pad] * (longest - len(row)) + row for row in self._rows]
        seen = self._seen if self._cached else 0
        tokens = torch.tensor([row[seen:] for row in rows], device=self._device)
        places = torch.tensor(
            [[*range(len(row) - longest, len(row))][seen:] for row in self._rows], device=self._device
        )
        documents = torch.where(places < 0, PADDING, 0)
        positions = places.clamp_min(0)
        if not self._cached:
            out: Tensor = self._model(tokens, positions, documents)
            return out[:, -1]
        self._seen = longest
        return self._model(tokens, positions, documents, cache=self._cache)[:, -1]  # type: ignore[no-any-return]

    def append(self, chosen: Sequence[int]) -> None:
        """Let each row go on with a token."""
        for row, token in zip(self._rows, chosen, strict=True):
            row.append(token)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    ends: frozenset[int],
    vocab_size: int,
    sampling: SamplingSettings,
    positions_max: int | None,
    device: torch.device,
    cached: bool = True,
) -> Iterator[int]:
    """The tokens that follow one prompt, which is not empty; the first of `ends` among them is not given and ends it.

    Only the first `vocab_size` tokens are ever chosen: a model may have rows that its tokenizer does not know.
    """
    row = TokenContinuation(model, [prompt], pad=0, positions_max=positions_max, device=device, cached=cached)
    dice = torch.Generator().manual_seed(sampling.seed)
    for _ in range(sampling.max_tokens):
        chosen = choose(row.next_logits()[0, :vocab_size], sampling, dice)
        if chosen in ends:
            return
        row.append([chosen])
        yield chosen


def choose(logits: Tensor, sampling: SamplingSettings, dice: torch.Generator) -> int:
    """The next id, which is the likeliest one at temperature 0, else drawn. `logits` is [vocab]."""
    if sampling.temperature <= 0:
        return int(logits.argmax())
    chances = torch.softmax(logits.float().cpu() / sampling.temperature, dim=0)
    if sampling.top_p < 1:
        chances = likeliest_of(chances, sampling.top_p)
    return int(torch.multinomial(chances, 1, generator=dice))


def likeliest_of(chances: Tensor, top_p: float) -> Tensor:
    """The probabilities [..., vocab] of the fewest tokens that have `top_p` together, and 0 of the others."""
    ordered, ids = chances.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered  # of all that are likelier
    return torch.zeros_like(chances).scatter_(-1, ids, ordered.masked_fill(before >= top_p, 0.0))
