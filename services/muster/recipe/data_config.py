"""Training data and its preparation into samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from muster.recipe.curation import Curation
from muster.recipe.data_formats import Format
from muster.words.base import Many, Spec
from muster.words.fields import DataAddress, Positive, Text

TrainOn = Literal["assistant", "last", "all", "completion"]
Truncation = Literal["right", "left", "drop", "error"]
WEIGHT_SHARE_MIN = 1e-6  # of a source among all sources: below, an epoch would be millions of times its samples
WEIGHT_SHARE_ODD = 1e-3


class Columns(Spec):
    """Column names that differ from those of the format."""

    messages: Text | None = None
    """The list of messages of `openai-chat`."""
    tools: Text | None = None
    """The tools that the assistant may call."""
    conversations: Text | None = None
    """The list of turns of `sharegpt`."""
    system: Text | None = None
    """The system's words of `sharegpt` and `alpaca`."""
    instruction: Text | None = None
    """The task of `alpaca`."""
    input: Text | None = None
    """Column with the input of the `alpaca` instruction."""
    output: Text | None = None
    """The answer of `alpaca`."""
    prompt: Text | None = None
    """Column with the text that a completion follows."""
    completion: Text | None = None
    """Column with the text that follows a prompt."""
    chosen: Text | None = None
    """The answer of a pair that is preferred."""
    rejected: Text | None = None
    """The other answer of a pair."""
    margin: Text | None = None
    """Column with the amount by which the chosen answer is better."""
    label: Text | None = None
    """Whether a completion is good."""

    def renamed(self) -> dict[str, str]:
        """The format's name of each column that is called otherwise in the files."""
        return {theirs: ours for ours, theirs in self.model_dump(exclude_none=True).items()}


class Source(Spec):
    """A folder, file or glob of documents."""

    source: DataAddress
    """A path, a file://, s3:// or https:// address, a glob, or `builtin://python-stdlib` (Python's own library)."""
    format: Format = "auto"
    """Format of the files. In `text` a file is a document. All other formats consist of records: lines of JSON,
    elements of a JSON array, rows of CSV or Parquet, also in .gz and .zst. In `jsonl` the column `field` of a record is
    a document; in `openai-chat`, `sharegpt`, `alpaca` and `prompt-completion` a record is a conversation. In
    `preference` a record is a pair of answers: `{"prompt", "chosen", "rejected"}`, each of them text or a list of
    messages; without a prompt, what the two sides begin with alike is the prompt; OpenAI's `{"input": {"messages"},
    "preferred_output", "non_preferred_output"}` is read too. In `unpaired-preference` it is one answer that is good or
    bad: `{"prompt", "completion", "label": true}`. `auto` looks at the files.
    """
    field: Text = "text"
    """The column that holds the document in format `jsonl`."""
    columns: Columns | None = None
    """Names of the format's columns, where the files use others."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """The source's share of the samples, relative to the weights of the other sources. Beside sources with `epochs` it
    is relative to all of those together: at 0.1 it gives one sample for every ten of theirs, as often as that takes.
    """
    epochs: Annotated[float, Field(gt=0, le=10_000)] | None = None
    """Number of times that its samples are seen in an epoch of the job, in place of a weight: at 1 once, at 0.5 half of
    them, and the other half in the next. An epoch ends when all sources with `epochs` are done.
    """
    max_documents: Positive | None = None
    """Maximum number of its documents to use, chosen by their content; default: all."""
    max_tokens: Positive | None = None
    """Maximum number of tokens of its documents to use, in whole documents chosen by their content; left out, all."""
    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$")] | None = None
    """Name of the source where its own loss is reported; left out, its number."""


def source_names(sources: Sequence[Source]) -> tuple[str, ...]:
    """Return each source's name in metrics: its `name`, or else its number from 0."""
    return tuple(source.name or str(number) for number, source in enumerate(sources))


