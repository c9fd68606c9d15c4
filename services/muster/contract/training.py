"""The training configuration: what the API validates, the TrainingJob carries and the trainer reads, word for word."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from muster.contract.address import Address, AddressError, checkpoint_address, data_address, parse_address
from muster.contract.architecture import PRESETS, Architecture
from muster.contract.base import Many, Spec

# Bounded, so that no sum of theirs leaves 64 bits: 10^15 tokens are some fifty times what anybody has trained on.
Positive = Annotated[int, Field(gt=0, le=10**15)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Seed = Annotated[int, Field(ge=0, le=2**53 - 1)]  # a bound of more bits is no number to a JSON schema
Fraction = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1, max_length=2_000)]


def _address_of(parse: Callable[[str], Address]) -> AfterValidator:
    """Text that `parse` accepts, kept as it was written."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


def _model_address(text: str) -> Address:
    address = parse_address(text)
    if address.scheme == "builtin" or not address.is_absolute:
        raise AddressError(
            f"{text!r} is no address of a model's folder: write s3://bucket/folder, file:///folder, "
            "https://host/folder or hf://organisation/name@revision"
        )
    return address


FolderAddress = Annotated[Text, _address_of(checkpoint_address)]
DataAddress = Annotated[Text, _address_of(data_address)]
ModelAddress = Annotated[Text, _address_of(_model_address)]
WEIGHT_SHARE_MIN = 1e-6  # of a source among all sources: below, an epoch would be millions of times its samples
WEIGHT_SHARE_ODD = 1e-3

Task = Literal["pretrain", "sft"]
Precision = Literal["fp32", "bf16", "fp16"]
Shard = Literal["auto", "ddp", "zero2", "fsdp", "hsdp"]


def _step(value: Any) -> Any:
    is_step = isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 10**15
    if not is_step and value not in ("best", "last"):
        raise ValueError(f"must be best, last or the number of a step, not {value!r}"[:200])
    return value


class FromCommit(Spec):
    """Start from the weights of a commit: of a job in the same project, or of a folder (`<uri>/<job uid>`)."""

    job: Text | None = None
    """The job's id, or its name, which means the newest job of that name."""
    uri: FolderAddress | None = None
    """The checkpoint folder of a job: `<checkpoint.uri>/<job uid>`."""
    step: Annotated[Literal["best", "last"] | Positive, BeforeValidator(_step)] = "best"
    """The step of the commit; `best` has the lowest evaluation loss, `last` is the newest."""

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if self.job is None and self.uri is None:
            raise ValueError("name the source: job (a job of this project) or uri (a job's checkpoint folder)")
        return self


class ModelConfig(Spec):
    """What is trained: exactly one of a preset, a shape, a commit to start from, or the folder of a model."""

    preset: Text | None = None
    """The name of a decoder's shape that Muster knows, such as muster-60m."""
    architecture: Architecture | None = None
    """The shape of a decoder of your own."""
    from_: FromCommit | None = Field(default=None, alias="from")
    """The commit whose weights the job starts from."""
    source: ModelAddress | None = None
    """The address of a folder as Hugging Face writes it (config.json, safetensors, tokenizer.json): s3://, file://,
    https:// or hf://organisation/name@revision. The job has its weights, tokenizer and chat marks.
    """

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        kinds = {"preset": self.preset, "architecture": self.architecture, "from": self.from_, "source": self.source}
        given = [name for name, value in kinds.items() if value]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(kinds)} (given: {', '.join(given) or 'none'})")
        if self.preset and self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}; there are {', '.join(PRESETS)}")
        return self

    @property
    def shape(self) -> Architecture | None:
        """Our own decoder's shape; None when the model comes from a commit or a folder."""
        return PRESETS[self.preset] if self.preset else self.architecture


ALL_LINEAR = "all-linear"


class Adapter(Spec):
    """Small matrices A and B that are trained beside the weights W of some layers, which stay as they are."""

    kind: Literal["lora", "rslora", "dora", "qlora"] = "lora"
    """`lora` computes W + alpha / rank × B A, and `rslora` W + alpha / sqrt(rank) × B A. `dora` is lora with the length
    of each row of the sum trained apart. `qlora` is lora beside weights in four bits (NF4, all linear layers but the
    output head), and needs model.source.
    """
    rank: Positive = 16
    """The inner dimension of B A."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """The weight of B A, before it is divided by the rank or its root."""
    targets: Annotated[Many[Text], Field(min_length=1)] = ("q_proj", "v_proj")
    """Names of linear layers or ends of names (`q_proj`, `self_attn.q_proj`), or `all-linear`, all but the head."""
    dropout: Fraction = 0.0
    """The share of a layer's input that the adapter does not see, while training only."""

    @field_validator("targets")
    @classmethod
    def _once_each(cls, targets: tuple[Text, ...]) -> tuple[Text, ...]:
        if len(set(targets)) < len(targets):
            raise ValueError(f"names a layer twice: {', '.join(targets)}")
        if ALL_LINEAR in targets and len(targets) > 1:
            raise ValueError(f"{ALL_LINEAR} has all layers already; leave the others out: {', '.join(targets)}")
        return targets

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)

    def parameters(self, architecture: Architecture) -> int:
        """Its weights beside a decoder of this shape."""
        ends = {target.rpartition(".")[2] for target in self.targets}
        shapes = [s for name, s in architecture.projections.items() if name in ends or ALL_LINEAR in ends]
        magnitudes = sum(outputs for outputs, _ in shapes) if self.kind == "dora" else 0
        return architecture.layers * (self.rank * sum(sum(shape) for shape in shapes) + magnitudes)


