"""A second model as the judge of answers: it reads each one as task reward showed it answers, and scores it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from muster.trainer.data.answers import after_turn
from muster.trainer.data.batch import TokenBatch
from muster.trainer.data.packing import unscored_row
from muster.trainer.data.prompts import ModelPrompt
from muster.trainer.data.tokenizer import Tokenizer
from muster.trainer.models.forward_model import ForwardModel
from muster.trainer.train.writing import WrittenTokens


class RewardScores:
    """The scores of a reward model. `rows_at_once` bounds the answers of a pass."""

    def __init__(self, beside: ForwardModel, tokenizer: Tokenizer, rows_at_once: int) -> None:
        self._beside, self._pad, self._rows_at_once = beside, tokenizer.eos, rows_at_once
        self._after = after_turn(tokenizer)

    @torch.no_grad()
    def of(self, prompts: Sequence[ModelPrompt], written: Sequence[WrittenTokens]) -> Tensor:
        """fp64 [answers]. Collective: every rank gives equally many answers."""
        texts = [self._text(*each) for each in zip(prompts, written, strict=True)]
        groups = (texts[begin : begin + self._rows_at_once] for begin in range(0, len(texts), self._rows_at_once))
        return torch.cat([self._scored(group) for group in groups])

    def _text(self, prompt: ModelPrompt, answer: WrittenTokens) -> list[int]:
        """Prompt and answer as a conversation of the data would be: with what the template writes behind a turn. One
        that was cut off stands as it is."""
        ends = () if answer.end is None else (answer.end, *self._after.get(answer.end, ()))
        return [*prompt.ids, *answer.tokens, *ends]

    def _scored(self, texts: Sequence[Sequence[int]]) -> Tensor:
        longest = max(map(len, texts))
        rows = TokenBatch.of([unscored_row(text, longest, self._pad) for text in texts])
        values = rows.values.to(self._beside.device)
        batch = TokenBatch(values)
        scores: Tensor = self._beside.module(batch.tokens, batch.positions, batch.documents)
        return scores[:, 0, 0].double().cpu()
