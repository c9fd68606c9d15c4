"""How much of each source is used, and how often: caps, epochs of a source, what is replayed, and what is refused."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.unit.data.making import config, contents, opened, stored, write_jsonl

from muster.storage.data_shape import look_at
from muster.trainer.data.store import capped, split
from muster.trainer.errors import UserError
from muster.words.base import InvalidDocument


def texts(path: Path, count: int, letter: str, length: int = 15) -> dict[str, Any]:
    """A source of documents that fill a sample of 16 tokens each."""
    lines = [{"text": f"{letter}{number:0{length - 1}d}"} for number in range(count)]
    return {"source": str(write_jsonl(path, lines)), "format": "jsonl"}


def seen(data: Any, count: int) -> Counter[str]:
    """How often each document is the first of a sample."""
    rows = (data.train.sample(*divmod(n, data.train.samples_per_epoch)) for n in range(count))
    return Counter(bytes(row.tokens[:15].tolist()).decode() for row in rows)


def test_a_cap_takes_whole_documents_whatever_files_they_lie_in(tmp_path: Path) -> None:
    dice = random.Random(3)
    lines = [{"text": "".join(dice.choices("abcdef", k=dice.randint(3, 30)))} for _ in range(60)]
    write_jsonl(tmp_path / "one" / "all.jsonl", lines)
    write_jsonl(tmp_path / "two" / "a.jsonl", lines[40:])
    write_jsonl(tmp_path / "two" / "b.jsonl", lines[:40])
    found = []
    for name in ("one", "two"):
        store = stored(tmp_path / name, tmp_path / f"cache-{name}", format="jsonl")
        part = capped(split(store, 0)[0], 20, None)
        assert len(part) == 20
        found.append(contents(store)[part.first : part.last])
        tokens = part.tokens
        assert capped(split(store, 0)[0], None, tokens) == part
        assert len(capped(split(store, 0)[0], None, tokens - 1)) == 19
        assert len(capped(split(store, 0)[0], 7, tokens)) == 7
    assert found[0] == found[1]
    assert set(found[0]) < {line["text"].encode() for line in lines}


def test_sources_are_seen_as_often_as_asked_and_others_replayed(tmp_path: Path) -> None:
    """Packing is off: a document is a sample."""
    train = [
        texts(tmp_path / "a.jsonl", 6, "a") | {"epochs": 3},
        texts(tmp_path / "b.jsonl", 40, "b") | {"epochs": 1, "maxDocuments": 12},
        texts(tmp_path / "c.jsonl", 500, "c") | {"weight": 0.2},
    ]
    data = opened(config(train, packing=False), tmp_path / "cache")
    assert data.train.samples_per_epoch == 36  # 6 × 3 + 12, and a fifth of that
    found = seen(data, 36)
    counts = {letter: sorted(n for text, n in found.items() if text[0] == letter) for letter in "abc"}
    assert counts == {"a": [3] * 6, "b": [1] * 12, "c": [1] * 6}
    again = seen(data, 5 * 36)
    assert sorted(n for text, n in again.items() if text[0] == "b") == [5] * 12
    assert len([text for text in again if text[0] == "c"]) == 30  # always others


def test_caps_and_epochs_are_part_of_what_a_resumed_job_must_find_again(tmp_path: Path) -> None:
    source = texts(tmp_path / "a.jsonl", 20, "a")
    more: list[dict[str, Any]] = [{}, {"epochs": 1}, {"epochs": 2}, {"maxDocuments": 10}, {"maxTokens": 160}]
    prints = {opened(config([source | each]), tmp_path / "cache").fingerprint for each in more}
    assert len(prints) == len(more)


def test_a_held_out_share_is_not_cut_and_evaluation_data_are(tmp_path: Path) -> None:
    source = texts(tmp_path / "a.jsonl", 100, "a")
    held = opened(
        config([source | {"maxDocuments": 5}], evaluation={"every": 1, "holdout": 0.3}, packing=False),
        tmp_path / "cache",
    )
    assert held.train.samples_per_epoch == 5
    assert held.evaluation is not None
    assert held.evaluation.samples_per_epoch > 15
    other = texts(tmp_path / "b.jsonl", 50, "b") | {"maxDocuments": 7}
    apart = opened(config([source], evaluation={"every": 1, "data": [other]}, packing=False), tmp_path / "cache")
    assert apart.evaluation is not None
    assert apart.evaluation.samples_per_epoch == 7


def test_an_estimate_counts_what_an_epoch_reads(tmp_path: Path) -> None:
    a, b = texts(tmp_path / "a.jsonl", 100, "a"), texts(tmp_path / "b.jsonl", 1000, "b")
    found = look_at(config([a | {"epochs": 3}, b | {"epochs": 1, "maxDocuments": 100}, b | {"weight": 0.5}]))
    assert found is not None
    assert found.tokens == pytest.approx((300 + 100) * 15 * 1.5, rel=0.02)


def test_a_cap_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    source = texts(tmp_path / "a.jsonl", 3, "a")
    with pytest.raises(UserError, match=r"maxTokens 10 leaves nothing of it, .* has 16 tokens; raise it"):
        opened(config([source | {"maxTokens": 10}]), tmp_path / "cache")


@pytest.mark.parametrize(
    ("train", "data", "words"),
    [
        ([{"epochs": 2}], {"temperature": 2.0}, "temperature mixes the sources by their sizes, and epochs says"),
        ([{"epochs": 2, "weight": 0.5}], {}, r"train\[0\] has epochs, .* and weight, which says so too"),
        ([{"epochs": 2}, {"weight": 1e7}], {}, "the weights of sources without epochs add up to 1e\\+07"),
        ([{"epochs": 0}], {}, "greater than 0"),
        ([{"maxDocuments": 0}], {}, "greater than 0"),
    ],
)
def test_what_contradicts_itself_is_refused(train: list[dict[str, Any]], data: dict[str, Any], words: str) -> None:
    sources = [{"source": f"/{number}.jsonl", "format": "jsonl"} | each for number, each in enumerate(train)]
    with pytest.raises((InvalidDocument, ValidationError), match=words):
        config(sources, **data)


def test_epochs_are_for_training_alone() -> None:
    source = {"source": "/a.jsonl", "format": "jsonl"}
    with pytest.raises(InvalidDocument, match=r"\[0\].epochs is for training"):
        config([source], evaluation={"every": 1, "data": [source | {"epochs": 2}]})
