"""Chat: the loss is on what the assistant says and how it ends its turn, and malformed records say where."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.unit.data.chat_templates import CHATML as CHATML_TEMPLATE
from tests.unit.data.making import (
    CHATML,
    GEMMA,
    LLAMA3,
    chat_record,
    config,
    opened,
    stored,
    write_jsonl,
    write_tokenizer,
)

from muster.recipe.curation import Curation
from muster.recipe.data_config import Source
from muster.storage import sources
from muster.storage.conversations import conversation
from muster.trainer.data import chat_prompt, documents, load_tokenizer, reading
from muster.trainer.data.prepare import prepared
from muster.trainer.data.rules import NO_RULES, TextRules
from muster.trainer.errors import UserError
from muster.words.base import parse

EOT, USER, ASSISTANT = 257, 258, 259


def test_a_conversation_as_bytes_and_what_of_it_is_scored(tmp_path: Path) -> None:
    record = chat_record(("system", "S"), ("user", "hi"), ("assistant", "yo"), ("user", "?"), ("assistant", "!"))
    store = stored(write_jsonl(tmp_path / "a.jsonl", [record]), tmp_path / "cache", format="openai-chat")
    expected = [ord("S"), EOT, USER, *b"hi", EOT, ASSISTANT, *b"yo", EOT, USER, *b"?", EOT, ASSISTANT, *b"!", EOT]
    assert store.tokens.tolist() == expected
    assert store.loss_mask is not None
    assert store.loss_mask.tolist() == [0] * 7 + [1, 1, 1] + [0] * 4 + [1, 1]
    assert store.firsts is not None
    assert store.firsts.tolist() == [7]


@pytest.mark.parametrize("piece", [1, 7, 40, 100])
def test_a_long_conversation_is_tokenised_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Its tokens are never in memory all at once, whether one turn is long or there are many; the store is the same."""
    lines = "".join(f"line {number}\n" for number in range(30))
    records = [
        chat_record(("user", "x" * 90 + lines), ("assistant", lines), ("user", "?"), ("assistant", "x" * 250)),
        chat_record(("user", "short"), ("assistant", ".")),
        chat_record(*[(role, "ten chars\n") for _ in range(20) for role in ("user", "assistant")]),
    ]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    whole = stored(path, tmp_path / "whole", format="openai-chat")
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", piece)
    pieced = stored(path, tmp_path / "pieced", format="openai-chat")
    assert pieced.meta == whole.meta
    for name in ("tokens", "loss_mask", "hashes", "starts", "bounds", "firsts"):
        assert getattr(pieced, name).tolist() == getattr(whole, name).tolist(), name
    (file,) = sources.find(str(path), "openai-chat")
    given, tokenizer = Source(source="x", format="openai-chat"), load_tokenizer("bytes")
    chunks = list(documents.RecordReader(given, tokenizer).chunks(reading.FileReading(file).units(given, tokenizer)))
    assert max(sum(len(part.text) for part in chunk.parts) for chunk in chunks) <= piece
    assert [chunk.hash is None for chunk in chunks].count(False) == len(records)


def test_labels_are_only_the_assistants(tmp_path: Path) -> None:
    record = chat_record(("user", "abc"), ("assistant", "de"))
    source = {"source": str(write_jsonl(tmp_path / "a.jsonl", [record])), "format": "openai-chat"}
    sample = opened(config([source], length=12), tmp_path / "cache").train.sample(0, 0)
    tokens = [USER, *b"abc", EOT, ASSISTANT, *b"de", EOT, 256, 256, 256]
    assert sample.tokens.tolist() == tokens
    assert sample.labels.tolist() == [-100] * 5 + [*b"de", EOT] + [-100] * 4
    assert sample.documents.tolist() == [0] * 9 + [-1] * 3
    assert sample.positions.tolist() == [*range(9), 0, 1, 2]


def test_weight_zero_and_text_parts(tmp_path: Path) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "no", "weight": 0},
        {"role": "assistant", "content": "yes", "weight": 1},
    ]
    assert conversation({"messages": messages}, "openai-chat").turns == (
        ("system", "ab", False, {}),
        ("assistant", "no", False, {}),
        ("assistant", "yes", True, {}),
    )


