"""Lets the model that is being trained write: several prompts at once, on all ranks in step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from muster.trainer.data import Tokenizer
from muster.trainer.models.definition import ModelDefinition
from muster.trainer.models.generation import TokenContinuation
from muster.trainer.parallel.groups import groups

# Rows without gradients keep their keys and values alone, a small part of what a row that is learnt from keeps: so many
# times as many are written at once. Half would waste a GPU on short rows; at double, long answers of a model with as
# many key heads as heads would need what a micro-batch does.
ROWS_AT_ONCE = 8

# The next id of each row, of logits [B, vocab], the number of the first of these rows, and how many ids went before.
Choose = Callable[[Tensor, int, int], list[int]]


class WrittenTokens(NamedTuple):
    """Tokens that followed a prompt, and the token by which the model ended them; None where they were cut off."""

    tokens: list[int]
    end: int | None

    @property
    def finished(self) -> bool:
        """Return whether the model ended the text itself."""
        return self.end is not None


class TokenWriter:
    """Continues prompts token by token, with a key-value cache. `module` is the model without DDP's wrapper; whoever
    calls decides whether it drops out. `ends` are the tokens that end an answer.

    A sharded model's pass needs all ranks: they make equally many, as long as any rank has a row that goes on.
    """

    def __init__(
        self,
        module: nn.Module,
        definition: ModelDefinition,
        tokenizer: Tokenizer,
        ends: frozenset[int],
        device: torch.device,
    ) -> None:
        self._module, self._definition, self._device = module, definition, device
        # A model may have rows that stand for nothing.
        self._vocabulary = min(tokenizer.vocab_size, definition.vocab_size)
        self._ends = ends

    @torch.no_grad()
    def write(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, choose: Choose, at_once: int | None = None
    ) -> list[WrittenTokens]:
        """Return the continuation of each prompt, computing `at_once` of them in a pass, or all. Collective: every rank
        gives equally many prompts, of any length."""
        # Rows of different lengths are padded, which only models that keep documents apart are sure to bear.
        size = (at_once or len(prompts)) if self._definition.packs else 1
        groups = ((first, prompts[first : first + size]) for first in range(0, len(prompts), size))
        return [row for first, group in groups for row in self._rows(group, max_tokens, choose, first)]

    def _rows(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, choose: Choose, first: int
    ) -> list[WrittenTokens]:
        rows = TokenContinuation(self._module, prompts, 0, self._definition.position_limit, self._device)
        tokens = [list[int]() for _ in prompts]
        ends: list[int | None] = [None for _ in prompts]
        for turn in range(max_tokens):
            chosen = choose(rows.next_logits()[:, : self._vocabulary], first, turn)
            for number, token in enumerate(chosen):
                if ends[number] is None and token in self._ends:
                    ends[number] = token
                if ends[number] is None:
                    tokens[number].append(token)
            if not groups().all.any(None in ends, self._device):
                break
            rows.append(chosen)
        return [WrittenTokens(*row) for row in zip(tokens, ends, strict=True)]


def likeliest(logits: Tensor, first: int, turn: int) -> list[int]:
    """The likeliest token of each row."""
    return [int(token) for token in logits.argmax(dim=-1).tolist()]
