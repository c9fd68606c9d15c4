"""Scorers of the verifiers: each gives an answer a number between 0 and 1, whatever the model wrote.

Their time is proportional to the length of the answer, except for unit tests, which have their time limit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from muster.recipe.curation import matcher
from muster.recipe.verifiers import ExactMatch, JsonSchema, NumericAnswer, Regex, UnitTests, Verifier
from muster.trainer.verify import unit_tests

Columns = Mapping[str, Any]

# Each run of digits is read once, whatever stands around it: linear in the text. "1,234.5", "-3", "2e-5", ".5".
_NUMBER: Final = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,4})?")
_FENCE: Final = "```"


class ModelCompletion(NamedTuple):
    """Text that a model wrote, its prompt, and the columns of the record that the prompt came from."""

    prompt: str
    text: str
    columns: Columns


class AnswerScore(NamedTuple):
    """Score that a verifier gives an answer."""

    value: float  # between 0 and 1
    limit: str | None = None  # which of LIMITS stopped the program that is the answer


class AnswerScorer(Protocol):
    """A verifier, ready to score."""

    def check(self, columns: Columns) -> None:
        """Raises ValueError for a record by which no answer could be scored, with what is wrong in it."""

    def score(self, completion: ModelCompletion) -> AnswerScore:
        """Never raises, whatever the answer is."""


class ExactMatchScorer:
    """Scorer that checks whether the answer is the reference."""

    def __init__(self, config: ExactMatch) -> None:
        self._config = config

    def check(self, columns: Columns) -> None:
        if not self._plain(columns[self._config.column]):
            raise ValueError(f"column {self._config.column} is empty; exactMatch has nothing to compare with")

    def score(self, completion: ModelCompletion) -> AnswerScore:
        said = self._plain(_behind(completion.text, self._config.after))
        return AnswerScore(float(said == self._plain(completion.columns[self._config.column])))

    def _plain(self, value: Any) -> str:
        text = text_of(value).strip()
        return text.casefold() if self._config.ignore_case else text


class RegexScorer:
    """Scorer that checks whether a regular expression is found in the answer."""

    def __init__(self, config: Regex) -> None:
        self._column = config.column
        self._all = None if config.pattern is None else matcher(config.pattern)

    def check(self, columns: Columns) -> None:
        if self._column is not None:
            try:
                matcher(text_of(columns[self._column]))
            except ValueError as error:
                raise ValueError(f"column {self._column}: {error}") from None

    def score(self, completion: ModelCompletion) -> AnswerScore:
        expression = self._all or matcher(text_of(completion.columns[str(self._column)]))
        return AnswerScore(float(expression.isinstance_python(completion.text)))


class JsonSchemaScorer:
    """Scorer that checks whether the answer is JSON that a schema accepts."""

    def __init__(self, config: JsonSchema) -> None:
        self._column = config.column
        self._all = None if config.schema_ is None else _schema(json.loads(config.schema_))

    def check(self, columns: Columns) -> None:
        if self._column is not None:
            try:
                self._of(columns)
            except ValueError as error:
                raise ValueError(f"column {self._column}: {error}") from None

    def score(self, completion: ModelCompletion) -> AnswerScore:
        try:
            document = json.loads(_block(completion.text), parse_constant=_no_number)
            return AnswerScore(float((self._all or self._of(completion.columns)).is_valid(document)))
        except (ValueError, RecursionError):
            return AnswerScore(0.0)

    def _of(self, columns: Columns) -> Any:
        value = columns[str(self._column)]
        return _schema(json.loads(value) if isinstance(value, str) else value)


class NumericAnswerScorer:
    """Scorer that checks whether the last number in the answer is the reference."""

    def __init__(self, config: NumericAnswer) -> None:
        self._config = config

    def check(self, columns: Columns) -> None:
        if last_number(text_of(columns[self._config.column])) is None:
            raise ValueError(
                f"column {self._config.column} is {text_of(columns[self._config.column])[:60]!r}, which has no number"
            )

    def score(self, completion: ModelCompletion) -> AnswerScore:
        said = last_number(_behind(completion.text, self._config.after))
        expected = last_number(text_of(completion.columns[self._config.column]))
        assert expected is not None, "references were checked"
        if said is None:
            return AnswerScore(0.0)
        allowed = max(self._config.tolerance, self._config.relative_tolerance * abs(expected))
        return AnswerScore(float(abs(said - expected) <= allowed))


class UnitTestsScorer:
    """Scorer that checks whether the program in the answer passes its tests."""

    def __init__(self, config: UnitTests) -> None:
        self._config = config

    def check(self, columns: Columns) -> None:
        tests = columns[self._config.column]
        if not isinstance(tests, str) or not tests.strip():
            raise ValueError(f"column {self._config.column} is not the text of tests; unitTests would pass everything")
        try:
            compile(tests, self._config.column, "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"column {self._config.column} is no Python program: {error}") from None

    def score(self, completion: ModelCompletion) -> AnswerScore:
        tests = str(completion.columns[self._config.column])
        limits = self._config.timeout_seconds, self._config.memory_megabytes
        ended = unit_tests.run(_block(completion.text), tests, *limits)
        return AnswerScore(float(ended.passed), ended.limit)


_MAKERS: Final[dict[str, Callable[[Any], AnswerScorer]]] = {
    "exact_match": ExactMatchScorer,
    "regex": RegexScorer,
    "json_schema": JsonSchemaScorer,
    "numeric_answer": NumericAnswerScorer,
    "unit_tests": UnitTestsScorer,
}


def scorer(verifier: Verifier) -> AnswerScorer:
    """Make a verifier ready. Raises ValueError for a schema that is none."""
    return _MAKERS[verifier.kind](getattr(verifier, verifier.kind))


def last_number(text: str) -> float | None:
    """The last number in a text; None where there is none that a double holds."""
    last = None
    for match in _NUMBER.finditer(text):
        last = match[0]
    if last is None:
        return None
    value = float(last.replace(",", ""))
    return value if math.isfinite(value) else None


def text_of(value: Any) -> str:
    """A column's value as the text that it is compared as."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _behind(text: str, mark: str | None) -> str:
    """Return the text after the last `mark`; empty where there is none. Without a mark to look for, it is the whole
    text."""
    if mark is None:
        return text
    return text.rpartition(mark)[2] if mark in text else ""


def _block(text: str) -> str:
    """The last fenced block of a text, without its fences and the language's name; the text itself where there is
    none."""
    parts: Sequence[str] = text.split(_FENCE)
    if len(parts) < 3:
        return text
    block = parts[-2] if len(parts) % 2 else parts[-1]  # one that is not closed is taken to the end
    first, line_end, rest = block.partition("\n")
    is_language = line_end and (not first.strip() or first.strip().isalnum())
    return rest if is_language else block


def _schema(schema: Any) -> Any:
    """Raises ValueError for a schema that is none. Imported here: only who asks for it needs the library."""
    import jsonschema_rs

    try:
        return jsonschema_rs.validator_for(
            schema, pattern_options=jsonschema_rs.RegexOptions(), retriever=_nothing_from_elsewhere
        )
    except ValueError as error:
        raise ValueError(f"is no JSON schema that is taken here: {str(error).splitlines()[0]}") from None


def _nothing_from_elsewhere(address: str) -> Any:
    raise ValueError("a schema must hold all that it refers to")


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
