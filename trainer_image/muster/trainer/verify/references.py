"""References: the columns of a record that verifiers read, extracted and checked while the data is prepared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from muster.recipe.data_config import Source
from muster.recipe.data_formats import columns_of
from muster.recipe.evaluation_config import Evaluation
from muster.recipe.verifiers import Verifier
from muster.trainer.errors import UserError
from muster.trainer.verify.scorers import AnswerScorer, scorer

ANSWER: Final = "answer"  # where a record has no such column, what its assistant says
_JSON: Final = (str, int, float, list, dict)


class ReferenceColumns:
    """The columns that verifiers need of each record. Raises UserError for a verifier that can't be made ready."""

    def __init__(self, verifiers: Sequence[Verifier]) -> None:
        self._verifiers = tuple(verifiers)
        self._scorers = [(each.called, each.column, _ready(each)) for each in verifiers]
        self._recipe = sorted({f"{each.kind} {each.column}" for each in verifiers if each.column})

    def __reduce__(self) -> tuple[Any, ...]:
        return ReferenceColumns, (self._verifiers,)  # another process makes its own scorers

    @property
    def columns(self) -> frozenset[str]:
        """The names of the columns that are read."""
        return frozenset(column for _, column, _ in self._scorers if column is not None)

    def recipe(self) -> dict[str, Any]:
        """All that decides what is taken of a record, and whether it is refused."""
        return {"references": self._recipe}

    def of(self, record: Any, answer: str | None) -> bytes:
        """The columns of a record, as JSON. `answer` is what its assistant says. Raises ValueError for one that a
        verifier can't score by."""
        columns: dict[str, Any] = {}
        for called, column, each in self._scorers:
            if column is not None and column not in columns:
                columns[column] = _value(record, column, called, answer)
            each.check(columns)
        try:
            return json.dumps(columns, ensure_ascii=False).encode()
        except TypeError:
            odd = next(column for column, value in columns.items() if not isinstance(value, _JSON))
            raise ValueError(f"column {odd} is a {type(columns[odd]).__name__}, which no verifier reads") from None


def evaluated_sources(evaluation: Evaluation) -> Iterator[tuple[Source, ReferenceColumns | None]]:
    """Every source that is evaluated on alone, and what verifiers read of its records."""
    yield from ((source, None) for source in evaluation.data)
    for each in evaluation.sets.values():
        references = ReferenceColumns(each.answers.verifiers) if each.answers else None
        yield from ((source, references) for source in each.data)


def _ready(verifier: Verifier) -> AnswerScorer:
    try:
        return scorer(verifier)
    except ValueError as error:
        raise UserError(f"verifier {verifier.called}: {error}") from None


def _value(record: Any, column: str, called: str, answer: str | None) -> Any:
    value = record.get(column) if isinstance(record, Mapping) else None
    if value is None and column == ANSWER:
        value = answer
    if value is None:
        raise ValueError(f"has no column {column!r}, which verifier {called} reads (its columns: {columns_of(record)})")
    return value
