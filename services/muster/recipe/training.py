"""The training configuration: what the API validates, the TrainingJob carries and the trainer reads, word for word."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from muster.recipe.adapter_config import Adapter
from muster.recipe.data_config import DataConfig, Source
from muster.recipe.data_formats import FORMATS, fits_task, wrong_format
from muster.recipe.distillation import Distillation
from muster.recipe.evaluation_config import Evaluation, must_be_able_to_write, must_be_reported
from muster.recipe.model_config import ModelConfig
from muster.recipe.objectives import PREFERENCE_TASKS, REFERENCE_TASKS, Dpo, Grpo, Kto, Orpo, Reward, Simpo, Task
from muster.recipe.optimizer_config import OptimizerConfig
from muster.recipe.parameter_names import NamePatterns
from muster.words.base import Spec
from muster.words.fields import Fraction, Positive, Seed
from muster.words.rules import DocumentRule, RuledSpec, refused_by

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
FP8_MULTIPLE = 16  # of the rows of a product, which float8 kernels take
Shard = Literal["auto", "ddp", "zero2", "fsdp", "hsdp"]


def nearest_divisors(number: int, asked: int) -> str:
    """Return the words for the divisors of a number next to one that does not divide it."""
    below = max(each for each in range(1, min(asked, number) + 1) if number % each == 0)
    above = next((each for each in range(asked + 1, number + 1) if number % each == 0), None)
    return f"{below} does" if above is None else f"{below} and {above} do"


class BatchConfig(Spec):
    """Batch size. What does not fit into one forward pass of each rank is accumulated."""

    tokens_per_step: Positive
    """Tokens of one optimizer step, over all ranks."""
    micro_batch: Positive = 1
    """Samples of one forward pass of one rank."""


class ParallelConfig(RuledSpec):
    """Sharding of the model and of its rows over the ranks, and recomputation to save memory."""

    rules = (
        DocumentRule[Any](
            "replicas is only for shard: hsdp",
            lambda it: (
                it.replicas is not None and it.shard != "hsdp" and f"replicas is only for shard: hsdp, not {it.shard}"
            ),
            "!has(self.replicas) || self.shard == 'hsdp'",
        ),
    )

    shard: Shard = "auto"
    """Each rank holds the whole model (`ddp`), a part of gradients and optimizer (`zero2`), a part of everything
    (`fsdp`), or a part of everything within a group of ranks (`hsdp`). `auto` takes the first of ddp, zero2 and fsdp
    that fits in memory.
    """
    replicas: Positive | None = None
    """Copies of the model in `hsdp`; left out, one per node."""
    context: Positive = 1
    """Ranks that divide the tokens of each row among them, for rows too long for the memory of one. It divides the
    number of ranks and data.sequenceLength.
    """
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Activations that are recomputed in the backward pass instead of kept."""
    compile: bool = False
    """Whether the layers are compiled by torch.compile."""


def _one_length(it: Length) -> str | None:
    given = [name for name in ("steps", "tokens", "epochs") if getattr(it, name) is not None]
    if len(given) == 1:
        return None
    return f"give exactly one of steps, tokens, epochs (given: {', '.join(given) or 'none'})"


class Length(RuledSpec):
    """Length of the training: exactly one of steps, tokens, epochs."""

    rules = (
        DocumentRule[Any](
            "give exactly one of steps, tokens, epochs",
            _one_length,
            "[has(self.steps), has(self.tokens), has(self.epochs)].filter(given, given).size() == 1",
        ),
    )

    steps: Positive | None = None
    """Optimizer steps."""
    tokens: Positive | None = None
    """Tokens, rounded up to whole steps."""
    epochs: Positive | None = None
    """Passes through all training samples."""


def _is_new(it: TrainingConfig) -> bool:
    """Return whether the job begins with new weights."""
    return it.model.from_ is None and it.model.source is None


def _rows(it: TrainingConfig) -> int:
    return it.data.sequence_length * it.batch.micro_batch


