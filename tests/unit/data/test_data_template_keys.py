"""Whatever a message holds is given to the template as transformers gives it, or is refused or told to be lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tests.unit.data.chat_templates import DEEPSEEK, FAMILIES, QWEN3, QWEN25
from tests.unit.data.making import chat_record, config, opened, stored, write_jsonl
from tests.unit.data.test_data_templates import shown
from tokenizers import decoders, models, pre_tokenizers

from muster.storage.conversations import conversation
from muster.trainer.data import chat, preference, tokenizer_of_folder
from muster.trainer.data.hugging_face_tokenizer import HuggingFaceTokenizer
from muster.trainer.data.report import data_report
from muster.trainer.errors import UserError
from muster.words.data_report import report_lines

IM = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OSS_TOKENS = ["<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"]
# As gpt-oss' own does it: thoughts of the last turn, whose end is another token than that of the turns before.
OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}<|start|>assistant"
    "<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>"
    "{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
CHATML = FAMILIES["ChatML"][0]
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}"
    " {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
FIRST_SYSTEM = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}",
).replace("{% endfor %}", "{% endif %}{% endfor %}")
NO_USER = "{% for m in messages %}{% if m.role != 'user' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
# As GLM-4's: the mark of the next turn is what ends one.
NO_END = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}" + (
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen 3's writes calls: their arguments as they are where they are text.
TEXT_OR_OBJECT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}{% set a = "
    "c.function.arguments %}{{ c.function.name }}({{ a if a is string else a | tojson }}){% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ITEMS = TEXT_OR_OBJECT.replace("a if a is string else a | tojson", "a.items() | list | tojson")


def folder_of(path: Path, template: str, special: list[str], eos: str) -> Path:
    """A tokenizer of single bytes with this template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    path.mkdir(exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    document = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(document))
    return path


def made(path: Path, template: str, special: list[str] = IM, eos: str = "<|im_end|>") -> HuggingFaceTokenizer:
    folder = folder_of(path, template, special, eos)
    beside = {"tokenizer_config.json": (folder / "tokenizer_config.json").read_text()}
    return tokenizer_of_folder((folder / "tokenizer.json").read_text(), beside, "here")


def ids_of(record: dict[str, Any], tokenizer: HuggingFaceTokenizer) -> list[int]:
    fitted = chat.fitted(conversation(record, "openai-chat"), tokenizer)
    found = chat.parts(fitted.given, tokenizer)
    return [token for part in found for token in (part.ids or tokenizer.encode(part.text))]


def theirs(path: Path, record: dict[str, Any]) -> list[int]:
    """transformers' own."""
    tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    found = tokenizer.apply_chat_template(
        record["messages"], tools=record.get("tools"), tokenize=True, return_dict=True
    )
    return list(found["input_ids"])


def asked(words: str = "a", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": words, **more}]}


def called(arguments: object) -> dict[str, Any]:
    return asked("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": arguments}}])


THINKS = [*IM, "<think>", "</think>"]
CASES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "gpt-oss reads thinking": (OSS, OSS_TOKENS, asked(thinking="because")),
    "Qwen 3 reads reasoning_content": (QWEN3, IM, asked(reasoning_content="because")),
    "a key of its own": (CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.mood }}"), IM, asked(mood="glad")),
    "<think> is special": (QWEN3, THINKS, asked("<think>\nbecause\n</think>\n\na")),
    "<think> is special, in two turns": (
        QWEN3,
        THINKS,
        {
            "messages": asked("<think>\none\n</think>\n\na")["messages"]
            + asked("<think>\ntwo\n</think>\n\nb")["messages"]
        },
    ),
    "<think> is special and only passed on": (CHATML, THINKS, asked("<think>because</think>a")),
    "arguments as text, in a template that takes both": (TEXT_OR_OBJECT, IM, called('{"x":1e3,  "é":"\\u00e9"}')),
    "arguments as an object, in a template that takes both": (TEXT_OR_OBJECT, IM, called({"x": 1000.0})),
    "arguments as text, in a template of text": (DEEPSEEK, FAMILIES["DeepSeek"][1], called('{"x":1e3}')),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_transformers_own(tmp_path: Path, case: str) -> None:
    template, special, record = CASES[case]
    tokenizer = made(tmp_path, template, special, special[1])
    assert ids_of(record, tokenizer) == theirs(tmp_path, record)


def test_arguments_that_a_template_makes_json_of_are_given_as_objects(tmp_path: Path) -> None:
    """Where transformers would write the JSON of a text, which no model calls a tool with, or fail."""
    for template in (QWEN25, ITEMS):
        tokenizer = made(tmp_path, template)
        for text, value in (('{"x":1e3}', {"x": 1000.0}), ("{}", {}), ("", {})):
            assert ids_of(called(text), tokenizer) == theirs(tmp_path, called(value))