def test_only_the_end_of_turn_is_learnt_of_a_longer_closing(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", CHATML)
    path = write_jsonl(tmp_path / "a.jsonl", [chat_record(("user", "fox"), ("assistant", "dog"))])
    store = stored(path, tmp_path / "cache", str(tokenizer), format="openai-chat")
    loaded = load_tokenizer(str(tokenizer))
    assert loaded.chat is not None
    assert store.loss_mask is not None
    scored = store.tokens[np.flatnonzero(store.loss_mask)].tolist()
    assert scored == [*loaded.encode("dog"), loaded.chat.end_of_turn]
    assert store.tokens.tolist()[-2:] == list(loaded.chat.closing)


def test_a_prompt_ends_where_the_assistant_speaks() -> None:
    tokenizer = load_tokenizer("bytes")
    assert chat_prompt(tokenizer, [{"role": "user", "content": "hi"}]) == [USER, *b"hi", EOT, ASSISTANT]
    with pytest.raises(UserError, match=r"messages\[0\]\.role is 'robot'"):
        chat_prompt(tokenizer, [{"role": "robot", "content": "hi"}])


GOOD = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], 'is not {"messages"'),
        ({"message": [], "id": 1}, r'is not {"messages".*\(its fields: id, message\)'),
        ({"messages": []}, "has no assistant message"),
        (chat_record(("user", "only")), "has no assistant message"),
        ({"messages": [{**GOOD, "weight": 0}]}, "has no assistant message"),
        ({"messages": [GOOD, "hello"]}, r"messages\[1\] is not"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]\.role is None"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"messages\[0\]\.role is \['user'\]"),
        (chat_record(("robot", "x")), "role is 'robot'; known are"),
        (chat_record(("tool", "x"), ("assistant", "y")), r"messages\[0\] is a tool's answer, but no assistant's turn"),
        (chat_record(("assistant", "")), r"messages\[0\] is an empty assistant turn"),
        ({"conversations": [{"from": "human", "value": "x"}]}, r"It looks like sharegpt: .*set the source's `format`"),
        ({"instruction": "x", "output": "y"}, "It looks like alpaca"),
        ({"messages": [{"role": "assistant"}]}, r"messages\[0\]\.content is missing"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "content is a int"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, GOOD]}, "a part that is not text"),
        ({"messages": [{**GOOD, "tool_calls": [{}]}]}, r'tool_calls\[0\] is not {"function"'),
        ({"messages": [{**GOOD, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "is not valid JSON"),
        (
            {"messages": [{**GOOD, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]},
            "only a chat template can write",
        ),
        ({"messages": [{"role": "user", "content": "", "tool_calls": [1]}, GOOD]}, "which only an assistant may"),
        ({"messages": [{**GOOD, "weight": 0.5}]}, "weight is 0.5"),
    ],
)
def test_a_malformed_conversation_names_its_line(tmp_path: Path, record: Any, message: str) -> None:
    path = write_jsonl(tmp_path / "chats.jsonl", [chat_record(("assistant", "fine")), record])
    with pytest.raises(UserError, match=rf"chats\.jsonl, line 2: .*{message}"):
        stored(path, tmp_path / "cache", format="openai-chat")


HALF = "x\ud83d"
HALVES: dict[str, dict[str, Any]] = {
    "jsonl": {"text": HALF},
    "openai-chat": chat_record(("user", HALF), ("assistant", "y")),
    "sharegpt": {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": HALF}]},
    "alpaca": {"instruction": "x", "output": HALF},
    "prompt-completion": {"prompt": HALF, "completion": "y"},
    "preference": {"prompt": "x", "chosen": HALF, "rejected": "y"},
    "unpaired-preference": {"prompt": "x", "completion": HALF, "label": True},
}


@pytest.mark.parametrize("format", HALVES)
@pytest.mark.parametrize("rules", [NO_RULES, TextRules(parse(Curation, {"dropMatching": ["no such"], "quality": {}}))])
def test_half_a_character_names_its_line(tmp_path: Path, format: str, rules: TextRules) -> None:
    """With a tokenizer that refuses it, and beside rules that look at the text before."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", CHATML)
    (tmp_path / "chat_template.jinja").write_text(CHATML_TEMPLATE)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(HALVES[format]) + "\n")
    source = Source(source=str(path), format=format)
    for spec in ("bytes", str(tokenizer)):
        with pytest.raises(UserError, match=r"a\.jsonl, line 1: has half a character \(\\ud83d alone\)"):
            prepared(source, load_tokenizer(spec), tmp_path / "cache", lambda line: None, rules=rules)


def test_half_a_character_in_a_thought_or_a_call_names_its_line(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"a": HALF}}}
    for more in ({"reasoning_content": HALF}, {"tool_calls": [call]}):
        with pytest.raises(UnicodeEncodeError):
            conversation({"messages": [{"role": "assistant", "content": "y", **more}]}, "openai-chat").hash()


def test_a_tokenizer_without_chat_marks_is_refused(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", ["</s>"])
    path = write_jsonl(tmp_path / "a.jsonl", [chat_record(("assistant", "x"))])
    with pytest.raises(UserError, match="no chat template, and no chat marks that Muster knows"):
        stored(path, tmp_path / "cache", str(tokenizer), format="openai-chat")


def test_a_long_conversation_is_truncated_and_counted(tmp_path: Path) -> None:
    records = [
        chat_record(("user", "u"), ("assistant", "a" * 100)),
        chat_record(("user", "u" * 100), ("assistant", "too late")),
        chat_record(("user", "u"), ("assistant", "fits")),
        chat_record(("user", "u"), ("assistant", "a" * 12)),  # 17 tokens: all of them inputs or labels
    ]
    source = {"source": str(write_jsonl(tmp_path / "a.jsonl", records)), "format": "openai-chat"}
    lines: list[str] = []
    train = opened(config([source], length=16), tmp_path / "cache", lines).train
    assert any("1 document is longer than 16 tokens and is truncated" in line for line in lines)
    assert any("1 conversation is left out" in line for line in lines)
    samples = [train.sample(0, index) for index in range(train.samples_per_epoch)]
    assert sum(int((sample.labels != -100).sum()) for sample in samples) == (16 - 3) + 5 + 13


@pytest.mark.parametrize(
    ("user", "labels"),
    [
        ("u" * 13, [ord("a")]),  # the assistant's first word is the label of the last input
        ("u" * 12, [ord("a"), ord("b")]),
        ("u" * 11, [ord("a"), ord("b"), EOT]),
        ("u" * 10, [ord("a"), ord("b"), EOT]),  # what follows the cut is the next user's mark: not a label
    ],
)
def test_where_a_conversation_is_cut(tmp_path: Path, user: str, labels: list[int]) -> None:
    record = chat_record(("user", user), ("assistant", "ab"), ("user", "more"), ("assistant", "more"))
    source = {"source": str(write_jsonl(tmp_path / "a.jsonl", [record])), "format": "openai-chat"}
    sample = opened(config([source], length=16), tmp_path / "cache").train.sample(0, 0)
    assert sample.labels[sample.labels != -100].tolist() == labels


def test_conversations_that_are_all_too_long_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [chat_record(("user", "u" * 50), ("assistant", "x"))])
    source = {"source": str(path), "format": "openai-chat"}
    with pytest.raises(UserError, match=r"within the first 16 tokens; raise data\.sequenceLength"):
        opened(config([source], length=16), tmp_path / "cache")


TURN = {
    "ChatML": (CHATML, "<|im_start|>{role}\n{content}<|im_end|>\n"),
    "Llama 3": (LLAMA3, "<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"),
    "Gemma": (GEMMA, "<start_of_turn>{role}\n{content}<end_of_turn>\n"),
}


@pytest.mark.parametrize("family", TURN)
def test_a_prompt_is_what_the_familys_own_template_writes(tmp_path: Path, family: str) -> None:
    """The templates are those of the published instruct models (Qwen 2.5, Llama 3.1, Gemma 2), one turn each."""
    marks, template = TURN[family]
    path = write_tokenizer(tmp_path / "tokenizer.json", marks)
    messages = [
        {"role": "user", "content": "The quick fox?"},
        {"role": "assistant", "content": " jumps\n\nover ⟨it⟩"},
        {"role": "user", "content": ""},
    ]
    names = {"assistant": "model"} if family == "Gemma" else {}
    said = [template.format(role=names.get(m["role"], m["role"]), content=m["content"]) for m in messages]
    opening = template.partition("{content}")[0].format(role=names.get("assistant", "assistant"))
    theirs = tokenizers.Tokenizer.from_file(str(path)).encode("".join(said) + opening).ids
    assert chat_prompt(load_tokenizer(str(path)), messages) == theirs