class Source(Spec):
    """A folder, file or glob of documents."""

    source: DataAddress
    """A path, a file://, s3:// or https:// address, a glob, or `builtin://python-stdlib` (Python's own library)."""
    format: Literal["text", "jsonl", "openai-chat"] = "text"
    """In `text` a file is a document. In `jsonl` each line is a JSON object whose `field` is a document. In
    `openai-chat` each line is a conversation: `{"messages": [{"role", "content"}]}`.
    """
    field: Text = "text"
    """The field of a line of `jsonl` that holds the document."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """The source's share of the samples, relative to the weights of the other sources."""


class DataConfig(Spec):
    """What is trained on, and how it becomes samples of equal length."""

    train: Annotated[Many[Source], Field(min_length=1)]
    """The sources of the training documents, mixed by their weights."""
    tokenizer: DataAddress = "bytes"
    """`bytes` (each byte is a token), or the address of a Hugging Face tokenizer.json. A model that is
    started from brings its own.
    """
    sequence_length: Positive = 512
    """Tokens of one sample."""
    packing: bool = True
    """Whether a sample holds several documents, which never attend to one another, or one document and padding."""

    @model_validator(mode="after")
    def _weights_are_comparable(self) -> Self:
        total = math.fsum(source.weight for source in self.train)
        for number, source in enumerate(self.train):
            if not source.weight / total >= WEIGHT_SHARE_MIN:
                raise ValueError(
                    f"train[{number}].weight {source.weight:g} is {source.weight / total:.1g} of all weights, and an "
                    "epoch ends when every sample of every source was seen; give each source at least "
                    f"{WEIGHT_SHARE_MIN:g} of the sum, or leave it out"
                )
        return self


class Schedule(Spec):
    """Warm-up, then `cosine`, `linear`, `wsd` (constant, then linear over the last decayFraction) or `constant`."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """What the learning rate does after the warm-up."""
    warmup_steps: Count = 0
    """Steps in which the learning rate rises from zero."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The learning rate of the last step, as a share of the highest."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The share of all steps in which `wsd` falls."""


class OptimizerConfig(Spec):
    """How weights are changed by gradients."""

    name: Literal["adamw"] = "adamw"
    """The optimizer."""
    lr: Annotated[float, Field(gt=0, lt=10)] = 3e-4
    """The highest learning rate of the schedule."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), strict=False)
    """AdamW's decay of its means of gradients and of squared gradients."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """What AdamW adds to the root of the squared gradients' mean."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.1  # more would turn weights over at any lr of use
    """The share of the learning rate by which weights shrink at each step; norms and biases are spared."""
    clip_norm: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    """The largest norm of the gradient; a longer one is scaled down to it. 0 does not clip."""
    schedule: Schedule = Schedule()


class BatchConfig(Spec):
    """How much is learnt from at a time. What does not fit one forward pass of each rank is accumulated."""

    tokens_per_step: Positive
    """Tokens of one optimizer step, over all ranks."""
    micro_batch: Positive = 1
    """Samples of one forward pass of one rank."""


class ParallelConfig(Spec):
    """How the model is divided over the ranks, and what is recomputed to save memory."""

    shard: Shard = "auto"
    """Each rank holds the whole model (`ddp`), a part of gradients and optimizer (`zero2`), a part of everything
    (`fsdp`), or a part of everything within a group of ranks (`hsdp`). `auto` takes the first of ddp, zero2 and fsdp
    that fits in memory.
    """
    replicas: Positive | None = None
    """Copies of the model in `hsdp`; left out, one per node."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Which activations are recomputed in the backward pass instead of kept."""
    compile: bool = False
    """Whether the layers are compiled by torch.compile."""

    @model_validator(mode="after")
    def _replicas_need_hsdp(self) -> Self:
        if self.replicas is not None and self.shard != "hsdp":
            raise ValueError(f"replicas is only for shard: hsdp, not {self.shard}")
        return self


class Length(Spec):
    """When the job is done: exactly one of steps, tokens, epochs."""

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


class EarlyStopping(Spec):
    """Stop after `patience` evaluations in a row that did not improve the best loss by more than min_delta."""

    patience: Positive
    """Evaluations in a row without an improvement after which the job stops."""
    min_delta: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """By how much the loss must fall to count as an improvement."""


