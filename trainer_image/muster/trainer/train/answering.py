"""Evaluation of the answers that the model gives to the prompts of evaluation sets: verifiers score each answer."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from muster.recipe.evaluation_config import EvaluationSet
from muster.recipe.training import TrainingConfig
from muster.recipe.verifiers import ANSWER_METRICS, LIMITS, Verifier, score_metrics
from muster.trainer.config import DataParallel
from muster.trainer.data import Tokenizer
from muster.trainer.data.prompts import ModelPrompt, PromptSet
from muster.trainer.errors import UserError
from muster.trainer.train.writing import TokenWriter, WrittenTokens, likeliest
from muster.trainer.verify.limits import LimitWarnings
from muster.trainer.verify.scorers import AnswerScore, AnswerScorer, ModelCompletion, scorer
from muster.trainer.verify.unit_tests import what_is_closed

# Of programs that run at the same time, on each rank: they are short, and mostly wait to be started.
PROGRAMS_MAX = 8


class AnswerScores(NamedTuple):
    """Scores that several verifiers give to answers."""

    values: Tensor  # fp64 [answers, verifiers], each between 0 and 1
    limits: Tensor  # fp64 [answers, limit_metrics of the verifiers]: 1 where it stopped the answer's program


class AnswerScoring:
    """Scores answers by several verifiers. `say` is told of programs that reach a limit."""

    def __init__(
        self, verifiers: Sequence[Verifier], tokenizer: Tokenizer, say: Callable[[str], None] | None = None
    ) -> None:
        self._warnings = {
            number: LimitWarnings(each.called, each.unit_tests, say)
            for number, each in enumerate(verifiers)
            if each.unit_tests is not None
        }
        self.verifiers = tuple(verifiers)
        self._scorers = [scorer(each) for each in verifiers]
        self._tokenizer = tokenizer

    def scores(self, prompts: Sequence[ModelPrompt], written: Sequence[WrittenTokens]) -> AnswerScores:
        answers = [
            ModelCompletion(self._tokenizer.decode(prompt.ids), self._tokenizer.decode(row.tokens), prompt.columns)
            for prompt, row in zip(prompts, written, strict=True)
        ]
        pairs = list(itertools.product(answers, self._scorers))
        if self._warnings:  # of programs, which take their time
            with ThreadPoolExecutor(min(PROGRAMS_MAX, os.cpu_count() or 1)) as threads:
                judged = list(threads.map(_scored, pairs))
        else:
            judged = [_scored(pair) for pair in pairs]
        by_verifier = [judged[number :: len(self._scorers)] for number in range(len(self._scorers))]
        for number, warnings in self._warnings.items():
            warnings.note([(one.text, each.limit) for one, each in zip(answers, by_verifier[number], strict=True)])
        limits = [[each.limit == limit for each in by_verifier[n]] for n in self._warnings for limit in LIMITS]
        return AnswerScores(
            torch.tensor([each.value for each in judged], dtype=torch.float64).view(len(answers), len(self._scorers)),
            torch.tensor(limits, dtype=torch.float64).view(len(limits), len(answers)).T,
        )

    def weighted(self, scores: Tensor) -> Tensor:
        """fp64 [answers]: the sums of scores [answers, verifiers] by their verifiers' weights."""
        return scores @ torch.tensor([each.weight for each in self.verifiers], dtype=torch.float64)


@dataclass(frozen=True)
class AnsweredSet:
    """A set whose prompts are answered."""

    name: str
    prompts: PromptSet
    samples: int  # the most that are answered
    max_tokens: int
    scoring: AnswerScoring

    @property
    def count(self) -> int:
        return min(self.samples, len(self.prompts))

    def metrics(self) -> list[str]:
        return [f"{self.name}/{metric}" for metric in score_metrics(self.scoring.verifiers)]


