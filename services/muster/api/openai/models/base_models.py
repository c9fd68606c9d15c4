"""The base models that clients may name, and what a job that starts from each is.

A file of the platform's owner maps them. On one machine, the presets that read bytes are there without a file, and
`muster models add` writes further ones to a file of the state folder, which is read anew when it changes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from muster.documents.reader import read_file
from muster.recipe.architecture import BYTE_VOCABULARY, PRESETS
from muster.recipe.document import JobSpec
from muster.recipe.objectives import Grpo
from muster.recipe.optimizer_config import OptimizerConfig
from muster.words.base import DocumentProblem, InvalidDocument, parse
from muster.words.gang import Gang
from muster.words.model_map import MODEL_NAME, MODEL_NAME_WORDS, MappedModel, ModelMapFile

log = structlog.get_logger("muster.api.openai")

_ANSWER_TOKENS: Final = 256  # of an answer that is rewarded, where the map says nothing and a sample has room
_ROW: Final = 512  # tokens of a sample of the presets, which train on CPUs too


@dataclass(frozen=True)
class BaseModels:
    """Mapped models by name, in the order of the file. `created` is when the file was written, in seconds since the
    epoch."""

    models: Mapping[str, MappedModel] = field(default_factory=dict)
    created: int = 0


class ModelMap:
    """The base models as they are now: those of a file that is read at the start, and on one machine, whose state
    folder has the file `own`, the presets and those of that file."""

    def __init__(self, file: Path | None, own: Path | None = None) -> None:
        """Raises ValueError as `load_models` does."""
        self._fixed, self._own = load_models(file), own
        if own is not None and file is None:
            self._fixed = BaseModels(preset_models())
        self._current, self._stamp = self._fixed, (0, 0)
        self.current()

    @property
    def can_be_added_to(self) -> bool:
        """Return whether `muster models add` maps a name here."""
        return self._own is not None

    def current(self) -> BaseModels:
        """Return the models of now. Where the file of the state folder can't be used, those of before."""
        if self._own is None:
            return self._fixed
        try:
            about = self._own.stat()
        except OSError:
            stamp = (0, 0)
        else:
            stamp = (about.st_mtime_ns, about.st_size)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                added = load_models(self._own) if stamp != (0, 0) else BaseModels()
            except ValueError as error:
                log.warning("the base models of before are kept", cause=str(error)[:500])
            else:
                created = max(self._fixed.created, added.created)
                self._current = BaseModels({**self._fixed.models, **added.models}, created)
        return self._current


def preset_models() -> dict[str, MappedModel]:
    """Return the presets that need no tokenizer's file, by their names: new models, which say nothing before they are
    trained."""
    return {
        name: MappedModel(
            spec={
                "training": {"model": {"preset": name}, "data": {"sequenceLength": min(_ROW, shape.max_positions)}},
                "gang": {"nodes": 1},
            }
        )
        for name, shape in PRESETS.items()
        if shape.vocab_size == BYTE_VOCABULARY
    }


@dataclass(frozen=True)
class AnswerRewards:
    """Rewards of answers: their verifiers, the number of answers per prompt, and the number of prompts that an
    evaluation answers (None: as many as any evaluation)."""

    verifiers: Sequence[Mapping[str, Any]]
    answers: int
    evaluated: int | None = None


@dataclass(frozen=True)
class RequestedSettings:
    """Settings that a request adds to its model's spec, counted in examples, not in tokens."""

    task: str
    training: Mapping[str, str]  # source and format
    validation: Mapping[str, str] | None
    n_epochs: int
    batch_size: int
    learning_rate_multiplier: float
    beta: float | None
    seed: int
    evaluate_every: int = 20
    commit: tuple[str, int | str] | None = None  # start from this job's commit of that step
    rewards: AnswerRewards | None = None  # of task grpo


def batch_multiple(mapped: MappedModel) -> int:
    """Return the number of which a step's examples must be a multiple: those of a forward pass of every rank of the
    gang."""
    gang = parse(Gang, mapped.spec.get("gang") or {})
    return gang.nodes.min * gang.ranks_per_node * int(_part(mapped.spec, "training", "batch").get("microBatch", 1))


def answers_per_prompt(mapped: MappedModel, multiplier: float) -> int:
    """Return the number of answers per prompt: the map's, or else the default of task grpo, times the multiplier."""
    usual = int(_part(mapped.spec, "training", "grpo").get("completions", Grpo.model_fields["completions"].default))
    return min(1_024, max(2, round(usual * multiplier)))


