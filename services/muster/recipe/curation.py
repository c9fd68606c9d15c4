"""Curation of documents: duplicates, leaks from the evaluation and low quality are left out."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import SchemaError, SchemaValidator, core_schema

from muster.words.base import Many, Spec
from muster.words.fields import Positive, Text

Share = Annotated[float, Field(ge=0, le=1)]


class NearDuplicates(Spec):
    """Documents that share most of their n-grams of words, as MinHash of 128 values estimates it. All sources are
    looked at together; what belongs together is never divided between training and evaluation.holdout."""

    similarity: Annotated[float, Field(ge=0.5, le=1)] = 0.8
    """The share of n-grams in common (Jaccard) from which two documents are near duplicates."""
    ngram: Annotated[int, Field(ge=1, le=50)] = 5
    """Words of an n-gram."""
    drop: bool = True
    """Whether one of each group is kept, or all, on one side of evaluation.holdout."""


class Decontamination(Spec):
    """Drops training documents that share an n-gram of words with a document of evaluation.data or evaluation.sets.
    N-grams that more than 10 evaluation documents have are none of them (Brown et al. 2020, appendix C)."""

    ngram: Annotated[int, Field(ge=5, le=50)] = 13
    """Words of an n-gram."""


class DocumentLength(Spec):
    """Drops documents by their tokens."""

    min_tokens: Positive | None = None
    """The shortest that is kept."""
    max_tokens: Positive | None = None
    """The longest that is kept."""

    @model_validator(mode="after")
    def _some_fit(self) -> Self:
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise ValueError(f"minTokens {self.min_tokens} is above maxTokens {self.max_tokens}: nothing would be kept")
        return self


class Quality(Spec):
    """Rules of Gopher (Rae et al. 2021, table A1) that hold in every language with its thresholds."""

    min_words: Annotated[int, Field(ge=0)] = 50
    """Documents of fewer words are dropped."""
    max_words: Positive = 100_000
    """Documents of more words are dropped."""
    max_symbols_per_word: Share = 0.1
    """Hash signs, or ellipses, for each word."""
    max_bullet_lines: Share = 0.9
    """The share of lines that begin with a bullet."""
    max_ellipsis_lines: Share = 0.3
    """The share of lines that end with an ellipsis."""
    min_alphabetic_words: Share = 0.8
    """The share of words that have a letter."""
    max_duplicate_lines: Share = 0.3
    """The share of lines that stood before in the same document."""


class Curation(Spec):
    """Filters for the training documents. `muster data` counts what they drop, with examples."""

    exact_duplicates: bool = False
    """Drop all but one of the documents of equal content, in all sources together."""
    near_duplicates: NearDuplicates | None = None
    """Drop, or keep together, documents that are nearly equal."""
    decontamination: Decontamination | None = None
    """Drop documents that share text with the evaluation data."""
    length: DocumentLength | None = None
    """Drop documents that are too short or too long."""
    quality: Quality | None = None
    """Drop documents of low quality."""
    drop_matching: Annotated[Many[Text], Field(max_length=100)] = ()
    """Regular expressions (of Rust's regex crate: linear in time, no look-around and no backreferences); documents in
    which one is found are dropped."""

    @field_validator("drop_matching")
    @classmethod
    def _are_patterns(cls, patterns: tuple[Text, ...]) -> tuple[Text, ...]:
        for pattern in patterns:
            matcher(pattern)
        return patterns


def matcher(pattern: str) -> SchemaValidator:
    """Return a matcher whose `isinstance_python(text)` says whether the pattern is found in a text. Raises ValueError
    for an invalid pattern."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        reason = str(error).strip().rpartition("error: ")[2] or str(error)
        raise ValueError(f"{pattern!r} is no regular expression that is taken here: {reason}") from None
