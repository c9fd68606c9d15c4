"""Counts and sizes as every program tells them, and the word that was meant."""

import pytest

from muster.contract.text import nearest, plural, size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 workers"), (1, "1 worker"), (2, "2 workers"), (2_000, "2,000 workers"), (0.5, "0.5 workers")],
)
def test_plurals(count: float, text: str) -> None:
    assert plural(count, "worker") == text


def test_a_small_model_has_a_size() -> None:
    """`exported: 0.0 MB` for a model of 41 kB."""
    assert [size(count) for count in (0, 41_000, 5 * 1024**3)] == ["0 B", "40.0 KiB", "5.0 GiB"]


@pytest.mark.parametrize(
    ("word", "meant"), [("runing", "Running"), ("QUEUED", "Queued"), ("Faild", "Failed"), ("zebra", None)]
)
def test_the_word_that_was_meant(word: str, meant: str | None) -> None:
    assert nearest(word, ("Queued", "Running", "Failed")) == meant
