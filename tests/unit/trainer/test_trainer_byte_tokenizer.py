"""The byte-level tokenizer as `transformers` opens it: the same ids, text and conversations as in training."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.trainer.convert.byte_tokenizer import MARKS, files
from muster.trainer.data.chat import chat_prompt
from muster.trainer.data.tokenizer import ByteTokenizer

OURS = ByteTokenizer()
TEXTS = st.text(st.characters(exclude_categories=["Cs"])).filter(
    lambda text: not any(m in text for m in MARKS.values())
)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    for name, text in files(128).items():
        (folder / name).write_text(text)
    return AutoTokenizer.from_pretrained(folder)


@given(text=TEXTS)
def test_text_has_the_same_ids_and_comes_back(theirs: Any, text: str) -> None:
    ids = theirs(text, add_special_tokens=True)["input_ids"]
    assert ids == OURS.encode(text)
    assert theirs.decode(ids) == text


@given(
    contents=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXTS), min_size=1, max_size=4),
)
def test_a_conversation_is_rendered_as_in_training(theirs: Any, contents: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in contents]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert rendered["input_ids"] == chat_prompt(OURS, messages)


def test_marks_and_limits_are_known(theirs: Any) -> None:
    assert len(theirs) == OURS.vocab_size
    assert theirs.eos_token_id == OURS.eos
    assert theirs.model_max_length == 128
    assert theirs.convert_tokens_to_ids(list(MARKS.values())) == list(MARKS)