def job_spec(mapped: MappedModel, settings: RequestedSettings) -> dict[str, Any]:
    """The spec of a job that starts from this model. Only what the request decides is replaced."""
    spec = copy.deepcopy(mapped.spec)
    training = spec["training"]
    data = training.setdefault("data", {})
    data["train"] = [dict(settings.training)]
    data.setdefault("packing", False)  # an example is a sample, as OpenAI's batches count
    training["task"] = settings.task
    training["seed"] = settings.seed
    training["length"] = {"epochs": settings.n_epochs}
    optimizer = training.setdefault("optimizer", {})
    optimizer["lr"] = optimizer.get("lr", OptimizerConfig().lr) * settings.learning_rate_multiplier
    length, rewards = data.get("sequenceLength", 512), settings.rewards
    rows = settings.batch_size * (rewards.answers if rewards else 1)
    training.setdefault("batch", {})["tokensPerStep"] = rows * length
    if settings.task == "dpo":
        training["dpo"] = {**training.get("dpo", {}), "beta": settings.beta}
    else:
        training.pop("dpo", None)
    grpo = training.pop("grpo", {})
    if rewards is not None:
        grpo = {"maxTokens": max(1, min(_ANSWER_TOKENS, length // 2)), **grpo}
        training["grpo"] = {**grpo, "verifiers": [*rewards.verifiers], "completions": rewards.answers}
    if settings.commit is not None:
        training["model"] = {"from": {"job": settings.commit[0], "step": settings.commit[1]}}
    if settings.validation is not None:
        evaluation = {key: value for key, value in training.get("evaluation", {}).items() if key != "holdout"}
        training["evaluation"] = {"every": settings.evaluate_every, **evaluation}
        if rewards is None:
            training["evaluation"]["data"] = [dict(settings.validation)]
        else:
            training["evaluation"] |= _rewarded(rewards, settings.validation, min(4_096, grpo["maxTokens"]))
    return spec


def _rewarded(rewards: AnswerRewards, validation: Mapping[str, str], max_tokens: int) -> dict[str, Any]:
    """An evaluation whose answers are scored as those are that are learnt from; the best commit has the best score."""
    answers = {"verifiers": [*rewards.verifiers], "maxTokens": max_tokens}
    samples = {"samples": rewards.evaluated} if rewards.evaluated is not None else {}
    held_out = {"data": [dict(validation)], "answers": answers, **samples}
    return {"sets": {"validation": held_out}, "metric": "validation/score"}


def load_models(path: Path | None) -> BaseModels:
    """The models of a file, each tried with a job; none without a file. Raises ValueError that names file and fault."""
    if path is None:
        return BaseModels()
    try:
        document, written = read_file(path), int(path.stat().st_mtime)
    except (OSError, ValueError) as error:
        raise ValueError(f"the base models of {path} can't be used: {error}") from error
    try:
        parsed = parse(ModelMapFile, document.data)
        _try_all(parsed.models)
    except InvalidDocument as invalid:
        fault = document.located(invalid.problems[0])
        place = f"line {fault.line}, column {fault.column}: " if fault.line else ""
        raise ValueError(f"the base models of {path} can't be used: {place}{fault}") from invalid
    return BaseModels(parsed.models, written)


def _try_all(models: Mapping[str, MappedModel]) -> None:
    """Raises InvalidDocument for a name that can't be one, and for a spec with which no job would be valid."""
    for name, mapped in models.items():
        at = f"models.{name}"
        if not MODEL_NAME.fullmatch(name):
            raise InvalidDocument((DocumentProblem(at, MODEL_NAME_WORDS),))
        if not isinstance(mapped.spec.get("training"), dict):
            raise InvalidDocument(
                (DocumentProblem(f"{at}.spec.training", "is required: training.model names what is trained"),)
            )
        parse(Gang, mapped.spec.get("gang") or {}, f"{at}.spec.gang")
        source = {"source": "file:///training.jsonl", "format": "openai-chat"}
        settings = RequestedSettings("sft", source, None, 1, batch_multiple(mapped), 1.0, None, 0)
        parse(JobSpec, job_spec(mapped, settings), f"{at}.spec")


def _part(spec: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    here: Any = spec
    for key in path:
        here = here.get(key) if isinstance(here, Mapping) else None
    return here if isinstance(here, Mapping) else {}


def model_of_job(training: Mapping[str, Any], gang: Mapping[str, Any]) -> MappedModel:
    """Return what a job that starts from another job's checkpoint is: with the model, the adapter and the gang of that
    one, and nothing of its data."""
    kept = {key: training[key] for key in ("model", "precision", "parallel", "optimizer") if key in training}
    if adapter := training.get("adapter"):
        # The checkpoint has whole weights, which qlora can't hold in four bits.
        kept["adapter"] = {**adapter, "kind": "lora" if adapter["kind"] == "qlora" else adapter["kind"]}
    data, batch = training.get("data") or {}, training.get("batch") or {}
    names = ("sequenceLength", "tokenizer", "chatTemplate", "chatTemplateName")
    kept["data"] = {key: data[key] for key in names if data.get(key) is not None}
    kept["batch"] = {"microBatch": batch.get("microBatch", 1)}
    return MappedModel(spec={"training": kept, "gang": dict(gang)})
