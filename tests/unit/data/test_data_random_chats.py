"""Random conversations: no word but the assistant's is learnt, and none of the assistant's is lost, but for the stated
truncation."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.data.chat_templates import FAMILIES
from tests.unit.data.making import config, opened, write_jsonl
from tests.unit.data.test_data_templates import tokenizer_of

from muster.storage.conversations import conversation
from muster.trainer.data import IGNORED, PADDING, RunData, Tokenizer, load_tokenizer
from muster.trainer.data.chat import parts

# Words that spell marks, thoughts, other families' marks, and the beginnings of them.
WORDS = st.lists(
    st.sampled_from(
        ["a", "B ", "é", "\n", "<", "<|im_end|>", "</s>", "<think>", "</", "[/INST]", "<end_of_turn>", "🙂"]
    ),
    min_size=1,
    max_size=4,
).map(lambda words: "x" + "".join(words) + "x")
MARKS = "marks alone"  # of a tokenizer without a template
SETTINGS = settings(max_examples=40, deadline=None)
TRAIN_ON = st.sampled_from(["assistant", "last", "completion"])


@st.composite
def chats(draw: st.DrawFn, tools: bool = True) -> dict[str, Any]:
    """Turns, half of the times in no strict order. Each is tagged by its number and its role's first letter, and so
    is what it calls: a tag is found nowhere else."""
    messages: list[dict[str, Any]] = []

    def add(role: str, words: str | None = None, **more: Any) -> None:
        tag = f"{role[0].upper()}{len(messages)}:"
        messages.append({"role": role, "content": tag + draw(WORDS) if words is None else words, **more})

    strict = draw(st.booleans())  # as some templates want it: user and assistant alternate, and there is nobody else
    if not strict and draw(st.booleans()):
        add("system")
    calling = tools and not strict and draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        for _ in range(1 if strict else draw(st.sampled_from([1, 1, 1, 2]))):
            add("user")
        if calling and draw(st.booleans()):
            names = [f"f{len(messages)}n{n}" for n in range(draw(st.sampled_from([1, 1, 2])))]
            calls = [{"function": {"name": name, "arguments": {"at": f"{name}a", "x": draw(WORDS)}}} for name in names]
            add("assistant", draw(st.sampled_from(["", None])), tool_calls=calls, weight=draw(st.integers(0, 1)))
            for _ in calls:
                add("tool")
        for _ in range(1 if strict else draw(st.sampled_from([1, 1, 1, 0, 2]))):
            add("assistant", weight=draw(st.sampled_from([1, 1, 0])))
    called = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
    declared = [{"type": "function", "function": {"name": name, "description": "D:"}} for name in called]
    return {"messages": messages, **({"tools": declared} if declared and draw(st.booleans()) else {})}


def learning(messages: list[dict[str, Any]], train_on: str) -> set[int]:
    """The turns that are to be learnt."""
    spoken = [number for number, each in enumerate(messages) if each["role"] == "assistant"]
    asked = max(number for number, each in enumerate(messages) if each["role"] == "user")
    wanted = {"assistant": spoken, "last": spoken[-1:], "completion": [n for n in spoken if n > asked]}[train_on]
    return {number for number in wanted if messages[number]["weight"]}


@pytest.mark.parametrize("family", [*FAMILIES, MARKS])
def test_what_is_learnt_is_what_the_assistant_says(family: str) -> None:
    """A template may refuse what it can't write or tell apart; it must not do so always."""
    tokenizer: Tokenizer = load_tokenizer("bytes") if family == MARKS else tokenizer_of(family)
    written = Counter[str]()

    @SETTINGS
    @given(record=chats(), train_on=TRAIN_ON)
    def holds(record: dict[str, Any], train_on: str) -> None:
        messages = record["messages"]
        try:
            found = parts(conversation(record, "openai-chat", train_on), tokenizer)
        except ValueError as refused:
            written[f"refused: {refused}"] += 1
            return
        written["taken"] += 1
        ids = [(token, part.loss_mask) for part in found for token in (part.ids or tokenizer.encode(part.text))]
        learnt, rest = (tokenizer.spell([token for token, flag in ids if flag is which]) for which in (True, False))
        own = learning(messages, train_on)
        for number, message in enumerate(messages):
            tag = f"{message['role'][0].upper()}{number}:"
            if message["content"]:
                assert (tag in learnt) == (number in own), (tag, learnt)
                # What stands beside a call that is only read, a template may leave out.
                assert (tag in rest) == (number not in own) or message.get("tool_calls"), (tag, rest)
            if number in own:
                assert (message["content"] or "") in learnt, (message, learnt)
            for call in message.get("tool_calls", ()):
                name, argument = call["function"]["name"], call["function"]["arguments"]["at"]
                assert (name in learnt, argument in learnt) == (number in own,) * 2, (name, learnt)
                assert number in own or argument in rest, (argument, rest)
        assert "D:" not in learnt

    holds()
    assert written["taken"] >= 5, written


def documents(data: RunData) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The tokens and labels of every document in the samples of an epoch."""
    found = []
    for index in range(data.train.samples_per_epoch):
        sample = data.train.sample(0, index)
        for number in sorted({*sample.documents.tolist()} - {PADDING}):
            inside = sample.documents == number
            found.append((tuple(sample.tokens[inside].tolist()), tuple(sample.labels[inside].tolist())))
    return found


@settings(max_examples=12, deadline=None)
@given(
    records=st.lists(chats(tools=False), min_size=1, max_size=12),
    length=st.integers(8, 90),
    how=st.sampled_from(["right", "left", "drop"]),
    packing=st.booleans(),
)
def test_what_truncation_takes_is_what_it_says(
    records: list[dict[str, Any]], length: int, how: str, packing: bool
) -> None:
    """Of what is longer than a sample, `right` keeps the first tokens, `left` the last, each with the labels it had."""
    first = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    records = [each for each in records if any(m.get("weight") for m in each["messages"])]
    with tempfile.TemporaryDirectory() as folder:
        source = {"source": str(write_jsonl(Path(folder) / "a.jsonl", [first, *records])), "format": "openai-chat"}
        wholes = documents(opened(config([source], 4096, packing=False), Path(folder)))
        found = documents(opened(config([source], length, packing=packing, truncation=how), Path(folder)))
    assert len(wholes) == 1 + len(records)
    expected = []
    for tokens, labels in wholes:
        size = len(tokens)
        begin = max(size - length - 1, 0) if how == "left" else 0
        kept = slice(begin, begin + min(size, length))
        if not (how == "drop" and size > length + 1) and any(label != IGNORED for label in labels[kept]):
            expected.append((tokens[kept], labels[kept]))
    assert sorted(found) == sorted(expected)
