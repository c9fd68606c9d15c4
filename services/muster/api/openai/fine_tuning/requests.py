"""Request body that creates a fine-tuning job, as in OpenAI's API. Each field is checked, and the error names a wrong
one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from muster.api.openai.fine_tuning.graders import Grader, WrongGrader, verifiers_of
from muster.api.openai.fine_tuning.hyperparameters import GivenHyperparameters
from muster.api.openai.requests import OpenAIRequest
from muster.words.base import DocumentProblem

EPOCHS_MAX, BATCH_MAX, MULTIPLIER_MAX, BETA_MAX = 50, 256, 1_000.0, 2.0
COMPUTE_MAX, COUNT_MAX = 16.0, 1_000_000
_AUTO = {"type": "string", "const": "auto"}


def _whole(most: int) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value != "auto" and not (whole and 1 <= value <= most):
            raise ValueError(f'must be "auto" or a whole number from 1 to {most}, not {value!r}'[:200])
        return value

    return check


def _above_zero(most: float) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value != "auto" and not (number and 0 < value <= most):
            raise ValueError(f'must be "auto" or a number above 0 and at most {most:g}, not {value!r}'[:200])
        return value

    return check


def _schema(kind: str, most: float) -> WithJsonSchema:
    bound = {"minimum": 1} if kind == "integer" else {"exclusiveMinimum": 0}
    return WithJsonSchema({"anyOf": [_AUTO, {"type": kind, "maximum": most, **bound}]})


Epochs = Annotated[int | Literal["auto"], BeforeValidator(_whole(EPOCHS_MAX)), _schema("integer", EPOCHS_MAX)]
Batch = Annotated[int | Literal["auto"], BeforeValidator(_whole(BATCH_MAX)), _schema("integer", BATCH_MAX)]
Multiplier = Annotated[
    float | Literal["auto"], BeforeValidator(_above_zero(MULTIPLIER_MAX)), _schema("number", MULTIPLIER_MAX)
]
Beta = Annotated[float | Literal["auto"], BeforeValidator(_above_zero(BETA_MAX)), _schema("number", BETA_MAX)]
Compute = Annotated[float | Literal["auto"], BeforeValidator(_above_zero(COMPUTE_MAX)), _schema("number", COMPUTE_MAX)]
Count = Annotated[int | Literal["auto"], BeforeValidator(_whole(COUNT_MAX)), _schema("integer", COUNT_MAX)]
Name = Annotated[str, Field(min_length=1, max_length=2_000)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


def _none_carried(value: Any) -> Any:
    if value:
        raise ValueError("none are carried yet; leave it out (a job's metrics are at /api/v1/jobs/{id}/metrics)")
    return value


class Hyperparameters(OpenAIRequest):
    """Hyperparameters of supervised fine-tuning."""

    n_epochs: Epochs = "auto"
    batch_size: Batch = "auto"
    learning_rate_multiplier: Multiplier = "auto"


class DpoHyperparameters(Hyperparameters):
    """Hyperparameters of direct preference optimisation."""

    beta: Beta = "auto"


def _only_default(value: Any) -> Any:
    if value not in ("default", None):
        raise ValueError(f"is a notion of OpenAI's own models; leave it out, or default, not {value!r}"[:200])
    return value


class ReinforcementHyperparameters(Hyperparameters):
    """Hyperparameters of reinforcement fine-tuning: `batch_size` counts prompts, and `compute_multiplier` multiplies
    the number of answers per prompt."""

    compute_multiplier: Compute = "auto"
    eval_interval: Count = "auto"
    eval_samples: Count = "auto"
    reasoning_effort: Annotated[
        Literal["default"] | None, BeforeValidator(_only_default), WithJsonSchema({"const": "default"})
    ] = None


class Reinforcement(OpenAIRequest):
    """Learn from the rewards of the answers that the model gives itself."""

    grader: Grader
    hyperparameters: ReinforcementHyperparameters = ReinforcementHyperparameters()


class Supervised(OpenAIRequest):
    """Method that trains on the assistant's messages."""

    hyperparameters: Hyperparameters = Hyperparameters()


class DpoMethod(OpenAIRequest):
    """Learn which of two answers is preferred."""

    hyperparameters: DpoHyperparameters = DpoHyperparameters()


