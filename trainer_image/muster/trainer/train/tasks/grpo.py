"""Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300): of several answers to one prompt, those with
the larger rewards are made likelier, as far as the clipped ratio of probabilities goes.

What is learnt from are the rows that train/rollouts.py makes. On held-out data the loss is the cross-entropy of its own
answers: how far the model has come from speaking like them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from muster.recipe.objectives import Grpo
from muster.recipe.verifiers import limit_metrics
from muster.trainer.data.batch import TokenBatch
from muster.trainer.data.packing import IGNORED
from muster.trainer.models.forward_model import ForwardModel
from muster.trainer.models.lora import adapter_off
from muster.trainer.train.tasks.answers import cross_entropies
from muster.trainer.train.tasks.objective import BatchLosses

# Metrics of each answer, alongside the score of each verifier and the limits that stopped programs.
REPORTED = ("reward", "reward_std", "zero_variance", "finished", "answer_tokens")


class RolloutBatch(TokenBatch):
    """Rows of a prompt and an answer each, of which the answer is scored. `advantages` are fp32 [B], and `reported`
    fp32 [B, names] their metrics. `before` are the log-probabilities of the tokens, fp32 [B, T], that the model
    gave them before the first update, and `referred` those of the reference; None until they are known."""

    __slots__ = ("advantages", "before", "counted", "referred", "reported")

    def __init__(self, values: Tensor, advantages: Tensor, reported: Tensor, counted: Tensor) -> None:
        """`counted` [B] is 1 for each row that is an answer, and 0 for one that only fills the batch."""
        super().__init__(values)
        self.advantages, self.reported, self.counted = advantages, reported, counted
        self.before: Tensor | None = None
        self.referred: Tensor | None = None


class GrpoObjective:
    """Objective of GRPO: how much likelier the better answers of each prompt become. The reference is the model without
    its adapter, where no other is given."""

    stored_reference = False

    def __init__(self, config: Grpo, reference: ForwardModel | None = None) -> None:
        self.config, self._beside = config, reference
        self.reported = (*REPORTED, *(f"rewards/{each}" for each in config.rewards), *limit_metrics(config.verifiers))
        self.names = (*self.reported, "clip_ratio", *(("kl",) if config.beta else ()))

    def loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        assert isinstance(batch, RolloutBatch), "task grpo learns from what it wrote"
        config = self.config
        if config.beta and batch.referred is None:
            batch.referred = self._reference(model, batch)
        reference = batch.referred
        log_probs = -cross_entropies(model, batch, batch.labels, config.temperature)
        if batch.before is None:
            batch.before = log_probs.detach()
        mask = (batch.labels != IGNORED).float()
        ratio = torch.exp(log_probs - batch.before)
        low, high = 1.0 - config.epsilon, 1.0 + (config.epsilon_high or config.epsilon)
        advantages = batch.advantages[:, None]
        losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
        by_token = [clipped.float()]
        if reference is not None:
            apart = reference - log_probs
            # Times the ratio, whose value is 1 at first, the gradient is that of the divergence (arXiv 2512.02556).
            kl = (torch.exp(apart) - apart - 1.0) * ratio
            losses = losses + config.beta * kl
            by_token.append(kl)
        of_rows = torch.stack((batch.reported.sum(0), batch.counted.sum().expand(len(self.reported))), dim=1)
        of_tokens = torch.stack([torch.stack(((each * mask).sum(), mask.sum())) for each in by_token])
        total, count = self._divided(losses * mask, mask, batch.counted)
        return BatchLosses(total, count, torch.cat((of_rows, of_tokens)).detach())

    def held_out_loss(self, model: nn.Module, batch: TokenBatch) -> BatchLosses:
        loss = model(batch.tokens, batch.positions, batch.documents, batch.labels, 0.0)
        return BatchLosses(loss, (batch.labels != IGNORED).sum())

    def _divided(self, losses: Tensor, mask: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of what `losses` [B, T] come to, and what the sum over the step is divided by."""
        if self.config.loss == "dapo":
            return losses.sum(), mask.sum().long()
        if self.config.loss == "grpo":
            return (losses.sum(1) / mask.sum(1).clamp_min(1.0)).sum(), counted.sum().long()
        return losses.sum(), (counted.sum() * self.config.max_tokens).long()

    @torch.no_grad()
    def _reference(self, model: nn.Module, batch: TokenBatch) -> Tensor:
        """The log-probabilities that the reference gives the tokens, without dropout."""
        if self._beside is not None:
            return -cross_entropies(self._beside.module, batch, batch.labels, self.config.temperature)
        training = model.training
        model.eval()
        try:
            with adapter_off(model):
                return -cross_entropies(model, batch, batch.labels, self.config.temperature)
        finally:
            model.train(training)
