"""Chat templates: what of their text is learnt, by a golden file and transformers' mask."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tests.unit.data.chat_templates import FAMILIES, MARKED
from tests.unit.data.making import CHATML, chat_record, stored, write_jsonl, write_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from muster.recipe.data_config import DataConfig
from muster.storage.conversations import ChatConversation, ChatTurn, conversation
from muster.trainer.data import (
    chat_prompt,
    load_tokenizer,
    preference,
    templated,
    tokenizer_from_commit,
    tokenizer_of_folder,
)
from muster.trainer.data.chat import parts
from muster.trainer.data.chat_template import ChatTemplate
from muster.trainer.data.hugging_face_tokenizer import HuggingFaceTokenizer
from muster.trainer.errors import UserError
from muster.words.base import InvalidDocument, parse

GOLDEN = Path(__file__).parent / "golden_templates.txt"


@cache
def tokenizer_of(family: str) -> HuggingFaceTokenizer:
    """A tokenizer of single bytes with the family's special tokens: no token reaches from one word into the next."""
    template, special = FAMILIES[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    configured = json.dumps({"bos_token": special[0], "eos_token": {"content": special[1]}, "chat_template": template})
    return tokenizer_of_folder(made.to_str(), {"tokenizer_config.json": configured}, family)


def shown(record: dict[str, Any], tokenizer: HuggingFaceTokenizer, train_on: str = "assistant") -> str:
    """The document as the model sees it, with what the loss counts in ⟦ ⟧."""
    found = parts(conversation(record, "openai-chat", train_on), tokenizer)
    ids = [(token, part.loss_mask) for part in found for token in (part.ids or tokenizer.encode(part.text))]
    out, run, before = "", list[int](), False
    for token, flag in [*ids, (-1, False)]:
        if flag != before or token < 0:
            text = tokenizer._tokenizer.decode(run, skip_special_tokens=False)
            out, run, before = out + (f"⟦{text}⟧" if before else text), [], flag
        run.append(token)
    return out


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = {
    "messages": [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "Two."},
    ],
    "tools": [{"type": "function", "function": {"name": "add"}}],
}
CASES: dict[str, dict[str, Any]] = {
    "two turns": chat_record(
        ("user", "Hi"), ("assistant", "Hello <|im_end|></s>"), ("user", "Bye"), ("assistant", "Ciao")
    ),
    "a system": chat_record(("system", "Be kind"), ("user", "Hi"), ("assistant", "Hello")),
    "tools": TOOLS,
    "a call": {"messages": TOOLS["messages"]},
    "a thought": {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "Four.", "reasoning_content": "easy"},
        ]
    },
    "roles out of order": chat_record(("user", "a"), ("user", "b"), ("assistant", "c")),
    "the first not learnt": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "weight": 0},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": "d"},
        ]
    },
}


def test_what_each_family_writes_and_learns() -> None:
    """The golden file is for people to read: a change of it is a change of what models learn."""
    lines = []
    for family in FAMILIES:
        for case, record in CASES.items():
            try:
                found = shown(record, tokenizer_of(family))
            except ValueError as error:
                found = f"refused: {error}"
            lines.append(f"=== {family}: {case}\n{found}\n")
    written = "\n".join(lines)
    if not GOLDEN.exists():
        GOLDEN.write_text(written)
        pytest.fail(f"{GOLDEN} was not there and is written anew: read the difference, and run this again")
    assert written == GOLDEN.read_text(), f"remove {GOLDEN} to write it anew, and read the difference"


@pytest.mark.parametrize("family", ["Qwen 2.5", "Llama 3.1"])
def test_a_pairs_tools_are_written_as_a_conversations_are(family: str) -> None:
    """And it is another pair without them; beside texts, and without a template, nothing could write them."""
    tokenizer, turns = tokenizer_of(family), TOOLS["messages"][:1]
    record = {"prompt": turns, "chosen": TOOLS["messages"][1:2], "rejected": [{"role": "assistant", "content": "3"}]}
    one = preference.pair({**record, "tools": TOOLS["tools"]})
    whole = conversation({"messages": TOOLS["messages"][:2], "tools": TOOLS["tools"]}, "openai-chat")
    assert preference.parts(one, tokenizer)[0] == parts(whole, tokenizer)
    assert preference.parts(one, tokenizer)[0] != preference.parts(preference.pair(record), tokenizer)[0]
    assert preference.content_hash(one) != preference.content_hash(preference.pair(record))
    openai = {"messages": turns, "tools": TOOLS["tools"]}
    sides = {"preferred_output": record["chosen"], "non_preferred_output": record["rejected"]}
    assert preference.pair({"input": openai, **sides}) == one
    with pytest.raises(ValueError, match="tools stand beside texts"):
        preference.pair({"prompt": "a", "chosen": "b", "rejected": "c", "tools": TOOLS["tools"]})
    with pytest.raises(ValueError, match=r"give data\.chatTemplate"):
        preference.parts(one, load_tokenizer("bytes"))