class Method(OpenAIRequest):
    """Fine-tuning method."""

    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: Supervised | None = None
    dpo: DpoMethod | None = None
    reinforcement: Reinforcement | None = None


class CreateFineTuningJob(OpenAIRequest):
    """A job in OpenAI's words. A file is an uploaded one's id, or an address that the workers can read."""

    model: Name
    training_file: Name
    validation_file: Name | None = None
    hyperparameters: Annotated[
        Hyperparameters | None, Field(description="As method.supervised.hyperparameters; from before there was method.")
    ] = None
    method: Method | None = None
    suffix: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    metadata: Metadata | None = None
    integrations: Annotated[
        Annotated[list[Any], Field(max_length=0, description="None are carried yet.")] | None,
        BeforeValidator(_none_carried),
    ] = None


def contradictions(asked: CreateFineTuningJob) -> Iterator[DocumentProblem]:
    """Yield the problems for which no single field is at fault."""
    method = asked.method
    if method is None:
        return
    if asked.hyperparameters is not None:
        yield DocumentProblem(
            "hyperparameters", f"method has them: write method.{method.type}.hyperparameters and leave this out"
        )
    for other in ("supervised", "dpo", "reinforcement"):
        if other != method.type and getattr(method, other) is not None:
            yield DocumentProblem(
                f"method.{other}", f"method.type is {method.type}; leave it out, or choose the type {other}"
            )
    if method.type == "reinforcement" and method.reinforcement is None:
        yield DocumentProblem("method.reinforcement", "is required: its grader rewards the answers")
    try:
        rewards_of(asked)
    except WrongGrader as wrong:
        yield wrong.problem


def rewards_of(asked: CreateFineTuningJob) -> list[dict[str, Any]]:
    """The verifiers that reward answers; none where nothing is rewarded. Raises WrongGrader."""
    method = asked.method
    if method is None or method.type != "reinforcement" or method.reinforcement is None:
        return []
    return verifiers_of(method.reinforcement.grader, "method.reinforcement.grader")


def given_hyperparameters(request: CreateFineTuningJob) -> GivenHyperparameters:
    """The hyperparameters, wherever the request has them."""
    if request.method is not None and request.method.type == "dpo":
        given = (request.method.dpo or DpoMethod()).hyperparameters
        return GivenHyperparameters(given.n_epochs, given.batch_size, given.learning_rate_multiplier, given.beta)
    if request.method is not None and request.method.reinforcement is not None:
        asked = request.method.reinforcement.hyperparameters
        return GivenHyperparameters(
            asked.n_epochs,
            asked.batch_size,
            asked.learning_rate_multiplier,
            compute_multiplier=asked.compute_multiplier,
            eval_interval=asked.eval_interval,
            eval_samples=asked.eval_samples,
        )
    supervised = (request.method.supervised if request.method else None) or Supervised()
    of = request.hyperparameters or supervised.hyperparameters
    return GivenHyperparameters(of.n_epochs, of.batch_size, of.learning_rate_multiplier)


def param_of(path: str, asked: CreateFineTuningJob) -> str:
    """The field of the request that a fault of the job's spec comes from."""
    kind = asked.method.type if asked.method else "supervised"
    numbers = f"method.{kind}.hyperparameters" if asked.hyperparameters is None else "hyperparameters"
    for begin, param in (
        ("spec.training.data.train", "training_file"),
        ("spec.training.evaluation", "validation_file"),
        ("spec.training.batch", f"{numbers}.batch_size"),
        ("spec.training.length", f"{numbers}.n_epochs"),
        ("spec.training.optimizer.lr", f"{numbers}.learning_rate_multiplier"),
        ("spec.training.grpo.verifiers", "method.reinforcement.grader"),
        ("spec.training.grpo.completions", f"{numbers}.compute_multiplier"),
        ("spec.training.dpo", f"{numbers}.beta"),
        ("metadata.labels", "project"),
    ):
        if path.startswith(begin):
            return param
    return "model"


EXAMPLE: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "training_file": "s3://data/chat.jsonl",
    "suffix": "support",
    "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": "auto", "batch_size": 8}}},
    "metadata": {"team": "nlp"},
}
