"""Jobs for requests in OpenAI's terms, by the same services as `/api/v1`."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from muster.api.core import idempotency
from muster.api.core.callers import Principal
from muster.api.core.clock import clock
from muster.api.core.database.tables import JobRow
from muster.api.core.errors import ApiError, database_unavailable
from muster.api.core.idempotency import AttemptedRequest
from muster.api.core.jobs import service as jobs
from muster.api.core.services import Services
from muster.api.core.submission.service import SubmissionService
from muster.api.core.submission.storing import ExtraRows
from muster.api.openai import fine_tunes
from muster.api.openai.fine_tunes import FineTune, FineTuneBody
from muster.api.openai.fine_tuning.hyperparameters import ChosenHyperparameters, choose
from muster.api.openai.fine_tuning.replies import JOB_PREFIX
from muster.api.openai.fine_tuning.requests import (
    CreateFineTuningJob,
    contradictions,
    given_hyperparameters,
    param_of,
    rewards_of,
)
from muster.api.openai.fine_tuning.retries import RepeatableRequest, arrived, slot_of
from muster.api.openai.models.base_models import (
    AnswerRewards,
    RequestedSettings,
    answers_per_prompt,
    batch_multiple,
    job_spec,
)
from muster.api.openai.models.service import BaseModel, base_model
from muster.api.openai.requests import invalid_request, refused
from muster.api.openai.training_files import TrainingFile, training_file
from muster.recipe.document import Submission, parse_job
from muster.recipe.job_inputs import with_addresses
from muster.recipe.objectives import Task
from muster.storage.data_shape import examine
from muster.words.base import DocumentProblem, InvalidDocument
from muster.words.names import Label

_TRIES = 5  # each time another request of the same body was quicker
_TASKS: dict[str, Task] = {"supervised": "sft", "dpo": "dpo", "reinforcement": "grpo"}
_EVALUATIONS = 10  # of a run with a validation file, where its length is known
_EVERY = 20  # steps between evaluations, where it is not
Act = Literal["cancel", "pause", "resume"]
_ACTS: dict[Act, Callable[..., Any]] = {"cancel": jobs.cancel, "pause": jobs.suspend, "resume": jobs.resume}


@dataclass(frozen=True)
class FineTuneRequest:
    """A request to create a job: what it says, in which project, and how its retries are known."""

    order: CreateFineTuningJob
    project: str | None
    attempted: AttemptedRequest | None  # by an Idempotency-Key
    repeatable: RepeatableRequest


@dataclass(frozen=True)
class _PreparedRequest:
    submission: Submission
    body: FineTuneBody


async def create(services: Services, caller: Principal, request: FineTuneRequest) -> FineTune:
    """Store a job, or find the one that this request made before. Raises ApiError; then nothing was stored."""
    prepared: _PreparedRequest | None = None
    for _ in range(_TRIES):
        made, attempted = await _made_before(services, request)
        if made is not None:
            return await find(services, caller, JOB_PREFIX + made)
        prepared = prepared or await _prepare(services, caller, request)
        extra = _extra_rows(prepared.body, retried=request.attempted is None and request.repeatable.retry)
        try:
            submitted = await services[SubmissionService].submit(caller, prepared.submission, attempted, extra)
        except ApiError as error:
            raise _with_request_parameters(error, request.order) from None
        if submitted.replayed and request.attempted is None:
            continue  # a request of the same body took the slot: this one may want the next
        return await find(services, caller, JOB_PREFIX + submitted.document["id"])
    raise database_unavailable()


def _extra_rows(body: FineTuneBody, retried: bool) -> ExtraRows:
    return ExtraRows(
        rows=lambda job_id: fine_tunes.rows_of(job_id, body, retried),
        data={"fineTuning": body.model_dump(mode="json", include={"model", "hyperparameters", "choices"})},
        note=f" to fine-tune {body.model}" + (f"; chosen: {'; '.join(body.choices)}" if body.choices else ""),
    )


async def _made_before(services: Services, request: FineTuneRequest) -> tuple[str | None, AttemptedRequest]:
    """The job that this request made before, or under what it is to make one."""
    async with services.database.read() as session:
        if request.attempted is not None:
            reply = await idempotency.recall(session, request.attempted)
            return (reply["id"] if reply else None), request.attempted
        slot = await slot_of(session, request.repeatable, await clock(session))
    if slot.job_id is None or request.repeatable.retry:
        return slot.job_id, slot.attempted
    async with services.database.write() as session:
        return (slot.job_id if await arrived(session, slot.job_id) else None), slot.attempted


async def find(services: Services, caller: Principal, fine_tune_id: str) -> FineTune:
    """Raises ApiError job_not_found, in the same words for what is not there and what is not for the caller's eyes."""
    tune = None
    if fine_tune_id.startswith(JOB_PREFIX):
        async with services.database.read() as session:
            tune = await fine_tunes.get(session, fine_tune_id.removeprefix(JOB_PREFIX))
    if tune is None or caller.role_in(tune.job.project) is None:
        detail = f"There is no fine-tuning job {fine_tune_id[:100]!r}; list them with `client.fine_tuning.jobs.list()`."
        raise ApiError("job_not_found", detail, errors=(DocumentProblem("fine_tuning_job_id", "names no job"),))
    return tune


