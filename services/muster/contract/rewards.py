"""Constraints of task grpo, which learns from rewards of its own answers, on the rest of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muster.contract.training import TrainingConfig


def must_fit_rewards(training: TrainingConfig) -> None:
    """Raises ValueError where the settings of task grpo don't fit the rest, or are there or missing by mistake."""
    if (training.grpo is not None) != (training.task == "grpo"):
        raise ValueError(
            "task grpo needs what rewards its answers: give grpo.verifiers, grpo.rewardModel or both"
            if training.grpo is None
            else f"grpo holds the settings of task grpo, and this is task {training.task}; leave it out"
        )
    if training.grpo is None:
        return
    rows, length = training.batch.tokens_per_step // training.data.sequence_length, training.data.sequence_length
    if training.grpo.max_tokens >= length:
        raise ValueError(
            f"grpo.maxTokens {training.grpo.max_tokens} leaves no room for a prompt in data.sequenceLength {length}"
        )
    if rows % training.grpo.completions:
        raise ValueError(
            f"a step of tokensPerStep / sequenceLength = {rows} answers does not divide into prompts of "
            f"grpo.completions {training.grpo.completions} answers each; make it a multiple"
        )
    if training.model.from_ is None and training.model.source is None:
        raise ValueError(
            "task grpo rewards what the model says already, and a new model says nothing; start from another "
            "job's commit (model.from) or a model's folder (model.source)"
        )
    if training.grpo.beta and training.adapter is None and training.data.add_tokens:
        raise ValueError(
            "grpo.beta holds a whole model against the one that it started from, which knows nothing of the tokens of "
            "data.addTokens: teach them first, by a job of task sft, and start from its commit; or give an adapter"
        )
    for what, given in (
        ("labelSmoothing", training.label_smoothing),
        ("distillation", training.distillation),
        ("parallel.compile", training.parallel.compile),
        ("precision fp8", training.precision == "fp8"),
    ):
        if given:
            raise ValueError(f"task grpo writes its own answers, token by token, and can't do so with {what}")
