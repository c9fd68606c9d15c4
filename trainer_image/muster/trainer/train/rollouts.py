"""Rollouts that task grpo learns from: the model's own answers to the step's prompts, with their advantages.

The random numbers of an answer depend only on the seed, the number of its prompt and its own number. So a resumed job
draws the same answers, whichever rank computes a prompt and however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from muster.recipe.objectives import Grpo
from muster.recipe.training import TrainingConfig
from muster.trainer.data import SampleSet, StepBatch
from muster.trainer.data.batch import TokenBatch
from muster.trainer.data.packing import PackedSample, unscored_row
from muster.trainer.data.prompts import ModelPrompt
from muster.trainer.data.shuffle import mix
from muster.trainer.models.generation import likeliest_of
from muster.trainer.train.answering import AnswerScoring
from muster.trainer.train.reward_model import RewardScores
from muster.trainer.train.tasks.grpo import RolloutBatch
from muster.trainer.train.writing import ROWS_AT_ONCE, Choose, TokenWriter, WrittenTokens

SAME = 1e-8  # rewards that differ by less differ by rounding
STD_FLOOR = 1e-4  # added to a standard deviation before it divides, as in TRL
# When in so many steps in a row no prompt had answers of different rewards, nothing was learnt in them, and it is said.
SILENT_STEPS = 10


class RolloutMaker:
    """Lets the model answer the prompts of each step, and rewards the answers."""

    def __init__(
        self,
        training: TrainingConfig,
        data: SampleSet,
        scoring: AnswerScoring,
        module: nn.Module,
        writer: TokenWriter,
        pad: int,
        judge: RewardScores | None = None,
    ) -> None:
        assert training.grpo is not None, "only task grpo answers while it trains"
        self._judge = judge
        self._training, self._config, self._data = training, training.grpo, data
        self._scoring, self._module, self._writer, self._pad = scoring, module, writer, pad
        self._silent = 0  # steps in a row in which no rewards differed

    def of(self, batch: StepBatch) -> StepBatch:
        """The step's prompts with their answers, as rows to learn from. Collective: every rank makes equally many
        passes."""
        each = self._config.completions
        prompts = [self._data.prompt(number) for number in batch.sample_ids]
        blanks = len(batch.micro) - len(prompts)
        # Without prompts of its own a rank fills up with the first one, so that it makes the others' passes.
        asked = [*prompts, *[self._data.prompt(0)] * blanks]
        keys = [mix(mix(self._training.seed) ^ mix(number)) for number in batch.sample_ids]
        keys += [0] * blanks
        rows = [prompt for prompt in asked for _ in range(each)]
        luck = [mix(key ^ mix(number)) for key in keys for number in range(each)]
        written = self._written(rows, luck)
        own = len(prompts) * each
        judged = None if self._judge is None else self._judge.of(rows, written)[:own]
        made = self._rewarded(rows[:own], written[:own], judged)
        micro = self._micro(rows, written, made, batch.micro[0].tokens.device)
        tokens = sum(len(row.ids) + len(answer.tokens) for row, answer in zip(rows[:own], written, strict=False))
        size = self._training.batch.micro_batch
        firsts = tuple(batch.first_rows[row // each] * each + row % each for row in range(0, len(rows), size))
        return replace(batch, micro=micro, tokens=tokens, first_rows=firsts)

    def watch(self, values: dict[str, float], say: Callable[[str], None]) -> None:
        """Say so where rewards don't differ for a while. `values` is what a step reported."""
        self._silent = self._silent + 1 if values.get("zero_variance") == 1.0 else 0
        if self._silent and self._silent % SILENT_STEPS == 0:
            say(
                f"grpo: warning: in the last {self._silent} steps all answers to each prompt had the same reward "
                f"(mean {values.get('reward', 0.0):.3g}), so nothing was learnt: the prompts are too easy or too hard "
                "for this model, or the verifiers score something that it never or always does"
            )

    def _written(self, rows: Sequence[ModelPrompt], luck: Sequence[int]) -> list[WrittenTokens]:
        training, at_once = self._module.training, ROWS_AT_ONCE * self._training.batch.micro_batch
        self._module.eval()
        config = self._config
        choose = drawn(luck, config.temperature, config.top_p)
        written = self._writer.write([row.ids for row in rows], config.max_tokens, choose, at_once)
        self._module.train(training)
        return written

    def _rewarded(
        self, rows: Sequence[ModelPrompt], written: Sequence[WrittenTokens], judged: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """fp32 advantages [answers], and what is told of each, in the order of the objective's names. `judged` are the
        reward model's scores fp64 [answers], where there is one."""
        scores, limits = self._scoring.scores(rows, written)
        rewards = self._scoring.weighted(scores)
        if judged is not None and self._config.reward_model is not None:
            rewards = rewards + self._config.reward_model.weight * judged
            scores = torch.cat((scores, judged[:, None]), dim=1)
        advantage, std = advantages(rewards, self._config)
        facts = [[float(row.finished), float(len(row.tokens) + row.finished)] for row in written]
        of_group = torch.stack((rewards, std, (std < SAME).double()), dim=1)
        reported = torch.cat((of_group, torch.tensor(facts).double(), scores, limits), dim=1)
        return advantage.float(), reported.float()

    def _micro(
        self,
        rows: Sequence[ModelPrompt],
        written: Sequence[WrittenTokens],
        made: tuple[Tensor, Tensor],
        device: torch.device,
    ) -> tuple[TokenBatch, ...]:
        advantage, reported = made
        own, names = len(advantage), reported.shape[1]
        size = self._training.batch.micro_batch
        batches = []
        for begin in range(0, len(rows), size):
            here = slice(begin, begin + size)
            counted = [number < own for number in range(len(rows))[here]]
            some = list(zip(rows[here], written[here], counted, strict=True))
            longest = max(len(prompt.ids) + len(answer.tokens) + 1 for prompt, answer, _ in some)
            samples = [self._row(prompt, answer, counts, longest) for prompt, answer, counts in some]
            blank = len(samples) - len(advantage[here])
            batches.append(
                RolloutBatch(
                    TokenBatch.of(samples).values.to(device),
                    torch.cat((advantage[here], torch.zeros(blank))).to(device),
                    torch.cat((reported[here], torch.zeros(blank, names))).to(device),
                    torch.tensor(counted, dtype=torch.float32).to(device),
                )
            )
        return tuple(batches)

    def _row(self, prompt: ModelPrompt, answer: WrittenTokens, counts: bool, length: int) -> PackedSample:
        ends = [] if answer.end is None else [answer.end]
        whole = [*prompt.ids, *answer.tokens, *ends]
        row = unscored_row(whole, length, self._pad)
        if counts and (answer.finished or not self._config.mask_truncated):
            row.labels[len(prompt.ids) - 1 : len(whole) - 1] = whole[len(prompt.ids) :]
        return row


def advantages(rewards: Tensor, config: Grpo) -> tuple[Tensor, Tensor]:
    """Return the advantages of rewards [prompts × completions], and the standard deviation of the rewards of each one's
    prompt."""
    if not len(rewards):  # of a rank without prompts of its own
        return rewards, rewards
    groups = rewards.view(-1, config.completions)
    mean, std = groups.mean(1, keepdim=True), groups.std(1, keepdim=True)
    normalized = groups - mean
    if config.scale_rewards:
        normalized = normalized / (std + STD_FLOOR)
    return normalized.flatten(), std.expand_as(groups).flatten()


def drawn(luck: Sequence[int], temperature: float = 1.0, top_p: float = 1.0) -> Choose:
    """Draw each row's tokens by the model's probabilities at a temperature, of the likeliest that have the probability
    `top_p` together. The luck of row n at its token t is a hash of luck[n] and t: it does not depend on what else is in
    the batch."""

    def choose(logits: Tensor, first: int, turn: int) -> list[int]:
        of_rows = luck[first : first + len(logits)]
        points = torch.tensor([mix(each ^ mix(turn)) / 2**64 for each in of_rows], dtype=torch.float64)
        chances = torch.softmax(logits.double() / temperature, dim=-1)
        below = (chances if top_p == 1 else likeliest_of(chances, top_p)).cumsum(dim=-1)
        choices = torch.searchsorted(below, points.to(below.device)[:, None] * below[:, -1:], right=True)
        return [min(int(token), logits.shape[1] - 1) for token in choices[:, 0].tolist()]

    return choose