async def act(services: Services, caller: Principal, fine_tune_id: str, what: Act) -> FineTune:
    """Raises ApiError job_not_found, forbidden, job_finished, job_cancelling."""
    tune = await find(services, caller, fine_tune_id)
    row: JobRow = await _ACTS[what](services, caller, tune.job.id)
    return replace(tune, job=row)


@dataclass(frozen=True)
class _JobRecipe:
    """All of a job but the numbers that are yet to be chosen."""

    request: FineTuneRequest
    base: BaseModel
    training: TrainingFile
    validation: TrainingFile | None
    seed: int
    name: str

    @property
    def method(self) -> str:
        method = self.request.order.method
        return method.type if method is not None else "supervised"

    def rewards(self, chosen: ChosenHyperparameters) -> AnswerRewards | None:
        verifiers = rewards_of(self.request.order)
        if not verifiers:
            return None
        answers = answers_per_prompt(self.base.mapped, chosen.compute_multiplier or 1.0)
        return AnswerRewards(verifiers, answers, chosen.eval_samples)

    def submission(self, chosen: ChosenHyperparameters, examples: int | None) -> Submission:
        """Raises ApiError invalid_request."""
        steps = math.ceil((examples or 0) * chosen.n_epochs / chosen.batch_size)
        settings = RequestedSettings(
            task=_TASKS[self.method],
            training=self.training.as_source(),
            validation=self.validation.as_source() if self.validation else None,
            n_epochs=chosen.n_epochs,
            batch_size=chosen.batch_size,
            learning_rate_multiplier=chosen.learning_rate_multiplier,
            beta=chosen.beta,
            seed=self.seed,
            evaluate_every=chosen.eval_interval or (max(1, steps // _EVALUATIONS) if examples else _EVERY),
            commit=self.base.commit,
            rewards=self.rewards(chosen),
        )
        labels = {Label.PROJECT: self.request.project} if self.request.project else {}
        try:
            return parse_job(
                {"metadata": {"name": self.name, "labels": labels}, "spec": job_spec(self.base.mapped, settings)}
            )
        except InvalidDocument as invalid:
            raise invalid_request(_as_request_faults(invalid.problems, self.request.order)) from None

    def body(self, chosen: ChosenHyperparameters) -> FineTuneBody:
        asked = self.request.order
        numbers = {
            "n_epochs": chosen.n_epochs,
            "batch_size": chosen.batch_size,
            "learning_rate_multiplier": chosen.learning_rate_multiplier,
        }
        more = {
            "beta": chosen.beta,
            "compute_multiplier": chosen.compute_multiplier,
            "eval_interval": chosen.eval_interval,
            "eval_samples": chosen.eval_samples,
        }
        return FineTuneBody(
            model=asked.model,
            base=self.base.name,
            training_file=asked.training_file,
            validation_file=asked.validation_file,
            suffix=asked.suffix,
            seed=self.seed,
            metadata=asked.metadata,
            method=self.method,
            hyperparameters=numbers | {name: value for name, value in more.items() if value is not None},
            grader=asked.method.reinforcement.grader.model_dump(exclude_none=True)
            if asked.method and asked.method.reinforcement
            else None,
            choices=chosen.choices,
        )


async def _prepare(services: Services, caller: Principal, request: FineTuneRequest) -> _PreparedRequest:
    """The job that the request asks for. Raises ApiError invalid_request, model_not_found."""
    order = request.order
    if faults := tuple(contradictions(order)):
        raise invalid_request(faults)
    base = await base_model(services, caller, order.model)
    seed = secrets.randbelow(2**31) if order.seed is None else order.seed
    task = _TASKS[order.method.type if order.method else "supervised"]
    training = await training_file(services, caller, order.training_file, "training_file", task)
    validation = None
    if order.validation_file is not None:
        validation = await training_file(services, caller, order.validation_file, "validation_file", task)
    recipe = _JobRecipe(request, base, training, validation, seed, _name(order.suffix))
    asked = given_hyperparameters(order)
    multiple = batch_multiple(base.mapped)
    if asked.compute_multiplier is not None:  # a step's samples are answers, several to each prompt
        chosen_first = choose(asked, None, 1)
        multiple //= math.gcd(multiple, answers_per_prompt(base.mapped, chosen_first.compute_multiplier or 1.0))
    if asked.batch_size != "auto" and asked.batch_size % multiple:
        near = math.ceil(asked.batch_size / multiple) * multiple
        words = f"must be a multiple of {multiple} on this model's gang, not {asked.batch_size}; take {near}"
        raise refused(param_of("spec.training.batch", order), words)
    examples = training.examples
    if examples is None:
        # Of no format, for one that is named is believed.
        unknown = replace(recipe, training=replace(training, format="auto"))
        first = unknown.submission(choose(asked, None, multiple), None)
        examples = await _count(services, caller, first, order)
    chosen = choose(asked, examples, multiple)
    return _PreparedRequest(recipe.submission(chosen, examples), recipe.body(chosen))


async def _count(
    services: Services, caller: Principal, submission: Submission, asked: CreateFineTuningJob
) -> int | None:
    """About how many examples the training file has; None where it can't be looked at from here. Nothing is read that
    the caller's job may not read."""
    try:
        drafted = await services[SubmissionService].draft(caller, submission)
    except ApiError as error:
        raise _with_request_parameters(error, asked) from None
    if drafted.faults:
        raise invalid_request(_as_request_faults(drafted.faults, asked))
    training = with_addresses(drafted.spec, drafted.files).training_config
    look = await asyncio.to_thread(examine, training, same_disk=services.settings.cluster == "local")
    if look.faults:
        faults = tuple(DocumentProblem(f"spec.training.{path}", words) for path, words in look.faults)
        raise invalid_request(_as_request_faults(faults, asked))
    return look.shape.documents if look.shape is not None else None


def _as_request_faults(faults: tuple[DocumentProblem, ...], asked: CreateFineTuningJob) -> tuple[DocumentProblem, ...]:
    return tuple(DocumentProblem(param_of(fault.path, asked), f"{fault.message} ({fault.path})") for fault in faults)


def _with_request_parameters(error: ApiError, asked: CreateFineTuningJob) -> ApiError:
    return invalid_request(_as_request_faults(tuple(error.errors), asked)) if error.code == "invalid_job" else error


def _name(suffix: str | None) -> str:
    """A job's name, which no live job has."""
    words = re.sub(r"[^a-z0-9]+", "-", (suffix or "").lower()).strip("-")[:24].strip("-")
    return "-".join(part for part in ("ft", words, secrets.token_hex(6)) if part)
