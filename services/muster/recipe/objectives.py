"""Tasks of a job, and the settings of each objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from muster.recipe.second_model import SecondModel, names_one
from muster.recipe.verifiers import Verifier, must_differ
from muster.words.base import Many, Spec
from muster.words.rules import DocumentRule, RuledSpec, refused_by

Task = Literal["pretrain", "sft", "dpo", "orpo", "simpo", "kto", "reward", "grpo"]

# Tasks whose samples are two texts that are compared. The settings of each stand in the field of the same name.
PREFERENCE_TASKS: Final[tuple[Task, ...]] = ("dpo", "orpo", "simpo", "kto", "reward")
# Tasks that hold the model against the one that they started from.
REFERENCE_TASKS: Final[tuple[Task, ...]] = ("dpo", "kto")

_PAIR_VALUES: Final = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
# What each objective reports by name beside its loss, as in the trainer's `names`: metrics of evaluations too.
VALUES: Final[Mapping[Task, tuple[str, ...]]] = {
    "dpo": _PAIR_VALUES,
    "orpo": (*_PAIR_VALUES, "log_odds_ratio", "nll_loss"),
    "simpo": _PAIR_VALUES,
    "reward": _PAIR_VALUES[:4],
    "kto": ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "kl"),
}

Beta = Annotated[float, Field(gt=0, le=1_000)]
Weight = Annotated[float, Field(ge=0, le=1_000)]
# Half of all pairs turned round would teach nothing. Not `lt=0.5`: an API server cuts limits to whole numbers where the
# value is one, and would take 0 for no less than that.
Smoothing = Annotated[float, Field(ge=0, le=0.49)]


class Dpo(Spec):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290)."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid` is -log sigmoid(beta × margin), where the margin is by how much more the chosen answer has gained on
    the reference than the rejected one. `ipo` is (margin per token - 1 / (2 beta))² (arXiv 2310.12036).
    """
    beta: Beta = 0.1
    """Strength with which the model is held to the reference; larger values keep it nearer."""
    label_smoothing: Smoothing = 0.0
    """The share of pairs that are taken to be labelled the wrong way round, while training only; for `sigmoid`."""
    length_normalized: bool = False
    """Whether log-probabilities are divided by the number of the answer's tokens; `ipo` always does so."""
    sft_weight: Weight = 0.0
    """The weight of the chosen answer's cross-entropy, per token, which is added to the loss."""

    @model_validator(mode="after")
    def _fits_the_loss(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError("labelSmoothing is for loss sigmoid; ipo has no probability that it could be mixed into")
        if self.loss == "ipo" and self.length_normalized:
            raise ValueError("lengthNormalized is for loss sigmoid; ipo is per token anyway")
        return self


class Orpo(Spec):
    """Odds ratio preference optimisation, which needs no reference (Hong et al. 2024, arXiv 2403.07691)."""

    beta: Beta = 0.1
    """The weight of the odds ratio's loss, in addition to the chosen conversation's cross-entropy."""


class Simpo(Spec):
    """Simple preference optimisation, which needs no reference (Meng et al. 2024, arXiv 2405.14734)."""

    beta: Beta = 2.0
    """Factor of the difference of the answers' log-probabilities per token."""
    gamma: Weight = 1.0
    """The margin by which the chosen answer's reward is to be larger."""
    label_smoothing: Smoothing = 0.0
    """The share of pairs that are taken to be labelled the wrong way round, while training only."""
    sft_weight: Weight = 0.0
    """The weight of the chosen answer's cross-entropy, per token, which is added to the loss."""


class Kto(Spec):
    """Kahneman-Tversky optimisation, of answers that are good or bad by themselves (arXiv 2402.01306)."""

    beta: Beta = 0.1
    """Strength with which the model is held to the reference; larger values keep it nearer."""
    desirable_weight: Weight = 1.0
    """The weight of the loss of good answers."""
    undesirable_weight: Weight = 1.0
    """The weight of the loss of bad answers. Where they are rarer, give them more, so that both weigh about alike."""


class Reward(Spec):
    """A model that scores a text, learnt from pairs (Bradley-Terry): -log sigmoid(chosen - rejected - margin), with the
    margin that the data gives (Ouyang et al. 2022, arXiv 2203.02155; Touvron et al. 2023, arXiv 2307.09288).
    """

    center_rewards_coefficient: Weight = 0.0
    """The weight of (chosen + rejected)², which keeps rewards near zero (Eisenstein et al. 2023, arXiv 2312.09244)."""


REWARD_MODEL: Final = "reward_model"  # what its score is called in metrics


class RewardModel(SecondModel):
    """A model that scores answers, as task reward trains it. It must have the tokenizer of the model that learns."""

    whose: ClassVar[str] = "reward model"
    rules = (names_one(whose),)

    weight: Annotated[float, Field(ge=-1_000, le=1_000)] = 1.0
    """Factor of its score in the sum of all."""


class Grpo(RuledSpec):
    """Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300): the model answers each prompt several
    times, the answers are rewarded, and it learns to give those that are better than the others of their prompt.
    """

    rules = (
        DocumentRule[Any](
            "nothing rewards the answers: give verifiers, rewardModel or both",
            lambda it: not it.verifiers and it.reward_model is None,
            "(has(self.verifiers) && self.verifiers.size() > 0) || has(self.rewardModel)",
        ),
        DocumentRule[Any](
            "the names of verifiers must differ", lambda it: refused_by(lambda: must_differ(it.verifiers))
        ),
        DocumentRule[Any](
            f"no verifier may be named {REWARD_MODEL} alongside rewardModel",
            lambda it: (
                it.reward_model is not None
                and REWARD_MODEL in (each.called for each in it.verifiers)
                and f"name {REWARD_MODEL} is that of rewardModel's score; choose another for the verifier"
            ),
        ),
    )

    verifiers: Annotated[Many[Verifier], Field(max_length=16)] = ()
    """Programs that reward an answer, alongside rewardModel or without it: the reward is the sum of the scores by their
    weights.
    """
    reward_model: RewardModel | None = None
    """A second model that rewards an answer, which computes forward only."""
    completions: Annotated[int, Field(ge=2, le=1_024)] = 8
    """Answers to each prompt. A step has samples of data.sequenceLength for all answers, so that it takes
    tokensPerStep / sequenceLength / completions prompts.
    """
    max_tokens: Annotated[int, Field(gt=0, le=131_072)] = 256
    """Maximum number of tokens of an answer. A prompt that leaves less room than that in a sample is left out."""
    loss: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    """Divisor of the tokens' loss: all tokens of the step (`dapo`, arXiv 2503.14476), within each answer its tokens
    (`grpo`), or the answers times maxTokens (`dr_grpo`, arXiv 2503.20783).
    """
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Divisor of the logits when answers are drawn, and when the likelihood of their tokens is learnt: below 1, answers
    are more alike.
    """
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Answers are drawn from the likeliest tokens that have this probability together."""
    scale_rewards: bool = True
    """Whether advantages are divided by the standard deviation of the rewards of their prompt."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The probability of a token counts as changed by at most this part downwards."""
    epsilon_high: Annotated[float, Field(gt=0, le=100)] | None = None
    """The same upwards; left out, epsilon."""
    beta: Weight = 0.0
    """The weight of the divergence from the reference, per token: from the model without its adapter; of a whole model,
    from what it started from, which is then a second model that computes forward only."""
    iterations: Annotated[int, Field(gt=0, le=64)] = 1
    """Updates of the weights by the answers of each step."""
    mask_truncated: bool = False
    """Whether nothing is learnt from answers that maxTokens cut off."""

    @property
    def rewards(self) -> tuple[str, ...]:
        """Return the rewards of an answer, by the names of their scores."""
        return (*(each.called for each in self.verifiers), *((REWARD_MODEL,) if self.reward_model else ()))