class AnswerEvaluator:
    """Answers the first prompts of each set by the likeliest tokens, dealt to the data-parallel shares in turn. Every
    rank makes equally many passes, filled up with rows that nobody looks at. `tokens_at_once` bounds the tokens of all
    rows of a pass. `decides` tells that one of the metrics is what the best commit is judged by."""

    def __init__(
        self,
        sets: Sequence[AnsweredSet],
        module: nn.Module,
        writer: TokenWriter,
        division: DataParallel,
        tokens_at_once: int,
        device: torch.device,
        decides: bool = False,
    ) -> None:
        self.decides = decides
        self._sets, self._module, self._writer = tuple(sets), module, writer
        self._division, self._tokens_at_once, self._device = division, tokens_at_once, device

    def run(self, total: Callable[[Tensor], list[float]]) -> dict[str, float]:
        """The metrics of all sets. Collective. `total` adds a vector up over all ranks."""
        training = self._module.training
        self._module.eval()
        sums = [self._summed(each) for each in self._sets]
        self._module.train(training)
        totals = iter(total(torch.cat(sums).to(self._device)))
        values: dict[str, float] = {}
        for each in self._sets:
            count, *of_metrics = itertools.islice(totals, 1 + len(each.metrics()))
            values |= {name: value / count for name, value in zip(each.metrics(), of_metrics, strict=True) if count}
        return values

    def _summed(self, of: AnsweredSet) -> Tensor:
        """fp64: how many answers this rank gave, and the sum of each metric over them."""
        prompts, written = list[ModelPrompt](), list[WrittenTokens]()
        for own, group in self._groups(of):
            rows = self._writer.write([prompt.ids for prompt in group], of.max_tokens, likeliest)
            prompts += group[:own]
            written += rows[:own]
        sums = torch.zeros(1 + len(of.metrics()), dtype=torch.float64)
        if prompts:  # a rank may have none where there are few
            scores, limits = of.scoring.scores(prompts, written)
            lengths = torch.tensor([[float(row.finished), float(len(row.tokens))] for row in written]).double()
            by_answer = torch.cat((scores, of.scoring.weighted(scores)[:, None], lengths, limits), dim=1)
            sums[0], sums[1:] = len(prompts), by_answer.sum(0)
        return sums

    def _groups(self, of: AnsweredSet) -> Iterator[tuple[int, list[ModelPrompt]]]:
        """The prompts of each pass, and how many of them are this rank's own; the rest only fills it."""
        # Prompts of about one length share a pass.
        by_length = sorted((of.prompts[number] for number in range(of.count)), key=lambda prompt: len(prompt.ids))
        longest = len(by_length[-1].ids) + of.max_tokens
        size, shares = self._division.size, self._division.shares
        rows = max(1, min(self._tokens_at_once // longest, math.ceil(len(by_length) / size)))
        passes = math.ceil(len(by_length) / (size * rows))
        for own in [*(by_length[share::size] for share in shares), *[[]] * self._division.blank_shares]:
            for number in range(passes):
                some = own[number * rows : (number + 1) * rows]
                yield len(some), [*some, *[by_length[0]] * (rows - len(some))]


def answered_sets(
    sets: Mapping[str, EvaluationSet],
    samples: int,
    prompts: Mapping[str, PromptSet],
    tokenizer: Tokenizer,
    say: Callable[[str], None],
) -> list[AnsweredSet]:
    """The sets of an evaluation whose prompts are answered. `samples` is how many, where a set says nothing."""
    answered = []
    for name, each in sets.items():
        if (asked := each.answers) is not None:
            scoring = AnswerScoring(asked.verifiers, tokenizer, say)
            answered.append(AnsweredSet(name, prompts[name], each.samples or samples, asked.max_tokens, scoring))
    return answered


def must_be_able_to_verify(training: TrainingConfig, report: Callable[[str], None]) -> None:
    """Raises UserError where this machine can't run what a verifier needs; says what programs are kept from."""
    sets = training.evaluation.sets.values() if training.evaluation else ()
    verifiers = [each for one in sets if one.answers for each in one.answers.verifiers]
    if any(each.unit_tests for each in (*verifiers, *(training.grpo.verifiers if training.grpo else ()))):
        try:
            report(f"verifier unitTests: programs run without {'; '.join(what_is_closed())}")
        except ValueError as error:
            raise UserError(str(error)) from None


def _scored(pair: tuple[ModelCompletion, AnswerScorer]) -> AnswerScore:
    completion, by = pair
    return by.score(completion)


assert ANSWER_METRICS == ("score", "finished", "answer_tokens"), "in the order of _summed"
