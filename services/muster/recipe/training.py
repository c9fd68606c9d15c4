"""The training configuration: what the API validates, the TrainingJob carries and the trainer reads, word for word."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from muster.recipe.adapter_config import Adapter
from muster.recipe.data_config import DataConfig, Source
from muster.recipe.data_formats import fits_task, wrong_format
from muster.recipe.distillation import Distillation
from muster.recipe.evaluation_config import Evaluation, must_be_able_to_write, must_be_reported
from muster.recipe.model_config import ModelConfig
from muster.recipe.objectives import PREFERENCE_TASKS, REFERENCE_TASKS, Dpo, Grpo, Kto, Orpo, Reward, Simpo, Task
from muster.recipe.optimizer_config import OptimizerConfig
from muster.recipe.parameter_names import NamePatterns
from muster.words.base import Spec
from muster.words.fields import Fraction, Positive, Seed

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


class ParallelConfig(Spec):
    """Sharding of the model and of its rows over the ranks, and recomputation to save memory."""

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

    @model_validator(mode="after")
    def _replicas_need_hsdp(self) -> Self:
        if self.replicas is not None and self.shard != "hsdp":
            raise ValueError(f"replicas is only for shard: hsdp, not {self.shard}")
        return self


class Length(Spec):
    """Length of the training: exactly one of steps, tokens, epochs."""

    steps: Positive | None = None
    """Optimizer steps."""
    tokens: Positive | None = None
    """Tokens, rounded up to whole steps."""
    epochs: Positive | None = None
    """Passes through all training samples."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = [name for name in ("steps", "tokens", "epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of steps, tokens, epochs (given: {', '.join(given) or 'none'})")
        return self


