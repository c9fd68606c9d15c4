"""What is longer than a sample is cut where it was asked for, left out or refused; sources are mixed by their sizes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.data.making import chat_record, config, opened, write_jsonl

from muster.trainer.data import load_tokenizer
from muster.trainer.data.rendering import render
from muster.trainer.data.report import data_report
from muster.trainer.errors import UserError
from muster.words.base import InvalidDocument

POLICIES = ("right", "left", "drop")
LONG = "abcdefghijklmnopqrstuvwxyz"


def chats(path: Path, *turns: tuple[str, str]) -> dict[str, Any]:
    return {
        "source": str(write_jsonl(path, [chat_record(("user", asked), ("assistant", said)) for asked, said in turns])),
        "format": "openai-chat",
    }


def shown(given: Any, cache: Path) -> set[tuple[str, str]]:
    """(read, learnt) of each sample."""
    data = opened(given, cache)
    samples = [render(data.train.sample(0, n), load_tokenizer("bytes")) for n in range(data.train.samples_per_epoch)]
    return {
        ("".join(s.text for s in each.stretches if not s.learnt), "".join(s.text for s in each.stretches if s.learnt))
        for each in samples
    }


def lost(given: Any, cache: Path) -> dict[str, int]:
    (source,) = data_report(opened(given, cache), load_tokenizer("bytes")).sources
    return {each.reason: each.documents for each in source.left_out}


def test_each_policy_cuts_where_it_says(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", ("hi", "yes"), ("hi", LONG), (LONG, "no"))
    cut = {
        how: shown(config([path], 16, packing=False, truncation=how), tmp_path / "cache")
        for how in ("right", "left", "drop")
    }
    short = ("<|user|>hi<|end|><|assistant|>", "yes<|end|>")
    assert cut["right"] == {short, ("<|user|>hi<|end|><|assistant|>", LONG[:11])}
    # The last token is the label of the last one that is read, so of 17 tokens 16 are shown.
    assert cut["left"] == {short, ("k", LONG[11:]), (f"{LONG[-12:]}<|end|><|assistant|>", "no")}
    assert cut["drop"] == {short}
    assert lost(config([path], 16, packing=False), tmp_path / "cache") == {
        "the assistant does not speak within their first 16 tokens": 1
    }
    dropped = config([path], 16, packing=False, truncation="drop")
    assert lost(dropped, tmp_path / "cache") == {"they are longer than 16 tokens": 2}
    with pytest.raises(UserError, match=r"2 documents are longer than 16 tokens \(the longest has 32\)"):
        opened(config([path], 16, truncation="error"), tmp_path / "cache")
    opened(config([path], 32, truncation="error"), tmp_path / "cache")


def test_a_cut_on_the_left_that_leaves_nothing_to_learn_leaves_the_conversation_out(tmp_path: Path) -> None:
    record = {"messages": [*chat_record(("user", "q"), ("assistant", "a"), ("user", LONG))["messages"]]}
    path = {"source": str(write_jsonl(tmp_path / "a.jsonl", [record, chat_record(("user", "b"), ("assistant", "c"))]))}
    given = config([{**path, "format": "openai-chat"}], 16, truncation="left")
    assert lost(given, tmp_path / "cache") == {"the assistant does not speak within their last 16 tokens": 1}


def test_every_document_truncated_away_is_refused(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", (LONG, "no"))
    with pytest.raises(UserError, match="in no conversation does the assistant speak"):
        opened(config([path], 16), tmp_path / "cache")


def test_a_policy_that_cuts_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocument, match=r"has nothing to cut: packed documents"):
        config([{"source": "x"}], truncation="left")
    config([{"source": "x"}], truncation="drop", packing=False)


def test_a_policy_is_part_of_the_fingerprint_but_todays_stays(tmp_path: Path) -> None:
    path = chats(tmp_path / "a.jsonl", ("hi", "yes"), ("hi", LONG))
    prints = {
        opened(config([path], 16, truncation=how), tmp_path / "cache").fingerprint for how in ("right", "left", "drop")
    }
    assert len(prints) == 3


@pytest.mark.parametrize(("temperature", "share"), [(None, 1 / 2), (1, 1 / 17), (2, 1 / 5), (100, 1 / 2)])
def test_sources_are_mixed_by_size_and_temperature(tmp_path: Path, temperature: float | None, share: float) -> None:
    def texts(name: str, count: int) -> dict[str, Any]:
        letter = name[0]
        return {"source": str(write_jsonl(tmp_path / name, [{"text": letter * 15}] * count)), "format": "jsonl"}

    small, large = texts("s.jsonl", 4), texts("l.jsonl", 64)
    data = opened(config([small, large], 16, temperature=temperature), tmp_path / "cache")
    letters = [bytes([int(data.train.sample(0, n).tokens[0])]) for n in range(min(170, data.train.samples_per_epoch))]
    assert np.mean([letter == b"s" for letter in letters]) == pytest.approx(share, abs=0.02)
    plain = opened(config([small, large], 16), tmp_path / "cache")
    assert (plain.fingerprint == data.fingerprint) is (temperature is None)
