"""Evaluation during training: held-out sets, their metrics, and the deciding one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from muster.recipe.data_config import Source, only_evaluated, source_names, with_different_names
from muster.recipe.objectives import VALUES, Task
from muster.recipe.verifiers import LIMITS, Verifiers, must_differ, score_metrics
from muster.words.base import Many, Spec
from muster.words.fields import Positive, Text
from muster.words.rules import DocumentRule, RuledSpec

SETS_MAX: Final = 32
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")
_NAME_RULE: Final = (
    "a name has lower-case letters, digits, - and _, begins with a letter or digit, and has at most 40 characters"
)
# Metrics of tasks that predict each next token.
TOKEN_METRICS: Final = ("perplexity", "bits_per_byte")
_TOKEN_TASKS: Final = ("pretrain", "sft")
# Of which metrics less is better, and of which more. What is in neither is a matter of taste.
_LOWER: Final = frozenset({"loss", "nll_loss", *TOKEN_METRICS, *LIMITS})
_HIGHER: Final = frozenset({"accuracy", "log_odds_ratio", "rewards/accuracies", "rewards/margins", "score", "finished"})

Better = Literal["lower", "higher"]
Sources = Annotated[Many[Source], AfterValidator(with_different_names), AfterValidator(only_evaluated)]


class EarlyStopping(Spec):
    """Stop after `patience` evaluations in a row that did not improve the best value by more than min_delta."""

    patience: Positive
    """Evaluations in a row without an improvement after which the job stops."""
    min_delta: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Minimum change of evaluation.metric that counts as an improvement."""


class Answers(Spec):
    """The model answers the prompts of a set by its likeliest tokens, and verifiers score what it says."""

    verifiers: Verifiers
    """Verifiers that score an answer. Each reports its mean as `<set>/<name>`; `<set>/score` is the sum by their
    weights."""
    max_tokens: Annotated[int, Field(gt=0, le=4096)] = 128
    """Maximum number of tokens per answer."""

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        must_differ(self.verifiers)
        return self


class EvaluationSet(Spec):
    """Documents that are only evaluated on, and reported by a name of their own."""

    data: Annotated[Sources, Field(min_length=1)]
    """The sources of the documents."""
    samples: Positive | None = None
    """The most samples that are scored each time; left out, evaluation.samples."""
    answers: Answers | None = None
    """Let the model answer the first `samples` prompts, and score the answers; left out, it does not."""


class Generation(Spec):
    """Prompts that the model answers at each evaluation, always by its likeliest tokens."""

    prompts: Annotated[Many[Text], Field(min_length=1, max_length=32)]
    """Prompts: texts to continue in task `pretrain`, else a user's messages, where the tokenizer has a chat template or
    marks."""
    max_tokens: Annotated[int, Field(gt=0, le=4096)] = 64
    """Maximum number of tokens per answer."""