def with_different_names(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """The sources. Raises ValueError where two of them have one name."""
    names = source_names(sources)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two sources are called {twice[0]}; each source's loss is reported by its name or number")
    return sources


def only_evaluated(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """The sources. Raises ValueError for what is only for training."""
    for number, source in enumerate(sources):
        if source.epochs is not None:
            raise ValueError(f"[{number}].epochs is for training; an evaluation sees every sample once: leave it out")
    return sources


class DataConfig(Spec):
    """Training data and its preparation into samples of equal length."""

    train: Annotated[Many[Source], Field(min_length=1)]
    """The sources of the training documents, mixed by their weights."""
    tokenizer: DataAddress = "bytes"
    """`bytes` (each byte is a token), or the address of a Hugging Face tokenizer.json. A model that is
    started from brings its own.
    """
    add_tokens: Many[Text] = ()
    """New tokens for the tokenizer of model.source, which are recognised wherever documents spell them. Embedding and
    head get a row for each, which begins as the mean of the rows of the tokens there were.
    """
    sequence_length: Positive = 512
    """Tokens of one sample."""
    packing: bool = True
    """Whether a sample holds several documents, which never attend to one another, or one document and padding."""
    chat_template: DataAddress | None = None
    """The address of a Jinja file that writes conversations, instead of the template that the tokenizer brings."""
    chat_template_name: Text | None = None
    """Name of the template for conversations, if the tokenizer has several. Left out, it is `tool_use` where a
    conversation has tools, and else `default`.
    """
    train_on: TrainOn = "assistant"
    """Part of a conversation that is learnt: every turn of the `assistant`, its `last`, its `completion` (all that it
    says after the user's last words), or `all` tokens.
    """
    truncation: Truncation = "right"
    """Handling of text that is longer than a sample: `right` cuts its end, `left` its beginning, `drop` leaves it out,
    and `error` refuses the data. Of a pair of answers, both of which a sample holds, `right` cuts both answers at the
    same length and `left` takes equally many tokens from the beginning of both prompts. Packed documents of task
    pretrain are never too long: they go on in the next sample.
    """
    temperature: Annotated[float, Field(gt=0, le=100)] | None = None
    """Mixes the sources by weight × samples^(1/temperature): 1 takes all in proportion to their sizes, and the higher
    it is, the more often the small ones are seen. Left out, the weights alone decide.
    """
    overfit: Positive | None = None
    """Trains on the first so many samples alone, again and again, and says at the end whether the loss fell to nearly
    nothing: a test of model, data and settings in a few minutes. Left out, it trains on all.
    """
    curation: Curation | None = None
    """Rules for leaving out training documents."""

    @field_validator("add_tokens")
    @classmethod
    def _new_tokens_differ(cls, tokens: tuple[Text, ...]) -> tuple[Text, ...]:
        if twice := sorted({token for token in tokens if tokens.count(token) > 1}):
            raise ValueError(f"names a token twice: {', '.join(map(repr, twice))}")
        if blank := [token for token in tokens if not token.strip()]:
            raise ValueError(f"a token of nothing but white space is in most documents: {blank[0]!r}")
        return tokens

    @field_validator("train")
    @classmethod
    def _names_differ(cls, sources: tuple[Source, ...]) -> tuple[Source, ...]:
        return with_different_names(sources)

    @model_validator(mode="after")
    def _one_template(self) -> Self:
        if self.chat_template is not None and self.chat_template_name is not None:
            raise ValueError(
                "chatTemplate gives a file and chatTemplateName one of the tokenizer's own templates; leave one of "
                "them out"
            )
        return self

    @model_validator(mode="after")
    def _weights_are_comparable(self) -> Self:
        if self.in_epochs:
            self._epochs_go_with_weights()
            return self
        total = math.fsum(source.weight for source in self.train)
        for number, source in enumerate(self.train):
            if not source.weight / total >= WEIGHT_SHARE_MIN:
                raise ValueError(
                    f"train[{number}].weight {source.weight:g} is {source.weight / total:.1g} of all weights, and an "
                    "epoch ends when every sample of every source was seen; give each source at least "
                    f"{WEIGHT_SHARE_MIN:g} of the sum, or leave it out"
                )
        return self

    @property
    def in_epochs(self) -> bool:
        """Return whether sources define the epoch by their `epochs`, instead of every sample being seen once."""
        return any(source.epochs is not None for source in self.train)

    def _epochs_go_with_weights(self) -> None:
        if self.temperature is not None:
            raise ValueError(
                "temperature mixes the sources by their sizes, and epochs says how often each is seen; leave one of "
                "them out"
            )
        for number, source in enumerate(self.train):
            if source.epochs is not None and source.weight != 1.0:
                raise ValueError(
                    f"train[{number}] has epochs, which says how many samples it gives, and weight, which says so too; "
                    "leave one of them out"
                )
        beside = math.fsum(source.weight for source in self.train if source.epochs is None)
        if not 1 / (1 + beside) >= WEIGHT_SHARE_MIN:
            raise ValueError(
                f"the weights of sources without epochs add up to {beside:g}: for each sample of those with epochs "
                "there would be so many others; lower them"
            )