def _answers(it: TrainingConfig) -> int:
    """Return the rows of a step, each of which is an answer in task grpo."""
    return it.batch.tokens_per_step // it.data.sequence_length


def _foreign_settings(it: TrainingConfig) -> str | None:
    for name in PREFERENCE_TASKS:
        if name != it.task and getattr(it, name) is not None:
            return f"{name} holds the settings of task {name}, and this is task {it.task}; leave it out"
    return None


def _not_while_answering(it: TrainingConfig) -> str | None:
    given = {
        "labelSmoothing": it.label_smoothing,
        "distillation": it.distillation,
        "parallel.compile": it.parallel.compile,
        "precision fp8": it.precision == "fp8",
    }
    what = next((name for name, value in given.items() if value), None) if it.grpo is not None else None
    return what and f"task grpo writes its own answers, token by token, and can't do so with {what}"


def _odd_float8_rows(it: TrainingConfig) -> str | None:
    rows, context = _rows(it), it.parallel.context
    if it.precision != "fp8" or rows % (FP8_MULTIPLE * context) == 0:
        return None
    divided, multiple = (f" / parallel.context {context}", rows / context) if context > 1 else ("", rows)
    return (
        f"precision fp8 multiplies {FP8_MULTIPLE} rows at a time: sequenceLength × microBatch{divided} = {multiple:g} "
        f"must be a multiple of {FP8_MULTIPLE}"
    )


def _no_metric(it: TrainingConfig) -> str | None:
    evaluation = it.evaluation
    return refused_by(lambda: must_be_reported(evaluation, it.task, it.data.train)) if evaluation is not None else None


def _no_writer(it: TrainingConfig) -> str | None:
    if (evaluation := it.evaluation) is None:
        return None
    return refused_by(lambda: must_be_able_to_write(evaluation, it.task, it.scores is None, it.parallel.compile))


