"""The table of prices: the built-in one, with a file of the platform's owner laid over it."""

from __future__ import annotations

from pathlib import Path

from muster.documents.reader import read_file
from muster.words.base import InvalidDocument, parse
from muster.words.prices import Prices

_BUILT_IN = Path(__file__).with_name("prices.json")


def load_prices(path: Path | None = None) -> Prices:
    """The built-in table, with the user's laid over it type by type. Raises ValueError that names file and fault."""
    prices = parse(Prices, read_file(_BUILT_IN).data)
    if path is None:
        return prices
    try:
        document = read_file(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"the price table {path} can't be used: {error}") from error
    try:
        given = parse(Prices, document.data)
    except InvalidDocument as invalid:
        fault = document.located(invalid.problems[0])
        place = f"line {fault.line}, column {fault.column}: " if fault.line else ""
        raise ValueError(f"the price table {path} can't be used: {place}{fault}") from invalid
    return given.model_copy(update={"types": prices.types | given.types})


def checked_prices(path: Path | None) -> Path | None:
    """The path of a table that can be used: for settings. Raises ValueError as `load_prices` does."""
    load_prices(path)
    return path