@pytest.mark.parametrize(
    ("template", "special", "key", "read"),
    [
        (OSS, OSS_TOKENS, "reasoning_content", "thinking"),
        (OSS, OSS_TOKENS, "reasoning", "thinking"),
        (QWEN3, IM, "thinking", "reasoning_content"),
        (QWEN3, IM, "reasoning", "reasoning_content"),
    ],
)
def test_thoughts_are_given_under_the_name_that_the_template_reads(
    tmp_path: Path, template: str, special: list[str], key: str, read: str
) -> None:
    tokenizer = made(tmp_path / "t", template, special, special[1])
    fitted = chat.fitted(conversation(asked(**{key: "because"}), "openai-chat"), tokenizer)
    assert (fitted.renamed, fitted.unread) == ({key: read}, frozenset())
    assert fitted.given == conversation(asked(**{read: "because"}), "openai-chat")
    # The same thoughts under two names are told once, and other ones are not passed over.
    both = chat.fitted(conversation(asked(**{key: "because", read: "because"}), "openai-chat"), tokenizer)
    assert (both.given, both.unread) == (fitted.given, frozenset())
    both = chat.fitted(conversation(asked(**{key: "other", read: "because"}), "openai-chat"), tokenizer)
    assert (both.given, both.unread) == (fitted.given, {key})
    pair = {"prompt": asked()["messages"][:1], "chosen": asked(**{key: "because"})["messages"][1:]}
    one = preference.pair({**pair, "rejected": [{"role": "assistant", "content": "b"}]})
    assert preference.fitted(one, tokenizer)[0].sides[0] == fitted.given.turns[1:]


def test_a_template_that_looks_at_the_words_of_a_message_is_asked_for_each_conversation(tmp_path: Path) -> None:
    """As Qwen 3's: thoughts before a user's message are written only where that is the answer of a tool."""
    template = QWEN3.replace(
        "{% if m.role == 'user' %}", "{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}"
    )
    tokenizer = made(tmp_path, template)
    called, answer = asked("call", reasoning_content="because"), {"role": "assistant", "content": "b"}

    def record(user: str) -> dict[str, Any]:
        return {"messages": [*called["messages"], {"role": "user", "content": user}, answer]}

    for user, unread in (
        ("and c?", {"reasoning_content"}),
        ("<tool_response>1</tool_response>", set()),
        ("d?", {"reasoning_content"}),
    ):
        assert ids_of(record(user), tokenizer) == theirs(tmp_path, record(user))
        assert chat.fitted(conversation(record(user), "openai-chat"), tokenizer).unread == unread


def test_a_key_of_which_a_template_asks_for_one_value_is_given_to_it_whatever_came_before(tmp_path: Path) -> None:
    template = CHATML.replace("{{ m.content }}", "{% if m.channel == 'analysis' %}(thinks) {% endif %}{{ m.content }}")
    tokenizer = made(tmp_path, template)
    for channel in ("final", "analysis", "final"):
        assert ids_of(asked(channel=channel), tokenizer) == theirs(tmp_path, asked(channel=channel))
        pair = {"prompt": asked()["messages"][:1], "rejected": [{"role": "assistant", "content": "b"}]}
        one = preference.pair({**pair, "chosen": asked(channel=channel)["messages"][1:]})
        fitted, _ = preference.fitted(one, tokenizer)
        (chosen, _) = preference.parts(fitted, tokenizer)
        assert [token for part in chosen for token in part.ids] == theirs(tmp_path, asked(channel=channel))


def test_what_nobody_learns_or_sees_is_counted(tmp_path: Path) -> None:
    """Thoughts as a warning, further keys and columns in a line; the documents are those without."""
    records = [asked("x", thinking="t", id=1) | {"source": "s"}, asked("y", thinking="t"), asked("z")]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    folder = folder_of(tmp_path / "t", CHATML, IM, "<|im_end|>")
    architecture = {
        "dim": 16,
        "layers": 1,
        "heads": 1,
        "kvHeads": 1,
        "ffnDim": 16,
        "vocabSize": 300,
        "maxPositions": 64,
    }
    given = config([{"source": str(path), "format": "openai-chat"}], 64, tokenizer=str(folder))
    given = given.model_copy(update={"model": type(given.model).model_validate({"architecture": architecture})})
    lines: list[str] = []
    data = opened(given, tmp_path / "cache", lines)
    unread = "in their messages, which the chat template does not write: they are neither learnt nor shown to the model"
    assert data.warnings[0] == f"{path}: 2 conversations hold `thinking` {unread}"
    assert not any("`id`" in warning for warning in data.warnings)
    assert f"data: {path}: 1 conversation holds `id` {unread}" in lines
    assert f"data: {path}: columns that are not read: source" in lines
    report = data_report(data, made(tmp_path / "t", CHATML))
    shown_lines = report_lines(report)
    assert f"  2 conversations hold `thinking` {unread}" in shown_lines
    assert "  1 record holds a column that is not read: source" in shown_lines
    bare = write_jsonl(tmp_path / "b.jsonl", [asked("x"), asked("y"), asked("z")])
    assert (
        stored(path, tmp_path / "c", str(folder)).meta.contents
        == stored(bare, tmp_path / "c", str(folder)).meta.contents
    )