# Conflicts between the parts of a training, in the order in which they are looked for.
CONFLICTS: Final[tuple[DocumentRule[TrainingConfig], ...]] = (
    DocumentRule(
        "data.sequenceLength is at most the model's position limit",
        lambda it: (
            it.model.shape is not None
            and it.data.sequence_length > it.model.shape.max_positions
            and f"data.sequenceLength {it.data.sequence_length} is longer than the model's position limit "
            f"{it.model.shape.max_positions}; shorten the sequences or choose a model with more positions"
        ),
    ),
    DocumentRule(
        "parallel.context must divide data.sequenceLength",
        lambda it: (
            it.data.sequence_length % it.parallel.context > 0
            and f"parallel.context {it.parallel.context} does not divide the {it.data.sequence_length} tokens of "
            f"data.sequenceLength; {nearest_divisors(it.data.sequence_length, it.parallel.context)}"
        ),
        "self.data.sequenceLength % self.parallel.context == 0",
    ),
    DocumentRule(
        "parallel.context is not for task grpo, distillation or parallel.compile",
        lambda it: (
            it.parallel.context > 1
            and it.why_not_divided is not None
            and f"parallel.context {it.parallel.context} is not for {it.why_not_divided}; leave one of them out"
        ),
        "self.parallel.context == 1 || (self.task != 'grpo' && !has(self.distillation) && !self.parallel.compile)",
    ),
    DocumentRule(
        "batch.tokensPerStep must be a multiple of data.sequenceLength × batch.microBatch",
        lambda it: (
            it.batch.tokens_per_step % _rows(it) > 0
            and f"batch.tokensPerStep {it.batch.tokens_per_step} is not a multiple of sequenceLength × microBatch "
            f"= {it.data.sequence_length} × {it.batch.micro_batch} = {_rows(it)}"
        ),
        "self.batch.tokensPerStep % (self.data.sequenceLength * self.batch.microBatch) == 0",
    ),
    DocumentRule(
        "precision fp8 is for whole models, not for an adapter",
        lambda it: (
            it.precision == "fp8"
            and it.adapter is not None
            and "precision fp8 multiplies in float8 where the whole model is trained, not beside an adapter of "
            f"{it.adapter.kind}; use bf16"
        ),
    ),
    DocumentRule(
        "with precision fp8, data.sequenceLength × batch.microBatch / parallel.context must be a multiple of "
        f"{FP8_MULTIPLE}",
        _odd_float8_rows,
    ),
    DocumentRule(
        "routerAuxLossCoef is for tasks pretrain and sft",
        lambda it: (
            it.router_aux_loss_coef is not None
            and it.task not in ("pretrain", "sft")
            and f"routerAuxLossCoef is for pretrain and sft; task {it.task} has no load-balancing loss"
        ),
    ),
    DocumentRule(
        "data.addTokens needs model.source, whose tokenizer it adds to",
        lambda it: (
            bool(it.data.add_tokens)
            and it.model.source is None
            and "data.addTokens adds to the tokenizer of a model's folder while it is read: give model.source "
            "(`muster checkpoints export` makes such a folder of a checkpoint)"
        ),
    ),
    DocumentRule(
        "optimizer.masterWeights false is for precision bf16 and the whole model",
        lambda it: (
            not it.optimizer.master_weights
            and (it.precision != "bf16" or it.adapter is not None)
            and "optimizer.masterWeights false keeps all weights in bf16: it is for precision bf16 and the whole "
            "model, not for "
            + (f"precision {it.precision}" if it.adapter is None else f"an adapter of {it.adapter.kind}")
            + "; leave it out"
        ),
    ),
    DocumentRule(
        "adapter needs a model to start from: another job's checkpoint (model.from) or a model's folder (model.source)",
        lambda it: (
            it.adapter is not None
            and it.adapter.kind != "qlora"  # which the next rule holds to more
            and _is_new(it)
            and "adapter trains beside weights that stay as they are, and a new model has none worth keeping; start "
            "from another job's checkpoint (model.from) or a model's folder (model.source), or leave adapter out to "
            "train the whole model"
        ),
        "!has(self.adapter) || has(self.model.from) || has(self.model.source)",
    ),
    DocumentRule(
        "adapter.kind qlora quantises the weights of a model's folder: give model.source, or use lora",
        lambda it: (
            it.adapter is not None
            and it.adapter.kind == "qlora"
            and it.model.source is None
            and "adapter.kind qlora quantises the weights of a model's folder while it reads them: give model.source "
            "(`muster checkpoints export` makes such a folder of a checkpoint), or use lora"
        ),
        "!has(self.adapter) || self.adapter.kind != 'qlora' || has(self.model.source)",
    ),
    DocumentRule(
        "freeze is for whole models, not for an adapter",
        lambda it: (
            bool(it.freeze)
            and it.adapter is not None
            and f"freeze leaves some weights as they are, and beside an adapter of {it.adapter.kind} all of them stay "
            "so already; leave one of them out"
        ),
    ),
    DocumentRule(
        "freeze is not for precision fp8",
        lambda it: (
            bool(it.freeze)
            and it.precision == "fp8"
            and "freeze is not for precision fp8, which multiplies in float8 where all learns; use bf16"
        ),
    ),
    DocumentRule(
        "freeze needs a model to start from: another job's checkpoint (model.from) or a model's folder (model.source)",
        lambda it: (
            bool(it.freeze)
            and _is_new(it)
            and "freeze leaves weights as they are, and a new model has none worth keeping; start from another job's "
            "commit (model.from) or a model's folder (model.source), or leave it out"
        ),
    ),
    DocumentRule(
        "data.overfit and optimizer.rangeTest are two trials; make one after the other",
        lambda it: it.data.overfit is not None and it.optimizer.range_test is not None,
    ),
    DocumentRule(
        "; ".join(f"task {task} reads {', '.join(formats)}" for task, formats in FORMATS.items()),
        lambda it: next(
            (
                wrong_format(source.format, it.task)
                for _, source in it.sources()
                if not fits_task(source.format, it.task)
            ),
            None,
        ),
        f"self.data.train.all(source, source.format == 'auto' || source.format in {json.dumps(FORMATS)}[self.task])",
    ),
    DocumentRule(f"the settings of a task ({', '.join(PREFERENCE_TASKS)}) are for that task alone", _foreign_settings),
    DocumentRule(
        "labelSmoothing is for tasks pretrain and sft",
        lambda it: (
            it.task in PREFERENCE_TASKS
            and bool(it.label_smoothing)
            and f"labelSmoothing is for pretrain and sft; task {it.task} compares whole answers"
            + (f": set {it.task}.labelSmoothing" if it.task in ("dpo", "simpo") else "")
        ),
    ),
    DocumentRule(
        "neftuneNoiseAlpha is for tasks pretrain and sft",
        lambda it: (
            it.task in PREFERENCE_TASKS
            and it.neftune_noise_alpha is not None
            and f"neftuneNoiseAlpha is for pretrain and sft, not for task {it.task}; leave it out"
        ),
    ),
    DocumentRule(
        "distillation is for tasks pretrain and sft, without labelSmoothing",
        lambda it: (
            it.distillation is not None
            and (it.task in PREFERENCE_TASKS or bool(it.label_smoothing))
            and "distillation learns what a teacher predicts for each token, in pretrain and sft; not with "
            + (f"task {it.task}, which compares whole answers" if it.task in PREFERENCE_TASKS else "labelSmoothing")
            + ": leave one of them out"
        ),
    ),
    DocumentRule(
        "in task pretrain, data.truncation other than right needs data.packing false",
        lambda it: (
            it.task == "pretrain"
            and it.data.packing
            and it.data.truncation != "right"
            and f"data.truncation {it.data.truncation} has nothing to cut: packed documents of task pretrain go on in "
            "the next sample; leave it out, or set data.packing to false"
        ),
    ),
    DocumentRule(
        f"tasks {', '.join(REFERENCE_TASKS)} need a model to start from: model.from or model.source",
        lambda it: (
            it.task in REFERENCE_TASKS
            and _is_new(it)
            and f"task {it.task} holds the model against the one that it starts from, and a new model is none worth "
            "holding to; start from another job's checkpoint (model.from) or a model's folder (model.source)"
        ),
    ),
    DocumentRule(
        "task grpo needs grpo, and no other task has it",
        lambda it: (
            (it.grpo is not None) != (it.task == "grpo")
            and (
                "task grpo needs what rewards its answers: give grpo.verifiers, grpo.rewardModel or both"
                if it.grpo is None
                else f"grpo holds the settings of task grpo, and this is task {it.task}; leave it out"
            )
        ),
    ),
    DocumentRule(
        "grpo.maxTokens is less than data.sequenceLength, which holds the prompt, too",
        lambda it: (
            it.grpo is not None
            and it.grpo.max_tokens >= it.data.sequence_length
            and f"grpo.maxTokens {it.grpo.max_tokens} leaves no room for a prompt in data.sequenceLength "
            f"{it.data.sequence_length}"
        ),
    ),
    DocumentRule(
        "batch.tokensPerStep / data.sequenceLength must be a multiple of grpo.completions",
        lambda it: (
            it.grpo is not None
            and _answers(it) % it.grpo.completions > 0
            and f"a step of tokensPerStep / sequenceLength = {_answers(it)} answers does not divide into prompts of "
            f"grpo.completions {it.grpo.completions} answers each; make it a multiple"
        ),
    ),
    DocumentRule(
        "task grpo needs a model to start from: model.from or model.source",
        lambda it: (
            it.grpo is not None
            and _is_new(it)
            and "task grpo rewards what the model says already, and a new model says nothing; start from another job's "
            "checkpoint (model.from) or a model's folder (model.source)"
        ),
    ),
    DocumentRule(
        "grpo.beta of a whole model is not for data.addTokens",
        lambda it: (
            it.grpo is not None
            and it.grpo.beta > 0
            and it.adapter is None
            and bool(it.data.add_tokens)
            and "grpo.beta compares a whole model with the one that it started from, which doesn't know the tokens of "
            "data.addTokens: teach them first (task sft) and start from that checkpoint; or give an adapter"
        ),
    ),
    DocumentRule(
        "task grpo is not for labelSmoothing, distillation, parallel.compile or precision fp8", _not_while_answering
    ),
    DocumentRule("evaluation.metric is one of those that the evaluations report, and has a direction", _no_metric),
    DocumentRule(
        "evaluation.generate and evaluation.sets.*.answers are for models that write texts, without parallel.compile",
        _no_writer,
    ),
    DocumentRule(
        "data.curation.decontamination needs evaluation.data or evaluation.sets",
        lambda it: (
            it.data.curation is not None
            and it.data.curation.decontamination is not None
            and not (it.evaluation is not None and (it.evaluation.data or it.evaluation.sets))
            and "data.curation.decontamination holds the training documents against evaluation.data and "
            "evaluation.sets, and there is none of them; leave it out, or give evaluation.data"
        ),
    ),
    DocumentRule(
        "data.curation.nearDuplicates.drop false needs evaluation.holdout",
        lambda it: (
            it.data.curation is not None
            and it.data.curation.near_duplicates is not None
            and not it.data.curation.near_duplicates.drop
            and not (it.evaluation is not None and it.evaluation.holdout)
            and "data.curation.nearDuplicates.drop false keeps near duplicates on one side of evaluation.holdout, and "
            "there is none; leave nearDuplicates out, or give evaluation.holdout"
        ),
    ),
)