@pytest.mark.parametrize("family", ["with marks", "Qwen 2.5", "Llama 3.1"])
def test_the_tokens_are_transformers_own(tmp_path: Path, family: str) -> None:
    tokenizer = tokenizer_of(family)
    template, special = FAMILIES[family]
    (tmp_path / "tokenizer.json").write_text(tokenizer.describe()["json"])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token=special[0], eos_token=special[1]
    )
    record = {"messages": CASES["two turns"]["messages"][2:]}
    if family == "Llama 3.1":  # whose date is today's there
        template = template.replace("strftime_now('%d %b %Y')", "'26 Jul 2024'")
    rendered: Any = theirs.apply_chat_template(
        record["messages"],
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask="{% generation" in template,
    )
    found = parts(conversation(record, "openai-chat"), tokenizer)
    ids = [token for part in found for token in (part.ids or tokenizer.encode(part.text))]
    assert ids == list(rendered["input_ids"])
    if "{% generation" in template:
        flags = [int(part.loss_mask) for part in found for _ in (part.ids or tokenizer.encode(part.text))]
        assert flags == list(rendered["assistant_masks"])
    prompt: Any = theirs.apply_chat_template(
        record["messages"][:1], chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    assert chat_prompt(tokenizer, record["messages"][:1]) == list(prompt["input_ids"])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}{{ m.nothing.at_all }}{% endfor %}",
            "the chat template refuses it: .*has no attribute",
        ),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            r"messages\[1\] can't be found for",
        ),
        (MARKED.replace("m.role == 'assistant'", "loop.last"), r"has 2 assistant turns, but the chat template marks 1"),
        ("{{ ''.__class__.__mro__ }}", "the chat template refuses it: .*unsafe"),
        (
            "{% for m in messages %}<|im_start|>{{ m.content if m.role == 'user' }}{% endfor %}",
            r"messages\[1\]: the chat template leaves out",
        ),
        ("{{ 1 / 0 }}", "the chat template fails on it: ZeroDivisionError"),
    ],
)
def test_what_a_template_can_not_tell_is_refused(tmp_path: Path, template: str, message: str) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", CHATML)
    (tmp_path / "chat_template.jinja").write_text(template)
    record = chat_record(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    data = write_jsonl(tmp_path / "a.jsonl", [record])
    with pytest.raises(UserError, match=rf"a\.jsonl, line 1: .*{message}"):
        stored(data, tmp_path / "cache", str(path))


def data_with(**settings: Any) -> DataConfig:
    return parse(DataConfig, {"train": [{"source": "x"}], **settings}, "data")


NAMED = {name: f"{name}:{MARKED}" for name in ("default", "tool_use", "rag")}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def write_templates(folder: Path, layout: str, templates: dict[str, str]) -> Path:
    """A tokenizer with several templates, as transformers wrote it or writes it."""
    folder.mkdir(exist_ok=True)
    path = write_tokenizer(folder / "tokenizer.json", CHATML)
    document: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": CHATML[-1]}
    if layout == "list":
        document["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    else:
        (folder / "additional_chat_templates").mkdir()
        for name, text in templates.items():
            where = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
            (folder / f"{where}.jinja").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("layout", ["list", "files"])
def test_of_several_templates_one_is_taken_as_transformers_does(tmp_path: Path, layout: str) -> None:
    path = write_templates(tmp_path / "model", layout, NAMED)
    theirs: Any = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "the fox"}]
    for name in (None, *NAMED):
        tokenizer = templated(load_tokenizer(str(path)), data_with(chatTemplateName=name))
        again = tokenizer_from_commit(json.loads(json.dumps(tokenizer.describe())))
        assert again.template is not None
        for tools in ([], [TOOL]):
            expected = theirs.apply_chat_template(
                messages, tools=tools or None, chat_template=name, tokenize=False, add_generation_prompt=True
            )
            asked = ChatConversation((ChatTurn("user", "the fox", False),), tools=tuple(tools))
            assert again.template.prompt(asked) == expected
            assert expected.startswith(f"{name or ('tool_use' if tools else 'default')}:")


def test_a_template_that_there_is_not_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    path = write_templates(tmp_path / "model", "files", NAMED)
    with pytest.raises(UserError, match=r"has no chat template 'rags'; there are: default, rag, tool_use\. Name one"):
        templated(load_tokenizer(str(path)), data_with(chatTemplateName="rags"))
    bare = load_tokenizer(str(write_templates(tmp_path / "bare", "list", {"rag": MARKED})))
    with pytest.raises(UserError, match=r"none is `default` \(rag\); name one in data\.chatTemplateName"):
        templated(bare, data_with())
    named = templated(bare, data_with(chatTemplateName="rag")).template
    assert named == ChatTemplate(MARKED, {"eos_token": CHATML[-1]}), "which keeps the tokens that it writes by name"
    with pytest.raises(UserError, match=r"data\.chatTemplateName: the tokenizer `bytes` writes marks of its own"):
        templated(load_tokenizer("bytes"), data_with(chatTemplateName="rag"))
    with pytest.raises(InvalidDocument, match="leave one of them out"):
        data_with(chatTemplateName="rag", chatTemplate="a.jinja")


def test_a_template_stands_in_the_commit_and_may_be_given(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", CHATML)
    plain = load_tokenizer(str(path))
    assert plain.template is None
    assert "chat_template" not in plain.describe()  # commits of before had none, and must resume as they were
    (tmp_path / "given.jinja").write_text(MARKED)
    tokenizer = templated(plain, data_with(chatTemplate=str(tmp_path / "given.jinja")))
    assert tokenizer.template is not None
    again = tokenizer_from_commit(json.loads(json.dumps(tokenizer.describe())))
    assert again.template == tokenizer.template
    messages = [{"role": "user", "content": "the fox"}]
    assert chat_prompt(again, messages) == chat_prompt(plain, messages)
    with pytest.raises(UserError, match=r"data\.chatTemplate: .*none\.jinja does not exist"):
        templated(plain, data_with(chatTemplate=str(tmp_path / "none.jinja")))
    with pytest.raises(UserError, match="writes marks of its own"):
        templated(load_tokenizer("bytes"), data_with(chatTemplate=str(tmp_path / "given.jinja")))
    (tmp_path / "given.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match="is not valid Jinja"):
        chat_prompt(templated(plain, data_with(chatTemplate=str(tmp_path / "given.jinja"))), messages)
