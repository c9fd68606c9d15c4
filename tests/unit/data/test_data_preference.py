"""Preferences: what a pair looks like is found by looking, both sides are cut alike, and each pair is in one row."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.data.making import opened, stored, write_jsonl
from trl.data_utils import maybe_extract_prompt

from muster.recipe.data_formats import looks_like
from muster.recipe.training import TrainingConfig
from muster.storage.data_shape import look_at
from muster.trainer.data.pairs import PairStretches, truncated, unlike_prompts
from muster.trainer.data.preference import pair
from muster.trainer.data.store import split
from muster.trainer.errors import UserError
from muster.words.base import parse

EOS, EOT, USER, ASSISTANT = 256, 257, 258, 259
ASK = {"role": "user", "content": "ab"}


def say(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def config(path: Path, length: int = 32, task: str = "dpo", **data: Any) -> TrainingConfig:
    document = {
        "task": task,
        "model": {"from": {"uri": "file:///base"}},
        "data": {
            "train": [{"source": str(path), "format": "unpaired-preference" if task == "kto" else "preference"}],
            "sequenceLength": length,
            **data,
        },
        "batch": {"tokensPerStep": length * 8},
        "length": {"steps": 1},
    }
    return parse(TrainingConfig, document)


@pytest.mark.parametrize(
    ("record", "kind", "chosen", "rejected"),
    [
        (
            {"prompt": "ab", "chosen": "cd", "rejected": "e"},
            "pairs of texts with an explicit prompt",
            [*b"abcd", EOS],
            [*b"abe", EOS],
        ),
        (
            {"chosen": "one two cd", "rejected": "one two cx"},
            "pairs of texts with a shared beginning",
            [*b"one two cd", EOS],
            [*b"one two cx", EOS],
        ),
        (
            {"prompt": [ASK], "chosen": [say("cd")], "rejected": [say("e")]},
            "pairs of conversations with an explicit prompt",
            [USER, *b"ab", EOT, ASSISTANT, *b"cd", EOT],
            [USER, *b"ab", EOT, ASSISTANT, *b"e", EOT],
        ),
        (
            {"chosen": [ASK, say("cd")], "rejected": [ASK, say("e")]},
            "pairs of conversations with a shared beginning",
            [USER, *b"ab", EOT, ASSISTANT, *b"cd", EOT],
            [USER, *b"ab", EOT, ASSISTANT, *b"e", EOT],
        ),
    ],
)
def test_what_a_pair_looks_like_is_found_and_told(
    tmp_path: Path, record: dict[str, Any], kind: str, chosen: list[int], rejected: list[int]
) -> None:
    path, lines = write_jsonl(tmp_path / "a.jsonl", [record | {"margin": 0.5}]), list[str]()
    data = opened(config(path), tmp_path / "cache", lines)
    assert f"data: {path}: 1 {kind.replace('pairs', 'pair', 1)}" in lines
    sample = data.train.sample(0, 0)
    both = [*chosen, *rejected]
    assert sample.tokens[: len(both)].tolist() == both
    assert sample.documents.tolist() == [0] * len(chosen) + [1] * len(rejected) + [-1] * (32 - len(both))
    assert sample.positions[: len(both)].tolist() == [*range(len(chosen)), *range(len(rejected))]
    assert sample.targets is not None
    assert sample.targets.tolist() == [0.5, 0.5]
    # Scored is what comes after the prompt, the end included; a label is the token after it.
    scored = sample.labels[sample.labels != -100].tolist()
    shared = next(n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    begin = 7 if "one" in str(record) else shared  # a word is not divided
    assert scored == [*chosen[begin:], *rejected[begin:]]
    assert sample.labels[len(chosen) - 1] == sample.labels[len(both) - 1] == -100


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (
            {"messages": [ASK]},
            "it has no chosen (its fields: messages). It looks like openai-chat",
        ),
        (
            {"prompt": "a", "completion": "b", "label": True},
            "It looks like unpaired-preference",
        ),
        (
            {"prompt": "a", "chosen": [say("b")], "rejected": [say("c")]},
            "prompt is text, but chosen is a list of messages",
        ),
        ({"chosen": "a b", "rejected": [say("c")]}, "one of chosen and rejected is text and the other a list"),
        ({"chosen": "abc", "rejected": "xyz"}, "begin with nothing alike, so that there is no prompt; give `prompt`"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "prompt is empty"),
        ({"prompt": [ASK], "chosen": [ASK], "rejected": [say("c")]}, "chosen begins with the user's turn"),
        (
            {"prompt": [ASK], "chosen": [{"role": "judge", "content": "x"}], "rejected": [say("c")]},
            "chosen[0].role is 'judge'; known are",
        ),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "chosen is neither text nor a list of messages"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}, "margin is 'big'; it must be a number"),
        ({"input": {}, "preferred_output": [say("b")], "non_preferred_output": [say("c")]}, "input is not"),
        ({"input": {"messages": [ASK]}, "preferred_output": [say("b")]}, "it has no rejected"),
    ],
)
def test_a_malformed_pair_is_refused_with_its_place(tmp_path: Path, record: dict[str, Any], words: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}, record])
    with pytest.raises(UserError) as refused:
        opened(config(path), tmp_path / "cache")
    assert str(refused.value).startswith(f"{path}, line 2: ")
    assert words in str(refused.value)


def test_openais_form_of_a_pair_is_the_same_pair(tmp_path: Path) -> None:
    theirs = {"input": {"messages": [ASK]}, "preferred_output": [say("cd")], "non_preferred_output": [say("e")]}
    ours = {"prompt": [ASK], "chosen": [say("cd")], "rejected": [say("e")]}
    paths = [write_jsonl(tmp_path / f"{name}.jsonl", [pair]) for name, pair in (("a", theirs), ("b", ours))]
    rows = [opened(config(path), tmp_path / "cache").train.sample(0, 0).tokens.tolist() for path in paths]
    assert rows[0] == rows[1]


PUBLISHED = {  # as ultrafeedback_binarized has them
    "prompt": "ab",
    "prompt_id": "x",
    "chosen": [ASK, say("cd")],
    "rejected": [ASK, say("e")],
    "messages": [ASK, say("cd")],
    "score_chosen": 8.0,
}


def test_a_pair_with_its_prompt_as_text_and_the_messages_beside_is_read_as_trl_reads_it(tmp_path: Path) -> None:
    """The task decides what of such a record is read."""
    path = write_jsonl(tmp_path / "a.jsonl", [PUBLISHED])
    theirs = maybe_extract_prompt(PUBLISHED)
    assert (theirs["prompt"], theirs["chosen"], theirs["rejected"]) == ([ASK], [say("cd")], [say("e")])
    ours = pair({name: theirs[name] for name in ("prompt", "chosen", "rejected")})
    assert pair(PUBLISHED)[:3] == ours[:3]
    sample = opened(config(path, train=[{"source": str(path)}]), tmp_path / "cache").train.sample(0, 0)
    assert sample.tokens[:8].tolist() == [USER, *b"ab", EOT, ASSISTANT, *b"cd", EOT]
    assert looks_like(PUBLISHED) == looks_like(PUBLISHED, task="dpo") == "preference"
    assert looks_like(PUBLISHED, task="sft") == "openai-chat"
    assert look_at(config(path, train=[{"source": str(path)}])) is not None
    with pytest.raises(ValueError, match="prompt is a text that is no turn of what chosen and rejected begin with"):
        pair(PUBLISHED | {"prompt": "another"})


def test_the_format_is_found_and_columns_may_have_other_names(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": "ab", "good": "c", "bad": "d"}])
    source = {"source": str(path), "columns": {"prompt": "question", "chosen": "good", "rejected": "bad"}}
    lines: list[str] = []
    sample = opened(config(path, train=[source]), tmp_path / "cache", lines).train.sample(0, 0)
    assert sample.tokens[:8].tolist() == [*b"abc", EOS, *b"abd", EOS]
    assert f"data: {path} is in format preference, as its files look" in lines


def test_pairs_that_teach_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    records = [
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"chosen": [ASK, say("x")], "rejected": [ASK, say("x")]},
        {"prompt": "a", "chosen": "b", "rejected": ""},
        {"prompt": [ASK], "chosen": [say("")], "rejected": [say("x")]},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    path, lines = write_jsonl(tmp_path / "a.jsonl", records), list[str]()
    assert opened(config(path), tmp_path / "cache", lines).train.samples_per_epoch == 1
    for words in ("chosen and rejected are equal", "an answer is empty"):
        assert f"data: {path}: 2 lines are left out: {words}" in lines
    alone = write_jsonl(tmp_path / "b.jsonl", records[:1])
    with pytest.raises(UserError, match="nothing to train on: 1 line is left out: chosen and rejected are equal"):
        opened(config(alone), tmp_path / "cache")


def test_a_pair_that_is_too_long_is_cut_as_asked(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "abcdef", "chosen": "12345678", "rejected": "1234567x"}])

    def seen(how: str, length: int = 24) -> list[bytes]:
        sample = opened(config(path, length, truncation=how), tmp_path / "cache").train.sample(0, 0)
        return [bytes(min(255, t) for t in sample.tokens[sample.documents == side]) for side in (0, 1)]

    end = b"\xff"  # stands for the end of the document
    assert seen("left") == [b"def12345678" + end, b"def1234567x" + end]
    for how in ("right", "left", "drop", "error"):
        assert seen(how, 30) == [b"abcdef12345678" + end, b"abcdef1234567x" + end]
    lines: list[str] = []
    with pytest.raises(UserError, match="of no pair of answers are both sides left within 24 tokens"):
        opened(config(path, 24, truncation="right"), tmp_path / "cache", lines)
    assert f"data: {path}: 1 pair is left out: their sides are equal once they are cut" in lines
    with pytest.raises(UserError, match="both sides left within 24 tokens"):
        opened(config(path, 24, truncation="drop"), tmp_path / "cache", lines)
    assert f"data: {path}: 1 pair is left out: there are 24 tokens for both sides, and they are longer" in lines
    with pytest.raises(UserError, match=r"1 pair is longer than 24 tokens, both sides together \(the longest has 30\)"):
        opened(config(path, 24, truncation="error"), tmp_path / "cache")


sizes = st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 30))


@given(st.lists(sizes, min_size=1, max_size=20), st.integers(2, 80), st.sampled_from(["right", "left", "drop"]))
@settings(max_examples=150, deadline=None)
def test_both_sides_are_cut_alike(pairs: list[tuple[int, int, int]], length: int, how: Any) -> None:
    prompts, ones, others = np.array(pairs).T
    sizes = np.stack((prompts, ones, prompts, others), 1)
    whole = PairStretches(np.zeros_like(sizes), sizes, np.zeros(len(pairs), np.float32))
    cut, usable, long = truncated(whole, length, how)
    assert (long == (sizes.sum(1) > length)).all()
    assert (cut.sizes[~long] == sizes[~long]).all()
    kept = cut.sizes[usable]
    assert (kept.sum(1) <= length).all()
    assert (kept >= 1).all()
    assert (kept[:, 0] == kept[:, 2]).all()
    if how == "left":
        assert (cut.starts[:, 0] == cut.starts[:, 2]).all()
        assert (cut.sizes[:, [1, 3]] == sizes[:, [1, 3]]).all()
    elif how == "right":
        shortened = usable & long & (cut.sizes[:, 1] < sizes[:, 1]) & (cut.sizes[:, 3] < sizes[:, 3])
        assert (cut.sizes[shortened, 1] == cut.sizes[shortened, 3]).all()
    else:
        assert (usable == ~long).all()


@pytest.mark.parametrize("packing", [True, False])
def test_each_pair_is_once_in_an_epoch_and_whole_in_its_row(tmp_path: Path, packing: bool) -> None:
    records = [{"prompt": f"{n:02}", "chosen": "y" * (1 + n % 5), "rejected": "n" * (1 + n % 3)} for n in range(40)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    data = opened(config(path, 48, packing=packing), tmp_path / "cache").train
    assert data.samples_per_epoch < 40 if packing else data.samples_per_epoch == 40
    for epoch in (0, 1):
        seen = []
        for index in range(data.samples_per_epoch):
            sample = data.sample(epoch, index)
            count = int(sample.documents.max()) + 1
            sides = [bytes(min(255, t) for t in sample.tokens[sample.documents == n])[:-1] for n in range(count)]
            assert all(one[:2] == other[:2] for one, other in zip(sides[::2], sides[1::2], strict=True))
            seen += [
                (one[:2].decode(), one[2:].decode(), o[2:].decode())
                for one, o in zip(sides[::2], sides[1::2], strict=True)
            ]
        assert sorted(seen) == [(r["prompt"], r["chosen"], r["rejected"]) for r in records]


def test_sides_whose_prompts_are_written_in_two_ways_are_found(tmp_path: Path) -> None:
    records = [{"prompt": "ab", "chosen": "c", "rejected": "d"}, {"prompt": "ef", "chosen": "g", "rejected": "h"}]
    store = stored(write_jsonl(tmp_path / "a.jsonl", records), tmp_path / "cache", format="preference")
    assert unlike_prompts(split(store, 0)[0]).tolist() == [False, False]
    assert store.splits is not None
    assert store.loss_mask is not None
    mask = np.array(store.loss_mask)
    mask[store.starts[1] + store.splits[1] + 1] = 1  # the answer of the second side begins one token earlier
    assert unlike_prompts(split(replace(store, loss_mask=mask), 0)[0]).tolist() == [False, True]


def test_a_single_answer_stands_beside_its_prompt_with_another_answer(tmp_path: Path) -> None:
    records = [{"prompt": f"p{n}", "completion": f"answer{n}", "label": n % 2 == 0} for n in range(6)]
    path, lines = write_jsonl(tmp_path / "a.jsonl", records), list[str]()
    data = opened(config(path, 48, task="kto", packing=False), tmp_path / "cache", lines).train
    assert f"data: {path}: 6 single answers with labels, as texts" in lines
    others = []
    for index in range(6):
        sample = data.sample(0, index)
        one, other = (bytes(min(255, t) for t in sample.tokens[sample.documents == n])[:-1] for n in (0, 1))
        number = int(one[1:2])
        assert one == b"p%danswer%d" % (number, number)
        assert other.startswith(b"p%danswer" % number)
        others.append(int(other[-1:]))
        assert others[-1] != number
        assert sample.targets is not None
        assert sample.targets[0] == (number % 2 == 0)
    assert sorted(others) == list(range(6))


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"prompt": "a", "completion": c, "label": True} for c in "bcd"], "every label is true, so that good and bad"),
        ([{"prompt": "a", "completion": c, "label": False} for c in "bcd"], "every label is false"),
        ([{"prompt": "a", "completion": "b", "label": True}], "measures each answer by another one, and there is only"),
        ([{"prompt": "a", "completion": "b", "label": "good"}], "line 1: label is 'good'; it must be true"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], "It looks like preference"),
    ],
)
def test_labels_that_teach_nothing_are_refused(tmp_path: Path, records: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(UserError) as refused:
        opened(config(write_jsonl(tmp_path / "a.jsonl", records), task="kto"), tmp_path / "cache")
    assert words in str(refused.value)


def test_a_conversations_error_says_what_the_line_looks_like(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(UserError, match=r"line 1: is not .* It looks like preference"):
        stored(path, tmp_path / "cache", format="openai-chat")
