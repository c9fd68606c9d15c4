"""Generated tokens become text as soon as it is certain, and no later; stops hold across pieces."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.data.making import CHATML, GEMMA, LLAMA3, write_tokenizer

from muster.recipe.architecture import END_OF_DOCUMENT, END_OF_TURN
from muster.trainer.data import load_tokenizer, tokenizer_of_folder
from muster.trainer.data.answers import ends_of_turn, text_of, until


@given(st.text(min_size=1), st.text())
def test_the_pieces_are_the_text(text: str, before: str) -> None:
    tokenizer = load_tokenizer("bytes")
    pieces = list(text_of(tokenizer.encode(text), tokenizer.encode(before), tokenizer))
    assert "".join(pieces) == text
    assert pieces == list(text)  # a letter is told once its last byte is there


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    tokenizer = load_tokenizer("bytes")
    assert "".join(text_of("né".encode()[:-1], [], tokenizer)) == "n\ufffd"


def test_words_of_a_vocabulary_come_one_by_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "t.json", CHATML)))
    text = "the quick brown 日本 fox"
    ids = tokenizer.encode(text)
    assert "".join(text_of(ids[2:], ids[:2], tokenizer)) == text[len(tokenizer.decode(ids[:2])) :]


@pytest.mark.parametrize(
    ("pieces", "stops", "told"),
    [
        (["ab", "cd"], [], "abcd"),
        (["one\n", "\ntwo"], ["\n\n"], "one"),
        (["one\n", "two"], ["\n\n"], "one\ntwo"),
        (["Us", "er:", " x"], ["User:", "x"], ""),
        (["a", "a", "ab"], ["aab"], "a"),
        (["end", "e"], ["ended"], "ende"),
    ],
)
def test_a_stop_is_found_across_pieces_and_never_shown(pieces: list[str], stops: list[str], told: str) -> None:
    found = list(until(pieces, stops))
    assert "".join(found) == told
    assert all(found)


def test_nothing_is_read_behind_a_stop() -> None:
    def pieces() -> list[str]:
        return ["a", "STOP", "never"]

    source = iter(pieces())
    assert "".join(until(source, ["STOP"])) == "a"
    assert next(source) == "never"


def test_a_turn_ends_as_the_family_or_the_template_ends_it(tmp_path: Path) -> None:
    assert ends_of_turn(load_tokenizer("bytes")) == {END_OF_DOCUMENT, END_OF_TURN}
    for marks, end in ((CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (GEMMA, "<end_of_turn>")):
        path = write_tokenizer(tmp_path / f"{len(marks)}{end[1]}.json", marks)
        tokenizer = load_tokenizer(str(path))
        assert ends_of_turn(tokenizer) == {tokenizer.eos, tokenizer.encode_rendered(end)[0][0]}
    path = write_tokenizer(tmp_path / "own.json", ["<|endoftext|>", "<|mine|>"])
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|mine|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    own = tokenizer_of_folder(path.read_text(), {"chat_template.jinja": template}, "here")
    assert ends_of_turn(own) == {own.eos, own.encode_rendered("<|mine|>")[0][0]}
    plain = load_tokenizer(str(path))
    assert ends_of_turn(plain) == {plain.eos}, "one that knows of no turns ends a text"