class TrainingConfig(Spec):
    """Configuration of the computation. Two equal configurations with equal world sizes train equal models."""

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

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        shape, length = self.model.shape, self.data.sequence_length
        if shape and length > shape.max_positions:
            raise ValueError(
                f"data.sequenceLength {length} is longer than the model's position limit {shape.max_positions}; "
                "shorten the sequences or choose a model with more positions"
            )
        if self.batch.tokens_per_step % (length * self.batch.micro_batch):
            raise ValueError(
                f"batch.tokensPerStep {self.batch.tokens_per_step} is not a multiple of sequenceLength × microBatch "
                f"= {length} × {self.batch.micro_batch} = {length * self.batch.micro_batch}"
            )
        self._fits_the_precision()
        self._divides_its_rows()
        if self.data.add_tokens and self.model.source is None:
            raise ValueError(
                "data.addTokens adds to the tokenizer of a model's folder while it is read: give model.source "
                "(`muster checkpoints export` makes such a folder of a checkpoint)"
            )
        if not self.optimizer.master_weights and (self.precision != "bf16" or self.adapter is not None):
            given = f"an adapter of {self.adapter.kind}" if self.adapter is not None else f"precision {self.precision}"
            raise ValueError(
                "optimizer.masterWeights false keeps all weights in bf16: it is for precision bf16 and the whole "
                f"model, not for {given}; leave it out"
            )
        if self.adapter is not None and self.adapter.kind == "qlora" and self.model.source is None:
            raise ValueError(
                "adapter.kind qlora quantises the weights of a model's folder while it reads them: give model.source "
                "(`muster checkpoints export` makes such a folder of a checkpoint), or use lora"
            )
        if self.adapter is not None and self.model.from_ is None and self.model.source is None:
            raise ValueError(
                "adapter trains beside weights that stay as they are, and a new model has none worth keeping; start "
                "from another job's checkpoint (model.from) or a model's folder (model.source), or leave adapter out "
                "to train the whole model"
            )
        self._freezes_what_is_worth_keeping()
        if self.data.overfit is not None and self.optimizer.range_test is not None:
            raise ValueError("data.overfit and optimizer.rangeTest are two trials; make one after the other")
        self._fits_the_task()
        self._fits_rewards()
        if self.evaluation is not None:
            must_be_reported(self.evaluation, self.task, self.data.train)
            must_be_able_to_write(self.evaluation, self.task, self.scores is None, self.parallel.compile)
        self._curation_has_what_it_compares_with()
        return self

    def _fits_rewards(self) -> None:
        """Raise ValueError where the settings of task grpo don't fit the rest, or are there or missing by mistake.

        The task learns from rewards of the model's own answers.
        """
        if (self.grpo is not None) != (self.task == "grpo"):
            raise ValueError(
                "task grpo needs what rewards its answers: give grpo.verifiers, grpo.rewardModel or both"
                if self.grpo is None
                else f"grpo holds the settings of task grpo, and this is task {self.task}; leave it out"
            )
        if self.grpo is None:
            return
        rows, length = self.batch.tokens_per_step // self.data.sequence_length, self.data.sequence_length
        if self.grpo.max_tokens >= length:
            raise ValueError(
                f"grpo.maxTokens {self.grpo.max_tokens} leaves no room for a prompt in data.sequenceLength {length}"
            )
        if rows % self.grpo.completions:
            raise ValueError(
                f"a step of tokensPerStep / sequenceLength = {rows} answers does not divide into prompts of "
                f"grpo.completions {self.grpo.completions} answers each; make it a multiple"
            )
        if self.model.from_ is None and self.model.source is None:
            raise ValueError(
                "task grpo rewards what the model says already, and a new model says nothing; start from another "
                "job's checkpoint (model.from) or a model's folder (model.source)"
            )
        if self.grpo.beta and self.adapter is None and self.data.add_tokens:
            raise ValueError(
                "grpo.beta compares a whole model with the one that it started from, which doesn't know the tokens of "
                "data.addTokens: teach them first (task sft) and start from that checkpoint; or give an adapter"
            )
        for what, given in (
            ("labelSmoothing", self.label_smoothing),
            ("distillation", self.distillation),
            ("parallel.compile", self.parallel.compile),
            ("precision fp8", self.precision == "fp8"),
        ):
            if given:
                raise ValueError(f"task grpo writes its own answers, token by token, and can't do so with {what}")

    def _curation_has_what_it_compares_with(self) -> None:
        curation, evaluation = self.data.curation, self.evaluation
        if curation is None:
            return
        if curation.decontamination is not None and not (evaluation and (evaluation.data or evaluation.sets)):
            raise ValueError(
                "data.curation.decontamination holds the training documents against evaluation.data and "
                "evaluation.sets, and there is none of them; leave it out, or give evaluation.data"
            )
        near = curation.near_duplicates
        if near is not None and not near.drop and not (evaluation and evaluation.holdout):
            raise ValueError(
                "data.curation.nearDuplicates.drop false keeps near duplicates on one side of evaluation.holdout, and "
                "there is none; leave nearDuplicates out, or give evaluation.holdout"
            )

    def _freezes_what_is_worth_keeping(self) -> None:
        if not self.freeze:
            return
        if self.adapter is not None:
            raise ValueError(
                f"freeze leaves some weights as they are, and beside an adapter of {self.adapter.kind} all of them "
                "stay so already; leave one of them out"
            )
        if self.precision == "fp8":
            raise ValueError("freeze is not for precision fp8, which multiplies in float8 where all learns; use bf16")
        if self.model.from_ is None and self.model.source is None:
            raise ValueError(
                "freeze leaves weights as they are, and a new model has none worth keeping; start from another job's "
                "commit (model.from) or a model's folder (model.source), or leave it out"
            )

    def _fits_the_precision(self) -> None:
        rows = self.data.sequence_length * self.batch.micro_batch
        if self.precision == "fp8" and self.adapter is not None:
            raise ValueError(
                f"precision fp8 multiplies in float8 where the whole model is trained, not beside an adapter of "
                f"{self.adapter.kind}; use bf16"
            )
        context = self.parallel.context
        if self.precision == "fp8" and rows % (FP8_MULTIPLE * context):
            divided, multiple = (f" / parallel.context {context}", rows / context) if context > 1 else ("", rows)
            raise ValueError(
                f"precision fp8 multiplies {FP8_MULTIPLE} rows at a time: sequenceLength × microBatch{divided} = "
                f"{multiple:g} must be a multiple of {FP8_MULTIPLE}"
            )
        if self.router_aux_loss_coef is not None and self.task not in ("pretrain", "sft"):
            raise ValueError(f"routerAuxLossCoef is for pretrain and sft; task {self.task} has no load-balancing loss")

    def _divides_its_rows(self) -> None:
        context, length = self.parallel.context, self.data.sequence_length
        if context == 1:
            return
        if length % context:
            raise ValueError(
                f"parallel.context {context} does not divide the {length} tokens of data.sequenceLength; "
                f"{nearest_divisors(length, context)}"
            )
        if (why := self.why_not_divided) is not None:
            raise ValueError(f"parallel.context {context} is not for {why}; leave one of them out")

    @property
    def why_not_divided(self) -> str | None:
        """The reason against ranks that divide the tokens of rows, for messages; None where there is none."""
        reasons = (
            ("task grpo, whose answers are written token by token, by every rank for itself", self.task == "grpo"),
            ("distillation, whose teacher reads whole rows", self.distillation is not None),
            ("parallel.compile, which can't compile a layer in which ranks meet", self.parallel.compile),
        )
        return next((words for words, given in reasons if given), None)

    def _fits_the_task(self) -> None:
        for _, source in self.sources():
            if not fits_task(source.format, self.task):
                raise ValueError(wrong_format(source.format, self.task))
        for name in PREFERENCE_TASKS:
            if name != self.task and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} holds the settings of task {name}, and this is task {self.task}; leave it out"
                )
        if self.task in PREFERENCE_TASKS and self.label_smoothing:
            raise ValueError(
                f"labelSmoothing is for pretrain and sft; task {self.task} compares whole answers"
                + (f": set {self.task}.labelSmoothing" if self.task in ("dpo", "simpo") else "")
            )
        if self.task in PREFERENCE_TASKS and self.neftune_noise_alpha is not None:
            raise ValueError(f"neftuneNoiseAlpha is for pretrain and sft, not for task {self.task}; leave it out")
        if self.distillation is not None and (self.task in PREFERENCE_TASKS or self.label_smoothing):
            what = (
                f"task {self.task}, which compares whole answers" if self.task in PREFERENCE_TASKS else "labelSmoothing"
            )
            raise ValueError(
                f"distillation learns what a teacher predicts for each token, in pretrain and sft; not with {what}: "
                "leave one of them out"
            )
        if self.task == "pretrain" and self.data.packing and self.data.truncation != "right":
            raise ValueError(
                f"data.truncation {self.data.truncation} has nothing to cut: packed documents of task pretrain go on "
                "in the next sample; leave it out, or set data.packing to false"
            )
        if self.task in REFERENCE_TASKS and self.model.from_ is None and self.model.source is None:
            raise ValueError(
                f"task {self.task} holds the model against the one that it starts from, and a new model is none worth "
                "holding to; start from another job's checkpoint (model.from) or a model's folder (model.source)"
            )

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