class Evaluation(Spec):
    """How well the model does on what it was not trained on: either `data` or `holdout`."""

    every: Positive
    """Steps between evaluations; the first is at step 0 and the last after the final step."""
    data: Many[Source] = ()
    """Sources of documents that are only evaluated on."""
    holdout: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """The share of the training documents, chosen by their content, that is kept out of training."""
    samples: Positive = 256
    """The most samples that are scored each time."""
    early_stopping: EarlyStopping | None = None
    """When to stop before the length is reached; left out, never."""

    @model_validator(mode="after")
    def _one_kind_of_data(self) -> Self:
        if bool(self.data) == bool(self.holdout):
            raise ValueError("give either data (held-out sources) or holdout (a share of the training documents)")
        return self


class TrainingConfig(Spec):
    """All that decides what is computed. Two equal configurations with equal world sizes train equal models."""

    task: Task = "pretrain"
    """`pretrain` learns every token of a document, `sft` what the assistant says in a conversation."""
    model: ModelConfig
    adapter: Adapter | None = None
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    batch: BatchConfig
    precision: Precision = "fp32"
    """The arithmetic of forward and backward pass; in bf16 and fp16 the optimizer keeps weights in fp32."""
    parallel: ParallelConfig = ParallelConfig()
    length: Length
    evaluation: Evaluation | None = None
    label_smoothing: Fraction = 0.0
    """The share of each target that is spread over the whole vocabulary, while training only."""
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
        if self.adapter is not None and self.adapter.kind == "qlora" and self.model.source is None:
            raise ValueError(
                "adapter.kind qlora quantises the weights of a model's folder while it reads them: give model.source "
                "(`muster checkpoints export` makes such a folder of a commit), or use lora"
            )
        if self.adapter is not None and self.model.from_ is None and self.model.source is None:
            raise ValueError(
                "adapter trains beside weights that stay as they are, and a new model has none worth keeping; start "
                "from another job's commit (model.from) or a model's folder (model.source), or leave adapter out to "
                "train the whole model"
            )
        sources = self.data.train + (self.evaluation.data if self.evaluation else ())
        if self.task == "sft" and any(source.format != "openai-chat" for source in sources):
            raise ValueError("task sft needs every source in format openai-chat")
        if self.task == "pretrain" and any(source.format == "openai-chat" for source in sources):
            raise ValueError("format openai-chat is for task sft; pretrain reads text or jsonl")
        return self

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

    def oddities(self) -> tuple[tuple[str, str], ...]:
        """(path, what is odd there) of what is allowed and seldom meant."""
        schedule, steps = self.optimizer.schedule, self.known_steps()
        found = []
        if steps is not None and schedule.warmup_steps >= steps:
            found.append(
                (
                    "optimizer.schedule.warmupSteps",
                    f"{schedule.warmup_steps} steps of warm-up are all of the {steps} steps of the run: the learning "
                    f"rate ends at {self.optimizer.lr * steps / schedule.warmup_steps:.3g} and never decays",
                )
            )
        elif steps == 1 and schedule.name != "constant" and schedule.min_ratio < 1:
            found.append(
                (
                    "length",
                    f"the run has one step, which is the last of schedule {schedule.name}: it is made at minRatio × lr "
                    f"= {schedule.min_ratio * self.optimizer.lr:.3g}",
                )
            )
        total = math.fsum(source.weight for source in self.data.train)
        found += [
            (
                f"data.train[{number}].weight",
                f"{source.weight:g} is {source.weight / total:.1g} of all weights: an epoch takes at least "
                f"{total / source.weight:,.0f} times this source's samples",
            )
            for number, source in enumerate(self.data.train)
            if source.weight / total < WEIGHT_SHARE_ODD
        ]
        return tuple(found)

    def known_steps(self) -> int | None:
        """Optimizer steps of the run; None where only the data says how many an epoch has."""
        if self.length.tokens is not None:
            return math.ceil(self.length.tokens / self.batch.tokens_per_step)
        return self.length.steps

    def samples_per_step(self) -> int:
        """Samples of one optimizer step over the whole gang."""
        return self.batch.tokens_per_step // self.data.sequence_length

    def data_parallel_size(self, ranks: int) -> int:
        """Into how many equal shares a gang of `ranks` ranks divides the samples of a step.

        Every rank computes a share of its own, also where the weights are sharded. Ranks that computed one model
        together (tensor or pipeline parallelism) would have one share between them.
        """
        return ranks

    def accumulation(self, data_parallel_size: int) -> int:
        """Micro-steps per optimizer step with so many shares. Raises ValueError when the batch can't be divided."""
        per_pass = self.data.sequence_length * self.batch.micro_batch * data_parallel_size
        if self.batch.tokens_per_step % per_pass:
            raise ValueError(
                f"training.batch.tokensPerStep {self.batch.tokens_per_step} can't be divided over {data_parallel_size} "
                f"ranks: it must be a multiple of sequenceLength × microBatch × ranks = {per_pass}"
            )
        return self.batch.tokens_per_step // per_pass
