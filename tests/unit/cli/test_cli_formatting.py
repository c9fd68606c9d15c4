"""Numbers as people read them."""

import math

import pytest

from muster.cli import formatting


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (math.nan, "–"),
        (-3, "0s"),
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (192, "3m12s"),
        (3600, "1h00m"),
        (7_500, "2h05m"),
        (356_400, "4d3h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert formatting.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (math.inf, "–"),
        (0, "0"),
        (842, "842"),
        (8.25, "8.25"),
        (999.7, "1.00k"),
        (51_234, "51.2k"),
        (999_999, "1.00M"),
        (8_030_261_248, "8.03G"),
        (5e12, "5,000G"),
    ],
)
def test_amounts(value: float | None, text: str) -> None:
    assert formatting.amount(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "–"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 1024**3, "5.0 GiB"), (3 * 1024**4, "3.0 TiB")],
)
def test_sizes(count: float | None, text: str) -> None:
    assert formatting.size(count) == text


def test_plurals() -> None:
    assert [formatting.plural(count, "step") for count in (0, 1, 2_000)] == ["0 steps", "1 step", "2,000 steps"]
