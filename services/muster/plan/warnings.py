"""Warnings about a training configuration: rules of thumb, each with its source. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from muster.plan.model_size import ModelSize
from muster.plan.oddities import oddities_of
from muster.recipe.objectives import PREFERENCE_TASKS
from muster.recipe.training import TrainingConfig
from muster.words.base import Record
from muster.words.text import plural

# Full fine-tuning and LoRA differ by about ten in their best learning rate (Schulman & Thinking Machines 2025, "LoRA
# without regret"); the bounds are three times what common recipes use (torchtune, TRL, axolotl: 1e-5 to 5e-5 whole,
# 1e-4 to 5e-4 LoRA).
LR_WHOLE_MAX = 1.5e-4
LR_ADAPTER_MAX, LR_ADAPTER_MIN = 3e-3, 2e-5
# Pretraining: the largest models of GPT-3's table 2.1 take 0.6e-4, the smallest 6e-4.
LR_PRETRAIN_MAX = 6e-3
# Small batches for fine-tuning; a LoRA loses more by large ones (the same source).
TOKENS_PER_STEP_ADAPTER_MAX = 2**20
# Four epochs are nearly as good as new data, sixteen are worth little (Muennighoff et al. 2023, arXiv 2305.16264).
EPOCHS_MAX = 4.0
FEW_STEPS = 20
TOKENS_PER_PARAMETER = 20.0  # Hoffmann et al. 2022, arXiv 2203.15556


class Warned(Record):
    """A warning about one field of a job."""

    path: str  # of the field in the job's document
    message: str


@dataclass(frozen=True)
class DataShape:
    """Facts from a look at the training data. None stands for unknown ones."""

    documents: int | None = None
    tokens: int | None = None  # of an epoch, estimated where `exact` is False
    exact: bool = False
    lengths: tuple[int, int, int] | None = None  # tokens of the documents at the 50th, 90th and 99th percentile
    formats: tuple[str, ...] = ()  # of each source, as its files look


def warnings_of(
    training: TrainingConfig, size: ModelSize, data: DataShape | None, tokens: int | None, steps: int | None
) -> tuple[Warned, ...]:
    """All warnings about a training configuration.

    `data` is None where it was not looked at. `tokens` and `steps` count those of the whole run; None where that is not
    known.
    """
    warnings = [Warned(path=f"spec.training.{path}", message=words) for path, words in oddities_of(training, steps)]
    warnings += _learning_rate(training)
    warnings += _length(training, size, tokens, steps)
    warnings += _data(training, data, tokens)
    return tuple(warnings)


def _learning_rate(training: TrainingConfig) -> list[Warned]:
    lr, tuned = training.optimizer.lr, training.model.source is not None or training.model.from_ is not None
    path, batch = "spec.training.optimizer.lr", training.batch.tokens_per_step
    if training.adapter is not None:
        if lr > LR_ADAPTER_MAX:
            return [_warned(path, f"{lr:g} is high for an adapter; 1e-4 to 5e-4 is usual")]
        warnings = []
        if lr < LR_ADAPTER_MIN:
            warnings.append(_warned(path, f"{lr:g} is low for an adapter: about ten times the rate of whole training"))
        if batch > TOKENS_PER_STEP_ADAPTER_MAX:
            words = f"{batch:,} tokens a step are many for an adapter, which learns less from large batches"
            warnings.append(_warned("spec.training.batch.tokensPerStep", words))
        return warnings
    if tuned and lr > LR_WHOLE_MAX:
        return [_warned(path, f"{lr:g} is high to fine-tune all weights; 1e-5 to 5e-5 is usual")]
    if lr > LR_PRETRAIN_MAX:
        return [_warned(path, f"{lr:g} is high: training may diverge; 3e-4 is usual, less for larger models")]
    return []


def _length(training: TrainingConfig, size: ModelSize, tokens: int | None, steps: int | None) -> list[Warned]:
    warnings = []
    if steps is not None and steps < FEW_STEPS:
        about = "" if training.known_steps() is not None else "about "
        warnings.append(
            _warned("spec.training.length", f"the run has {about}{plural(steps, 'step')}; few batches teach little")
        )
    fresh = training.model.source is None and training.model.from_ is None
    if fresh and tokens is not None and tokens < TOKENS_PER_PARAMETER * size.parameters / 4:
        words = (
            f"{tokens / size.parameters:.2g} tokens per parameter; about {TOKENS_PER_PARAMETER:g} make the best model "
            "for the compute"
        )
        warnings.append(_warned("spec.training.length", words))
    return warnings


def _data(training: TrainingConfig, data: DataShape | None, tokens: int | None) -> list[Warned]:
    if data is None:
        return []
    warnings, about = list[Warned](), "" if data.exact else "about "
    epochs = training.length.epochs
    if epochs is None and tokens is not None and data.tokens:
        epochs_made = tokens / data.tokens
    else:
        epochs_made = float(epochs or 0)
    if epochs_made > EPOCHS_MAX:
        amount = f", of {about}{data.tokens:,} tokens" if data.tokens else ""
        words = f"the data is seen {epochs_made:.3g} times{amount}; after {EPOCHS_MAX:g} it is mostly learnt by heart"
        warnings.append(_warned("spec.training.length", words))
    tuned = training.model.source is not None or training.model.from_ is not None
    for number, format in enumerate(data.formats):
        if training.task == "sft" and tuned and format == "prompt-completion":
            words = "prompts and completions are learnt as they stand, without the model's chat template, by which"
            words += " `muster chat` asks: ask by `muster generate`, or write them as `messages`"
            warnings.append(_warned(f"spec.training.data.train[{number}].format", words))
    batch = training.batch.tokens_per_step
    if data.tokens and data.tokens < batch:
        words = f"a step takes {batch:,} tokens, and all of the training data has {about}{data.tokens:,}"
        warnings.append(_warned("spec.training.batch.tokensPerStep", f"{words}: one step sees some of it twice"))
    if data.lengths is not None:
        warnings += _rows(training, data.lengths, about)
    return warnings


def _rows(training: TrainingConfig, lengths: tuple[int, int, int], about: str) -> list[Warned]:
    """Rows against documents: what is cut off or split, and what is padding."""
    half, most, nearly_all = lengths
    length, path = training.data.sequence_length, "spec.training.data.sequenceLength"
    if training.task == "sft" and most > length:
        words = f"a tenth of the conversations have more than {about}{most:,} tokens, and rows have {length:,}"
        return [_warned(path, f"{words}: the rest of them is not learnt")]
    if training.task in PREFERENCE_TASKS and most > length:
        words = f"a tenth of the pairs have more than {about}{most:,} tokens on both sides, and rows have {length:,}"
        return [_warned(path, f"{words} for the two together: data.truncation decides what becomes of them")]
    if not training.data.packing and nearly_all * 2 < length:
        words = f"99 % of the documents have at most {about}{nearly_all:,} tokens and rows have {length:,}: most of a "
        return [_warned(path, f"{words}row is padding; set data.packing, or shorten the rows")]
    if training.task == "pretrain" and half > 8 * length:
        words = f"half of the documents have more than {about}{half:,} tokens and rows {length:,}: most context is cut"
        return [_warned(path, words)]
    return []


def _warned(path: str, message: str) -> Warned:
    return Warned(path=path, message=message)