def test_a_name_of_a_key_or_column_speaks_to_no_terminal_and_ends_no_report(tmp_path: Path) -> None:
    """Half a character in it was a traceback once the data were read."""
    record = asked("x", **{"mood\ud83d": "glad"}) | {"other\x1b[2J\ud83d": "s"}
    path = write_jsonl(tmp_path / "a.jsonl", [record])
    folder = folder_of(tmp_path / "t", CHATML, IM, "<|im_end|>")
    kinds = stored(path, tmp_path / "cache", str(folder), format="openai-chat").meta.kinds
    assert [words for words in kinds if "`mood\\ud83d`" in words]
    assert "records hold a column that is not read: other\\x1b[2J\\ud83d" in kinds


def test_an_answer_that_is_a_call_without_words_is_learnt(tmp_path: Path) -> None:
    """Beside one in words; such pairs were left out as ones with an empty answer."""
    tokenizer = made(tmp_path, TEXT_OR_OBJECT)
    question, worded = asked("b")["messages"]
    for key, call in (
        ("tool_calls", called('{"x": 1}')["messages"][1]["tool_calls"]),
        ("function_call", {"name": "f", "arguments": '{"x": 1}'}),
    ):
        answer = {"role": "assistant", "content": None, key: call}
        one = preference.pair({"prompt": [question], "chosen": [answer], "rejected": [worded]})
        assert one.fault == ""
        first, second = preference.parts(one, tokenizer)
        learnt = [
            tokenizer.spell([token for part in side if part.loss_mask for token in part.ids])
            for side in (first, second)
        ]
        assert learnt == ['f({"x": 1})<|im_end|>', "b<|im_end|>"]
        assert preference.labelled({"prompt": [question], "completion": [answer], "label": True}).fault == ""
    nothing = {"role": "assistant", "content": ""}
    silent = preference.pair({"prompt": [question], "chosen": [nothing], "rejected": [worded]})
    assert silent.fault == preference.NO_ANSWER


SYSTEM = chat_record(("system", "Answer in French."), ("user", "hi"), ("assistant", "salut"))
LATER = {"messages": [*asked()["messages"], *SYSTEM["messages"]]}


@pytest.mark.parametrize(
    ("template", "record", "place"),
    [
        (NO_SYSTEM, SYSTEM, r"messages\[0\]: .* \(system\)"),
        (FIRST_SYSTEM, LATER, r"messages\[2\]: .* \(system\)"),
        (NO_USER, asked(), r"messages\[0\]: .* \(user\)"),
    ],
)
@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_an_instruction_that_the_template_leaves_out_is_refused(
    tmp_path: Path, template: str, record: dict[str, Any], place: str, train_on: str
) -> None:
    tokenizer = made(tmp_path, template)
    given = conversation(record, "openai-chat", train_on)
    with pytest.raises(ValueError, match=rf"^{place}; give a template that writes them as data\.chatTemplate"):
        chat.parts(given, tokenizer)
    assert chat.parts(conversation(SYSTEM, "openai-chat"), made(tmp_path, FIRST_SYSTEM))


def test_a_template_without_an_end_of_turn_is_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [asked(), asked("b")])
    for template, told in ((NO_END, 2), (CHATML, None)):
        folder = folder_of(tmp_path / "t", template, IM, "<|endoftext|>")
        kinds = stored(path, tmp_path / "cache", str(folder)).meta.kinds
        words = "conversations teach no end of the assistant's turn, for no special token ends it in the chat template"
        assert kinds.get(words) == told


def test_a_conversation_that_the_assistant_begins_is_read_by_a_template_that_looks_at_the_first_turn(
    tmp_path: Path,
) -> None:
    record = chat_record(("assistant", "Hello"), ("user", "hi"), ("assistant", "yes?"))
    tokenizer = made(tmp_path, QWEN25)
    assert shown(record, tokenizer) == (
        "<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>assistant\n⟦Hello<|im_end|>⟧\n<|im_start|>user\nhi"
        "<|im_end|>\n<|im_start|>assistant\n⟦yes?<|im_end|>⟧\n"
    )
    assert ids_of(record, tokenizer) == theirs(tmp_path, record)


def test_two_turns_of_gpt_oss_are_refused_or_the_last_is_learnt(tmp_path: Path) -> None:
    """Its earlier turns end with another token than the one that ends an answer."""
    record = {"messages": asked("one")["messages"] + asked("two", thinking="because")["messages"]}
    tokenizer = made(tmp_path, OSS, OSS_TOKENS, "<|return|>")
    with pytest.raises(ValueError, match=r"messages\[1\] can't be found for certain .* or set trainOn: last"):
        shown(record, tokenizer)
    last = "<|channel|>analysis<|message|>because<|end|><|start|>assistant<|channel|>final<|message|>two<|return|>"
    assert shown(record, tokenizer, "last").endswith(f"<|start|>assistant⟦{last}⟧")


def test_tools_beside_texts_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}])
    with pytest.raises(UserError, match="line 1: tools stand beside texts; only a conversation's template can write"):
        stored(path, tmp_path / "cache")
