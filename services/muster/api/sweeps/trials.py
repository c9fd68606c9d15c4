"""Conversion of a sweep's document to the submission of each trial, and the problems of the trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.api.core.errors import ApiError
from muster.api.core.submission.drafts import parse_submission
from muster.api.sweeps.search import NoSuchPlace, Parameters, problem_of, trials_of, with_parameters
from muster.documents.document import Document
from muster.recipe.document import JobSpec, Submission
from muster.recipe.evaluation_config import must_be_reported
from muster.recipe.sweep import Sweep
from muster.words.base import FAULTS_MAX, UNKNOWN_KEY, DocumentProblem
from muster.words.names import Label
from muster.words.redaction import redact

_SHOWN_MAX = 200


@dataclass(frozen=True)
class SweepDraft:
    """A sweep that is not stored yet, or as it was stored: what to try, and the job's document without that."""

    id: str
    sweep: Sweep
    template: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.template["metadata"]["name"])

    def document(self, number: int, parameters: Parameters) -> dict[str, Any]:
        """The job's document of a trial. Raises NoSuchPlace."""
        document = with_parameters(self.template, parameters)
        metadata = dict(document["metadata"])
        labels = metadata.get("labels") or {}
        if isinstance(labels, Mapping):  # else the parser says what is wrong with it
            labels = {**labels, Label.SWEEP: self.id, Label.TRIAL: str(number)}
        return {**document, "metadata": {**metadata, "name": f"{self.name}-{number}", "labels": labels}}

    def submission(self, number: int, parameters: Parameters) -> Submission:
        """The trial as it is submitted. Raises ApiError invalid_job."""
        try:
            document = self.document(number, parameters)
        except NoSuchPlace as error:
            raise ApiError("invalid_job", str(problem_of(error)), errors=(problem_of(error),)) from None
        submission = parse_submission(Document(document))
        return submission.model_copy(update={"spec": self._compared(submission.spec)})

    def _compared(self, spec: JobSpec) -> JobSpec:
        """The spec with the sweep's metric as that of its evaluations. Raises ApiError invalid_job."""
        if spec.training is None:
            words = "a sweep compares trials by their evaluations, which Muster's own trainer makes: give training"
            raise _refusal(DocumentProblem("spec.program", words))
        evaluation, metric = spec.training.evaluation, self.sweep.metric
        if evaluation is None:
            words = "is required: a sweep compares trials by their evaluations; give every, and data, holdout or sets"
            raise _refusal(DocumentProblem("spec.training.evaluation", words))
        if metric is None:
            return spec
        evaluation = evaluation.model_copy(update={"metric": metric.name, "better": metric.better})
        try:
            must_be_reported(evaluation, spec.training.task, spec.training.data.train)
        except ValueError as error:
            raise _refusal(
                DocumentProblem("sweep.metric.name", str(error).replace("evaluation.better", "better"))
            ) from None
        return spec.model_copy(update={"training": spec.training.model_copy(update={"evaluation": evaluation})})


def _refusal(problem: DocumentProblem) -> ApiError:
    return ApiError("invalid_job", str(problem), errors=(problem,))


@dataclass
class TrialFaults:
    """Problems of trials, each listed once, with the numbers of the trials that have it."""

    trials: list[Parameters]
    by_fault: dict[tuple[str, str, str | None], list[int]] = field(default_factory=dict)

    def add(self, number: int, problems: Sequence[DocumentProblem]) -> None:
        for problem in problems:
            key = (problem.path, problem.message, problem.did_you_mean)
            if key in self.by_fault or len(self.by_fault) < FAULTS_MAX:
                self.by_fault.setdefault(key, []).append(number)

    def problems(self) -> tuple[DocumentProblem, ...]:
        return tuple(self._problem(*key, numbers) for key, numbers in self.by_fault.items())

    def _problem(self, path: str, message: str, near: str | None, numbers: list[int]) -> DocumentProblem:
        place = path.removeprefix("spec.")
        for parameter in self.trials[0]:
            if message.startswith(UNKNOWN_KEY) and _within(parameter, place):
                meant = _in_place_of(place, near) + parameter[len(place) :] if near else None
                words = f"is no field of the job's spec{message.removeprefix(UNKNOWN_KEY)}"
                return DocumentProblem(f"sweep.parameters.{parameter}", words, meant)
            if _within(place, parameter):
                return DocumentProblem(f"sweep.parameters.{parameter}", f"{self._whose(numbers)}: {message}", near)
        whose = "" if len(numbers) == len(self.trials) or path.startswith("sweep.") else f"{self._whose(numbers)}: "
        return DocumentProblem(path, f"{whose}{message}", near)

    def _whose(self, numbers: list[int]) -> str:
        parameters = self.trials[numbers[0] - 1]
        settings = redact(", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in parameters.items()))
        others = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
        return f"trial {numbers[0]} ({settings[:_SHOWN_MAX]}){others}"


def _within(path: str, outer: str) -> bool:
    return path == outer or path.startswith((f"{outer}.", f"{outer}["))


def _in_place_of(path: str, near: str) -> str:
    """Return the path that a hint means: it is a key beside this one, or a whole path."""
    if near.startswith("spec."):
        return near.removeprefix("spec.")
    above, dot, _ = path.rpartition(".")
    return f"{above}{dot}{near}"


def submissions_of(draft: SweepDraft) -> tuple[list[Submission], TrialFaults]:
    """Return the submission of every trial that is valid by itself, and the problems of the others. Takes a millisecond
    a trial."""
    trials = trials_of(draft.sweep)
    faults, submissions = TrialFaults(trials), []
    for number, parameters in enumerate(trials, 1):
        try:
            submissions.append(draft.submission(number, parameters))
        except ApiError as error:
            faults.add(number, tuple(error.errors))
    if submissions and not faults.by_fault:
        faults.add(1, stopping_problems(draft.sweep, submissions))
    return submissions, faults


def stopping_problems(sweep: Sweep, submissions: Sequence[Submission]) -> tuple[DocumentProblem, ...]:
    """Return the problems because of which the sweep's rule would never stop a trial."""
    if sweep.stopping is None:
        return ()
    steps, at = sweep.stopping.min_steps, "sweep.stopping.minSteps"
    training = submissions[0].spec.training_config
    assert training.evaluation is not None, "each trial has one"
    if steps % training.evaluation.every:
        every = training.evaluation.every
        words = f"must be a multiple of training.evaluation.every ({every}), so that all are compared at the same step"
        return (DocumentProblem(at, f"{words}; take {-(-steps // every) * every}"),)
    lengths = [each.spec.training_config.length.steps for each in submissions]
    longest = max((length for length in lengths if length is not None), default=None)
    if longest is not None and None not in lengths and steps >= longest:
        return (DocumentProblem(at, f"must be less than the steps of a trial ({longest:,}), or none is ever stopped"),)
    return ()
