"""Counts and sizes as every program tells them, the word that was meant, and text that steers no terminal."""

import pytest

from muster.words.text import counted, nearest, plural, readable, size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 workers"), (1, "1 worker"), (2, "2 workers"), (2_000, "2,000 workers"), (0.5, "0.5 workers")],
)
def test_plurals(count: float, text: str) -> None:
    assert plural(count, "worker") == text


@pytest.mark.parametrize(
    ("words", "one"),
    [
        ("pairs are left out: they are equal", "1 pair is left out: they are equal"),
        ("documents (8.0%) are longer and are cut", "1 document (8.0%) is longer and is cut"),
        ("single answers with labels", "1 single answer with labels"),
        ("records hold a column", "1 record holds a column"),
    ],
)
def test_one_of_what_is_counted(words: str, one: str) -> None:
    assert (counted(1, words), counted(2_000, words)) == (one, f"2,000 {words}")


def test_a_small_model_has_a_size() -> None:
    """`exported: 0.0 MB` for a model of 41 kB."""
    assert [size(count) for count in (0, 41_000, 5 * 1024**3)] == ["0 B", "40.0 KiB", "5.0 GiB"]


@pytest.mark.parametrize(
    ("word", "meant"), [("runing", "Running"), ("QUEUED", "Queued"), ("Faild", "Failed"), ("zebra", None)]
)
def test_the_word_that_was_meant(word: str, meant: str | None) -> None:
    assert nearest(word, ("Queued", "Running", "Failed")) == meant


def test_orders_to_a_terminal_are_left_out_and_what_else_steers_is_a_dot() -> None:
    assert (
        readable("\x1b[31mred\x1b[0m \x1b]0;title\x07\x00\x9b1m\u202egnp.exe\u2066 ok\ttab\n")
        == "red ··1m·gnp.exe· ok\ttab\n"
    )
    assert readable("\x1b") == "·"
    assert readable("naïve 🙂 日本\u00a0語") == "naïve 🙂 日本\u00a0語"