class Evaluation(RuledSpec):
    """Evaluation on data that is not trained on: `data` or `holdout`, named `sets`, or both."""

    rules = (
        DocumentRule[Any](
            "give either data (held-out sources) or holdout (a share of the training documents)",
            lambda it: bool(it.data and it.holdout),
            "!(has(self.data) && self.data.size() > 0) || !(has(self.holdout) && self.holdout > 0.0)",
        ),
        DocumentRule[Any](
            "give data, holdout or sets",
            lambda it: (
                not (it.data or it.holdout or it.sets)
                and "give data (held-out sources), holdout (a share of the training documents) or sets (held-out "
                "sources by name)"
            ),
            "(has(self.data) && self.data.size() > 0) || (has(self.holdout) && self.holdout > 0.0)"
            " || (has(self.sets) && self.sets.size() > 0)",
        ),
        DocumentRule[Any](
            f"at most {SETS_MAX} sets",
            lambda it: len(it.sets) > SETS_MAX and f"sets has {len(it.sets)} sets; at most {SETS_MAX} are allowed",
        ),
        DocumentRule[Any](
            f"sets: {_NAME_RULE}",
            lambda it: next((f"sets.{name}: {_NAME_RULE}" for name in it.sets if not _NAME.fullmatch(name)), None),
        ),
    )

    every: Positive
    """Steps between evaluations; the first is at step 0 and the last after the final step."""
    data: Sources = ()
    """Sources of documents that are only evaluated on."""
    holdout: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """The share of the training documents, chosen by their content, that is kept out of training."""
    sets: dict[str, EvaluationSet] = {}
    """Further sets by name. Each reports its metrics as `<name>/loss` and so on. Without data and holdout, the
    evaluation loss is that of all sets together.
    """
    samples: Positive = 256
    """The most samples that are scored each time, of each set."""
    metric: Text = "loss"
    """Metric that decides the best checkpoint and early stopping: `loss`, or the name of any other metric that the
    evaluations report, such as `code/loss` or `perplexity`.
    """
    better: Better | None = None
    """Whether a lower or a higher value of evaluation.metric is better, where its name does not say so."""
    early_stopping: EarlyStopping | None = None
    """Rule for stopping before the length is reached; left out, never."""
    generate: Generation | None = None
    """Samples that the model writes at each evaluation, for people to read; left out, none."""

    def sources(self) -> Iterator[tuple[str, Source]]:
        """Yield every source that is evaluated on alone, with its path in this document."""
        yield from ((f"data[{number}]", source) for number, source in enumerate(self.data))
        for name, each in self.sets.items():
            yield from ((f"sets.{name}.data[{number}]", source) for number, source in enumerate(each.data))

    def metrics(self, task: Task, training: Sequence[Source]) -> tuple[str, ...]:
        """The names of all metrics that an evaluation of this task reports. `training` holds the sources of the
        training data, of which `holdout` takes its share."""
        of_set = ("loss", *(TOKEN_METRICS if reports_tokens(task) else ()), *VALUES.get(task, ()))
        names = list(of_set)
        if main := self.data or (tuple(training) if self.holdout else ()):
            names += source_metrics(source_names(main))
        for name, each in self.sets.items():
            of_sources = source_metrics(source_names(each.data))
            of_answers = score_metrics(each.answers.verifiers) if each.answers else ()
            names += [f"{name}/{metric}" for metric in (*of_set, *of_sources, *of_answers)]
        return tuple(names)

    def direction(self) -> Better:
        """Return whether lower or higher values of `metric` are better. Raises ValueError if its name does not decide
        that and `better` is left out, or where `better` contradicts it."""
        usual: Better | None = "lower" if _ends_in(self.metric, _LOWER) else None
        usual = "higher" if _ends_in(self.metric, _HIGHER) or self.metric in self._scores() else usual
        if usual and self.better and usual != self.better:
            raise ValueError(f"evaluation.better is {self.better}, but of {self.metric} the {usual} is better")
        if not (chosen := usual or self.better):
            raise ValueError(
                f"evaluation.metric {self.metric} does not say whether more or less of it is better; set "
                "evaluation.better to lower or higher"
            )
        return chosen

    def _scores(self) -> set[str]:
        """The metrics that verifiers report."""
        return {
            f"{name}/{verifier.called}"
            for name, each in self.sets.items()
            for verifier in (each.answers.verifiers if each.answers else ())
        }


def must_be_reported(evaluation: Evaluation, task: Task, training: Sequence[Source]) -> None:
    """Raises ValueError where evaluation.metric is none of those that there will be, or its direction is not known."""
    names = evaluation.metrics(task, training)
    if evaluation.metric not in names:
        raise ValueError(f"evaluation.metric {evaluation.metric!r} is not reported; there will be {', '.join(names)}")
    evaluation.direction()


def must_be_able_to_write(evaluation: Evaluation, task: str, predicts_tokens: bool, compiles: bool) -> None:
    """Raises ValueError where the model that is evaluated can't answer prompts."""
    answering = [f"evaluation.sets.{name}.answers" for name, each in evaluation.sets.items() if each.answers]
    if answering and task == "pretrain":
        raise ValueError(f"{answering[0]}: the texts of task pretrain have no prompts to answer; leave it out")
    if evaluation.generate is not None:
        answering.append("evaluation.generate")
    if answering and not predicts_tokens:
        raise ValueError(f"{answering[0]}: a model of task {task} scores texts and writes none")
    if answering and compiles:
        raise ValueError(
            f"{answering[0]} grows by a token a pass, and parallel.compile would compile for each length; leave "
            "one of them out"
        )


def reports_tokens(task: str) -> bool:
    """Return whether the task's loss is a mean over tokens, so that it has a perplexity."""
    return task in _TOKEN_TASKS


def source_metrics(names: Sequence[str]) -> list[str]:
    """The metrics of the sources of a set: the loss of each, where there are several."""
    return [f"sources/{name}/loss" for name in names] if len(names) > 1 else []


def _ends_in(metric: str, names: frozenset[str]) -> bool:
    parts = metric.split("/")
    return any("/".join(parts[first:]) in names for first in range(len(parts)))