class TrainingConfig(RuledSpec):
    """Configuration of the computation. Two equal configurations with equal world sizes train equal models."""

    rules = CONFLICTS

    task: Task = "pretrain"
    """`pretrain` learns every token of a document, `sft` what the assistant says in a conversation. `dpo`, `orpo` and
    `simpo` learn which of two answers is preferred, `kto` which answers are good and which bad. `reward` learns to
    score an answer, from pairs. `grpo` learns from scores of the answers that it gives itself.
    """
    dpo: Dpo | None = None
    """The settings of task dpo; left out, their defaults."""
    orpo: Orpo | None = None
    """The settings of task orpo; left out, their defaults."""
    simpo: Simpo | None = None
    """The settings of task simpo; left out, their defaults."""
    kto: Kto | None = None
    """The settings of task kto; left out, their defaults."""
    reward: Reward | None = None
    """The settings of task reward; left out, their defaults."""
    grpo: Grpo | None = None
    """The settings of task grpo, which needs them: what rewards its answers has no default."""
    distillation: Distillation | None = None
    """A teacher whose predictions pretrain and sft learn in addition to the tokens; left out, none."""
    model: ModelConfig
    adapter: Adapter | None = None
    freeze: NamePatterns = ()
    """Weights that stay as they are while the rest learns, by patterns of parts of their names: `embed_tokens`,
    `layers.[0-3]`. Each must match a weight. They have no gradient and no optimizer state, and are written once.
    """
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig
    precision: Precision = "fp32"
    """The arithmetic of forward and backward pass; in bf16 and fp16 the optimizer keeps weights in fp32, unless
    optimizer.masterWeights says otherwise. `fp8` is bf16 whose linear layers multiply in float8, with a scale for each
    row: only whole models, on GPUs of compute capability 8.9 or more.
    """
    parallel: ParallelConfig = ParallelConfig()
    length: Length
    evaluation: Evaluation | None = None
    label_smoothing: Fraction = 0.0
    """The share of each target that is spread over the whole vocabulary, while training only."""
    router_aux_loss_coef: Annotated[float, Field(ge=0, le=100)] | None = None
    """The weight of the loss that keeps the experts of a mixture equally busy; 0 trains without it. Left out, it is
    that of the model's config.json where that says output_router_logits, else 0.
    """
    neftune_noise_alpha: Annotated[float, Field(gt=0, le=1_000)] | None = None
    """Adds noise to the embeddings of pretrain and sft, while training only: uniform within alpha / sqrt(sequenceLength
    × the embedding's width), as NEFTune does (arXiv 2310.05914; 5 to 15 is usual). Left out, none.
    """
    seed: Seed = 0
    """Decides new weights, the order of the data and dropout."""
    deterministic: bool = False
    """Whether only algorithms are used that compute the same bits each time."""

    @property
    def why_not_divided(self) -> str | None:
        """The reason against ranks that divide the tokens of rows, for messages; None where there is none."""
        reasons = (
            ("task grpo, whose answers are written token by token, by every rank for itself", self.task == "grpo"),
            ("distillation, whose teacher reads whole rows", self.distillation is not None),
            ("parallel.compile, which can't compile a layer in which ranks meet", self.parallel.compile),
        )
        return next((words for words, given in reasons if given), None)

    @property
    def scores(self) -> int | None:
        """The scores that a text gets; None where tokens are predicted."""
        return 1 if self.task == "reward" else None

    @property
    def whole_adapter(self) -> Adapter | None:
        """The adapter, with everything that is trained whole alongside it."""
        return self.adapter if self.adapter is None or self.scores is None else self.adapter.with_score_head()

    def sources(self) -> Iterator[tuple[str, Source]]:
        """Every source of documents that is named, with its path in this document."""
        yield from ((f"data.train[{number}]", source) for number, source in enumerate(self.data.train))
        if self.evaluation is not None:
            yield from ((f"evaluation.{path}", source) for path, source in self.evaluation.sources())

    def replicas(self, ranks: int, nodes: int) -> int:
        """Copies of the model in hsdp. Raises ValueError where these ranks can't hold so many."""
        replicas = self.parallel.replicas or nodes
        if self.parallel.shard == "hsdp" and ranks > 1:
            if replicas == 1:
                raise ValueError(
                    "parallel.shard hsdp keeps a copy of the model per node, but there is one node: set "
                    "parallel.replicas, or choose fsdp"
                )
            if ranks % replicas:
                raise ValueError(f"parallel.replicas {replicas} does not divide the {ranks} ranks; choose a divisor")
        return replicas

    def known_steps(self) -> int | None:
        """Optimizer steps of the run; None where only the data says how many an epoch has."""
        if self.length.tokens is not None:
            return math.ceil(self.length.tokens / self.batch.tokens_per_step)
        return self.length.steps

    def samples_per_step(self) -> int:
        """Samples of one optimizer step over the whole gang; of task grpo the prompts, each answered several times."""
        rows = self.batch.tokens_per_step // self.data.sequence_length
        return rows if self.grpo is None else rows // self.grpo.completions

    @property
    def loader_micro_batch(self) -> int:
        """Samples that are dealt to a share together; prompts are dealt one by one."""
        return self.batch.micro_batch if self.grpo is None else 1

    def data_parallel_size(self, ranks: int) -> int:
        """Into how many equal shares a gang of `ranks` ranks divides the samples of a step.

        Every rank computes a share of its own, also where the weights are sharded, unless `parallel.context` ranks
        compute one together. Raises ValueError where these ranks can't be divided so.
        """
        context = self.parallel.context
        if ranks % context:
            raise ValueError(
                f"training.parallel.context {context} does not divide the {ranks} ranks; "
                f"{nearest_divisors(ranks, context)}, or run a multiple of {context} ranks"
            )
        return ranks // context

    def accumulation(self, data_parallel_size: int) -> int:
        """Micro-steps per optimizer step with so many shares. Raises ValueError when the batch can't be divided."""
        per_pass = self.data.sequence_length * self.batch.micro_batch * data_parallel_size
        if self.batch.tokens_per_step % per_pass:
            raise ValueError(
                f"training.batch.tokensPerStep {self.batch.tokens_per_step} can't be divided over {data_parallel_size} "
                f"ranks: it must be a multiple of sequenceLength × microBatch × ranks = {per_pass}"
            )
        return self.batch.tokens_per_step // per_pass
