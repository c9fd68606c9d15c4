"""A job document with sensible settings for a model and its data. Pure.

`muster init`, `muster finetune` and the form of the page for submitting write this one document. What somebody asked
for is taken as it is, also where it is wrong: the dry run says so at its line. All else follows from facts about the
model and the data, or from rules of thumb where nobody could look at them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from muster.plan.warnings import DataShape
from muster.recipe.data_formats import FORMATS
from muster.recipe.objectives import PREFERENCE_TASKS
from muster.words.names import API_VERSION, DEFAULT_PROJECT, KIND, Label
from muster.words.text import amount, plural

# Task grpo is none of these: what rewards its answers has to be thought of.
TASKS: Final = ("sft", "pretrain", "dpo", "orpo", "simpo", "kto", "reward")
METHODS: Final = ("whole", "lora", "qlora")

# With fewer steps than some twenty a run learns little, with many more each sees little: the batch is chosen so that
# the run has about so many, up to the batch that recipes for large data use.
STEPS_AIMED_AT: Final = 100
STEPS_OF_A_RANK_MIN: Final = 20  # fewer GPUs are asked for, before a run has fewer steps than this
TOKENS_PER_STEP_MAX: Final = 65_536
ROWS_PER_STEP_MAX: Final = 64
PASS_TOKENS_MAX: Final = 4_096  # of one forward pass of a small model: enough to keep a device busy, and little memory
ROW_MIN, ROW_MAX, ROW_UNKNOWN = 128, 4_096, 1_024
TEMPLATE_SHARE: Final = 1.25  # tokens are estimated from bytes; a row that is too short would cut conversations
WARMUP_SHARE, WARMUP_MAX, WARMUP_UNKNOWN = 0.05, 100, 10
EVALUATIONS, EVERY_UNKNOWN = 10, 50
DOCUMENTS_TO_HOLD_OUT_MIN: Final = 20
HELD_OUT_ENOUGH: Final = 250  # documents whose mean loss is steady
# Below, all weights with their optimizer's state fit on nearly every device. Above, LoRA learns as well on data of
# this kind (Schulman & Thinking Machines 2025, "LoRA without regret") for a fraction of the memory.
ADAPTER_PARAMETERS_MIN: Final = 1_000_000_000
GPU_SHARE_MAX: Final = 0.6  # of a GPU's memory for weights in 16 bits; beyond, they are held in four
# The usual rates: an adapter's matrices begin at nothing and bear ten times what the weights of a trained model do,
# and small models bear more than large ones.
LR_ADAPTER, LR_WHOLE_8B, LR_WHOLE_MAX, LR_PRETRAIN = 2e-4, 1e-5, 1e-4, 3e-4
LR_PREFERENCE_SHARE: Final = 0.1  # pairs push a model harder than texts
_EPOCHS: Final[Mapping[str, int]] = {"sft": 3}


@dataclass(frozen=True)
class JobWishes:
    """Wishes of somebody for a job. None and "" leave a choice to `propose`. Numbers may be any text that was typed."""

    name: str
    model: Mapping[str, Any]  # as training.model
    data: str
    task: str = ""
    method: str = ""
    tokenizer: str = ""
    evaluation: str = ""  # held-out data; without it, a share of the training data is held out
    sequence_length: Any = None
    epochs: Any = None
    steps: Any = None  # in place of epochs
    lr: Any = None
    nodes: Any = 1
    gpus: Any = None
    project: str = ""

    @property
    def begins_anew(self) -> bool:
        return not ({"source", "from"} & self.model.keys())


@dataclass(frozen=True)
class ProposalFacts:
    """Facts for a proposal. None stands for unknown ones."""

    data: DataShape | None = None
    source: Mapping[str, Any] = field(default_factory=dict)  # format and columns to write beside the data's address
    parameters: int | None = None
    position_limit: int | None = None
    gpus: int = 0  # of the largest node that there is
    gpu_bytes: int | None = None


@dataclass(frozen=True)
class ProposedJob:
    """A job document, and a comment for each path in it that needs a reason."""

    document: dict[str, Any]
    comments: dict[str, str]


def preliminary(wishes: JobWishes) -> dict[str, Any]:
    """Return the smallest document that names the model and the data, to look at both."""
    source: dict[str, Any] = {"source": wishes.data}
    data: dict[str, Any] = {"train": [source], "sequenceLength": ROW_MIN}
    if wishes.tokenizer:
        data["tokenizer"] = wishes.tokenizer
    training = {
        "task": wishes.task or "sft",
        "model": dict(wishes.model),
        "data": data,
        "batch": {"tokensPerStep": ROW_MIN},
        "length": {"steps": 1},
    }
    return _job(wishes, training, {"nodes": 1})


def propose(wishes: JobWishes, facts: ProposalFacts) -> ProposedJob:
    """Return the document of a job that trains the model on the data."""
    return _Proposal(wishes, facts).job()


def spec_without_data(wishes: JobWishes, facts: ProposalFacts) -> dict[str, Any]:
    """Return the spec of jobs that start from the model, whose data, length and batch another program decides."""
    spec = propose(wishes, facts).document["spec"]
    training = spec["training"]
    kept = {key: training[key] for key in ("model", "adapter", "precision") if key in training}
    kept["data"] = {"sequenceLength": training["data"]["sequenceLength"]}
    kept["optimizer"] = {"lr": training["optimizer"]["lr"], "schedule": {"name": "cosine"}}
    return {"training": kept, "gang": spec["gang"]}


def task_for(formats: tuple[str, ...], begins_anew: bool) -> str:
    """Return the task that learns from data of these formats; the usual one for an unknown format."""
    if formats:
        return next(task for task in ("sft", "pretrain", "dpo", "kto") if formats[0] in FORMATS[task])
    return "pretrain" if begins_anew else "sft"


class _Proposal:
    """Choices of one proposal, in the order in which each rests on the ones before."""

    def __init__(self, wishes: JobWishes, facts: ProposalFacts) -> None:
        self.wishes, self.facts, self.comments = wishes, facts, dict[str, str]()
        shape = facts.data
        self.task = wishes.task or task_for(shape.formats if shape else (), wishes.begins_anew)
        self.method = self._method()
        self.row = self._row()
        self.epochs = wishes.epochs or _EPOCHS.get(self.task, 1)
        self.holdout = self._holdout()
        self.rows = self._rows()
        self.gpus = self._gpus()
        self.rows_per_step = self._rows_per_step()
        self.steps = self._steps()

    def job(self) -> ProposedJob:
        say, wishes = self._say, self.wishes
        training: dict[str, Any] = {"task": self.task, "model": dict(wishes.model)}
        if self.method != "whole":
            training["adapter"] = {"kind": self.method, "rank": 16, "alpha": 32, "targets": ["all-linear"]}
        data: dict[str, Any] = {"train": [{"source": wishes.data, **self.facts.source}], "sequenceLength": self.row}
        if wishes.tokenizer:
            data["tokenizer"] = wishes.tokenizer
        training |= {
            "data": data,
            "optimizer": {"lr": self._lr(), "schedule": {"name": "cosine", "warmupSteps": self._warmup()}},
            "batch": self._batch(),
            "precision": "bf16" if self.gpus else "fp32",
            "length": self._length(),
        }
        if (evaluation := self._evaluation()) is not None:
            training["evaluation"] = evaluation
        training["seed"] = 17
        say("seed", "The same seed on the same machines trains the same model.")
        say("precision", "GPUs multiply in bf16; the optimizer keeps fp32." if self.gpus else "CPUs train in fp32.")
        document = _job(wishes, training, {"nodes": wishes.nodes, "gpusPerNode": self.gpus})
        document["spec"]["checkpoint"] = {"every": "auto"}
        self.comments |= {
            "spec.gang": "Workers, and the GPUs of each; 0 trains on its CPU cores.",
            "spec.checkpoint": "As often as costs the least time; each best evaluation is saved as well.",
        }
        return ProposedJob(document, self.comments)

    def _say(self, path: str, words: str) -> None:
        self.comments[f"spec.training.{path}"] = words

    def _method(self) -> str:
        size, facts = self.facts.parameters, self.facts
        chosen: str = "whole"
        if self.wishes.method or self.wishes.begins_anew:
            chosen = self.wishes.method or "whole"
        elif size is None or size >= ADAPTER_PARAMETERS_MIN:
            tight = size is not None and facts.gpu_bytes and 2 * size > GPU_SHARE_MAX * facts.gpu_bytes
            chosen = "qlora" if tight and "source" in self.wishes.model else "lora"
        if self.wishes.begins_anew:
            return "whole"
        weights = f"{amount(size)} weights" if size is not None else "weights"
        if chosen == "whole":
            self._say("model", f"All of its {weights} are trained; from 1 B on, an adapter is usual.")
        else:
            quantized = " They are held in four bits, to fit." if chosen == "qlora" else ""
            self._say("adapter", f"Small matrices are trained, and the {weights} stay as they are.{quantized}")
        return chosen

    def _row(self) -> Any:
        """Return the tokens of a row: room for nearly all documents."""
        path, limit = "data.sequenceLength", self.facts.position_limit or ROW_MAX
        if self.wishes.sequence_length:
            return self.wishes.sequence_length
        shape = self.facts.data
        if shape is None or shape.lengths is None or self.task == "pretrain":
            self._say(path, "Tokens of a row; a longer text goes on in the next one." if shape else "Tokens of a row.")
            return min(ROW_UNKNOWN, limit)
        longest = shape.lengths[2]
        room = 2 ** math.ceil(math.log2(max(1.0, TEMPLATE_SHARE * longest)))
        row = max(min(ROW_MIN, limit), min(room, ROW_MAX, limit))
        holds = "Rows have room for that" if row >= longest else "Longer ones are cut"
        packed = "" if self.task in PREFERENCE_TASKS else "; short ones share a row"
        self._say(path, f"99 % of the documents have at most about {longest:,} tokens. {holds}{packed}.")
        return row

    def _holdout(self) -> float:
        documents = self.facts.data.documents if self.facts.data else None
        if self.wishes.evaluation:
            return 0.0
        if documents is None:
            return 0.05
        if documents < DOCUMENTS_TO_HOLD_OUT_MIN:
            return 0.0
        return 0.1 if documents < HELD_OUT_ENOUGH * 10 else max(0.001, round(HELD_OUT_ENOUGH / documents, 3))

    def _rows(self) -> float | None:
        """Return about how many rows the whole run sees; None where that is not known."""
        shape, row, epochs = self.facts.data, _count(self.row), _count(self.epochs)
        if shape is None or shape.tokens is None or row is None or epochs is None or self.wishes.steps:
            return None
        pairs = self.task in PREFERENCE_TASKS and shape.documents is not None
        each = float(shape.documents or 0) if pairs else shape.tokens / row
        return max(1.0, each * (1.0 - self.holdout) * epochs)

    def _gpus(self) -> Any:
        """Return the GPUs of a node: as asked for, else all of the largest, where there is enough data for them."""
        if self.wishes.gpus is not None or not self.facts.gpus:
            return self.wishes.gpus if self.wishes.gpus is not None else 0
        most = self.facts.gpus if self.rows is None else max(1, int(self.rows // STEPS_OF_A_RANK_MIN))
        return _power_of_two(min(self.facts.gpus, most))

    def _rows_per_step(self) -> int | None:
        nodes, gpus, row = _count(self.wishes.nodes), self.gpus, _count(self.row)
        if nodes is None or row is None or not isinstance(gpus, int) or gpus < 0:
            return None
        ranks = nodes * max(1, gpus)
        most = max(1, min(ROWS_PER_STEP_MAX, TOKENS_PER_STEP_MAX // row))
        rows = 16 if self.rows is None else max(1, int(self.rows // STEPS_AIMED_AT))
        return ranks * math.ceil(_power_of_two(min(most, rows)) / ranks)

    def _steps(self) -> int | None:
        if (asked := _count(self.wishes.steps)) is not None:
            return asked
        if self.rows is None or self.rows_per_step is None:
            return None
        return max(1, math.ceil(self.rows / self.rows_per_step))

    def _lr(self) -> Any:
        if self.wishes.lr:
            return self.wishes.lr
        rate, words = self._usual_rate()
        share = LR_PREFERENCE_SHARE if self.task in PREFERENCE_TASKS else 1.0
        self._say("optimizer.lr", words)
        return float(f"{rate * share:.1g}")

    def _usual_rate(self) -> tuple[float, str]:
        if self.wishes.begins_anew:
            return LR_PRETRAIN, "Usual for new weights."
        if self.method != "whole":
            return LR_ADAPTER, "Usual for an adapter, which bears ten times what whole training does."
        words = "Usual for a trained model of this size; weights that are still random bear ten times as much."
        if self.facts.parameters is None:
            return LR_WHOLE_8B, words
        return min(LR_WHOLE_MAX, LR_WHOLE_8B * math.sqrt(8e9 / max(1, self.facts.parameters))), words

    def _warmup(self) -> int:
        path = "optimizer.schedule.warmupSteps"
        if self.steps is None:
            self._say(path, "Keep it well below the steps of the run, which only the data decides.")
            return WARMUP_UNKNOWN
        self._say(path, f"{100 * WARMUP_SHARE:g} % of the run's {self._about()}{plural(self.steps, 'step')}.")
        return min(WARMUP_MAX, round(WARMUP_SHARE * self.steps))

    def _about(self) -> str:
        return "" if self.wishes.steps else "about "

    def _batch(self) -> dict[str, Any]:
        if self.rows_per_step is None:
            return {"tokensPerStep": self.row, "microBatch": 1}
        rows, ranks = self.rows_per_step, self.wishes.nodes * max(1, self.gpus)
        words = f"{plural(rows, 'row')} of each step"
        if self.steps is not None:
            words += f": the run has {self._about()}{plural(self.steps, 'step')}"
        self._say("batch.tokensPerStep", f"{words}.")
        return {"tokensPerStep": rows * self.row, "microBatch": self._micro_batch(rows // ranks)}

    def _micro_batch(self, rows: int) -> int:
        """Return the rows of a forward pass: several for a small model. A power of two that divides a rank's rows."""
        small = self.facts.parameters is not None and self.facts.parameters < ADAPTER_PARAMETERS_MIN
        most: int = max(1, PASS_TOKENS_MAX // self.row) if small else 1
        self._say("batch.microBatch", "Rows of one forward pass of a rank: lower it where memory is short.")
        return max(size for size in (1, 2, 4, 8, 16, 32, 64) if rows % size == 0 and size <= max(1, min(rows, most)))

    def _length(self) -> dict[str, Any]:
        if self.wishes.steps:
            return {"steps": self.wishes.steps}
        shape = self.facts.data
        if shape is not None and shape.documents is not None and shape.tokens is not None:
            documents = plural(shape.documents, "document")
            self._say("length", f"Passes through about {documents} with {amount(shape.tokens)} tokens.")
        return {"epochs": self.epochs}

    def _evaluation(self) -> dict[str, Any] | None:
        every = EVERY_UNKNOWN if self.steps is None else max(1, round(self.steps / EVALUATIONS))
        if self.wishes.evaluation:
            words = f"These data are only scored, every {plural(every, 'step')}; the best checkpoint is kept."
            self._say("evaluation", words)
            return {"every": every, "data": [{"source": self.wishes.evaluation}]}
        if not self.holdout:
            self._say("length", "Without an evaluation: the data has too few documents to hold some of them out.")
            return None
        share = f"{100 * self.holdout:.3g} %"
        self._say("evaluation", f"{share} of the documents are held out and scored; the best checkpoint is kept.")
        return {"every": every, "holdout": self.holdout}


def _job(wishes: JobWishes, training: dict[str, Any], gang: dict[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": wishes.name}
    if wishes.project and wishes.project != DEFAULT_PROJECT:
        metadata["labels"] = {str(Label.PROJECT): wishes.project}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": {"training": training, "gang": gang}}


def _count(value: Any) -> int | None:
    """Return a positive whole number, or None for anything else that was typed."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _power_of_two(most: float) -> int:
    """Return the largest power of two up to `most`, and 1 below."""
    return int(2 ** max(0, math.floor(math.log2(max(1, most)))))
