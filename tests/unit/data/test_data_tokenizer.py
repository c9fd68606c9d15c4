"""Tokenizers: what goes in comes out, marks are Muster's alone, and a commit carries all of it."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.data.making import CHATML, GEMMA, LLAMA3, write_tokenizer

from muster.recipe.architecture import BYTE_VOCABULARY
from muster.trainer.data import load_tokenizer, tokenizer_from_commit
from muster.trainer.errors import StorageError, UserError


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json", CHATML)


@given(st.text())
def test_bytes_come_back(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert [many.tolist() for many in tokenizer.encode_many([text, "", text])] == [ids, [], ids]


def test_the_marks_of_the_byte_tokenizer_stand_behind_the_bytes() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.chat is not None
    marks = (tokenizer.eos, tokenizer.chat.end_of_turn, *tokenizer.chat.opening["user"])
    assert (*marks, *tokenizer.chat.opening["assistant"]) == (256, 257, 258, 259)
    assert tokenizer.vocab_size == BYTE_VOCABULARY == 260
    assert tokenizer.decode([104, 256, 258, 105, 257]) == "hi"
    assert tokenizer.decode([0xE2, 0x82]) == "\ufffd"


def test_a_hugging_face_file_gives_the_text_back(chatml: Path) -> None:
    tokenizer = load_tokenizer(str(chatml))

    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def gives_back(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert [many.tolist() for many in tokenizer.encode_many([text])] == [tokenizer.encode(text)]

    gives_back()


def test_a_mark_spelt_in_a_document_stays_text(chatml: Path) -> None:
    tokenizer = load_tokenizer(f"file://{chatml}")
    assert tokenizer.chat is not None
    ids = tokenizer.encode("<|im_end|><|endoftext|>")
    assert not {tokenizer.eos, tokenizer.chat.end_of_turn} & set(ids)
    assert tokenizer.decode(ids) == "<|im_end|><|endoftext|>"


@pytest.mark.parametrize(
    ("marks", "end_of_document", "opening", "closing"),
    [
        (CHATML, "<|endoftext|>", "<|im_start|>user\n", "<|im_end|>\n"),
        (LLAMA3, "<|end_of_text|>", "<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
        (GEMMA, "<eos>", "<start_of_turn>user\n", "<end_of_turn>\n"),
    ],
)
def test_the_chat_marks_of_each_family(
    tmp_path: Path, marks: list[str], end_of_document: str, opening: str, closing: str
) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "tokenizer.json", marks).parent))
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    spelt = {number: name.replace("Ċ", "\n") for name, number in vocabulary.items()}
    assert tokenizer.chat is not None
    assert spelt[tokenizer.eos] == end_of_document
    assert "".join(spelt[number] for number in tokenizer.chat.opening["user"]) == opening
    assert "".join(spelt[number] for number in tokenizer.chat.closing) == closing


def test_a_commit_carries_the_whole_tokenizer(chatml: Path) -> None:
    described = json.loads(json.dumps(load_tokenizer(str(chatml)).describe()))
    again = tokenizer_from_commit(described)
    assert again.describe() == described
    assert again.encode("the lazy fox") == load_tokenizer(str(chatml)).encode("the lazy fox")
    assert tokenizer_from_commit({"kind": "bytes"}).describe() == {"kind": "bytes"}


def test_a_damaged_tokenizer_in_a_commit_is_refused(chatml: Path) -> None:
    described = load_tokenizer(str(chatml)).describe()
    with pytest.raises(StorageError, match="SHA-256 does not match"):
        tokenizer_from_commit(described | {"json": described["json"] + " "})
    with pytest.raises(StorageError, match="kind 'sentencepiece'"):
        tokenizer_from_commit({"kind": "sentencepiece"})


def test_an_end_of_document_is_taken_from_the_configuration_beside(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "tokenizer.json", ["<stop>"])
    with pytest.raises(UserError, match=r"no token for the end of a document .*tokenizer_config\.json"):
        load_tokenizer(str(path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.decode([tokenizer.eos]) == ""
    again = tokenizer_from_commit(tokenizer.describe())  # without the file beside
    assert again.eos == tokenizer.eos


# By case: the special tokens, the ordinary ones, the configured eos_token, and the end of a document.
ENDS: dict[str, tuple[list[str], list[str], str | None, str]] = {
    "Gemma's </s> is HTML's": (["<pad>", "<eos>", "<bos>"], ["<s>", "</s>"], "<eos>", "<eos>"),
    "an end of its own beside an ordinary </s>": (["<|begin|>", "<|stop|>"], ["</s>"], "<|stop|>", "<|stop|>"),
    "an end of its own beside a special </s>": (["</s>", "<|stop|>"], [], "<|stop|>", "<|stop|>"),
    "Qwen 2.5 instruct": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [], "<|im_end|>", "<|endoftext|>"),
    "Llama 3.1 instruct": (["<|end_of_text|>", "<|eot_id|>"], [], "<|eot_id|>", "<|end_of_text|>"),
    "an end of turn beside an ordinary </s>": (["<|im_end|>"], ["</s>"], "<|im_end|>", "<|im_end|>"),
    "a name that the vocabulary lacks": (["</s>"], [], "<|stop|>", "</s>"),
    "no name": (["</s>"], ["<|endoftext|>"], None, "</s>"),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_document_ends_with_the_configured_token(tmp_path: Path, case: str) -> None:
    """But for an end of turn, where a document's end is known; transformers' eos_token is the same otherwise."""
    special, ordinary, configured, end = ENDS[case]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    made.add_special_tokens(special)
    made.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ordinary])
    made.save(str(tmp_path / "tokenizer.json"))
    if configured is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": configured}))
    tokenizer = load_tokenizer(str(tmp_path))
    assert made.id_to_token(tokenizer.eos) == end
    assert tokenizer_from_commit(tokenizer.describe()).eos == tokenizer.eos
    # A job that began with another end goes on with it.
    other = tokenizer.describe() | {"end_of_document": "a"}
    assert tokenizer_from_commit(other).eos == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{folder}/none.json", "does not exist"),
        ("{folder}", "does not exist"),
        ("hf://meta-llama/Llama-3.1-8B", "is not read from the hub"),
        ("{folder}/broken.json", "is not a Hugging Face tokenizer.json"),
        ("{folder}/latin.json", "can't read"),
    ],
)
def test_a_bad_tokenizer_is_a_clear_error(tmp_path: Path, spec: str, message: str) -> None:
    (tmp_path / "broken.json").write_text('{"version": "1.0"')
    (tmp_path / "latin.json").write_bytes(b"\xff{}")
    with pytest.raises(UserError, match=message):
        load_tokenizer(spec.format(folder=tmp_path))


@pytest.mark.parametrize("text", ["the quick brown fox", "naïve — 日本語 🦊\n\n\tx", "a  b\u00a0c"])
def test_the_bytes_of_a_texts_tokens_are_the_texts(tmp_path: Path, text: str) -> None:
    for tokenizer in (load_tokenizer("bytes"), load_tokenizer(str(write_tokenizer(tmp_path / "t.json", CHATML)))):
        lengths = tokenizer.text_bytes()
        assert lengths is not None
        assert lengths.shape == (tokenizer.vocab_size,)
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())
        assert lengths[tokenizer.eos] == 0


def test_pieces_of_sentences_and_bytes_that_no_piece_holds_are_counted(tmp_path: Path) -> None:
    vocabulary = {"</s>": 0, "\u2581the": 1, "<0xF0>": 2, "\u2581": 3, "é": 4}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True))
    made.add_special_tokens(["</s>"])
    pieces = tokenizers.decoders
    made.decoder = pieces.Sequence([pieces.Replace("\u2581", " "), pieces.ByteFallback(), pieces.Fuse()])
    made.save(str(tmp_path / "pieces.json"))
    lengths = load_tokenizer(str(tmp_path / "pieces.json")).text_bytes()
    assert lengths is not None
    assert lengths.tolist() == [0, 4, 1, 1, 2]
    made.decoder = pieces.WordPiece()
    made.save(str(tmp_path / "words.json"))
    assert load_tokenizer(str(tmp_path / "words.json")).text_bytes() is None, "lower case has other bytes"


@pytest.mark.parametrize("named", ["tokenizer.model", ""])
def test_a_slow_tokenizer_is_refused_with_the_way_to_convert_it(named: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e\xff")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(
        UserError, match=r"data.tokenizer: .* a LlamaTokenizer without its fast form \(tokenizer.model.*Auto"
    ):
        load_tokenizer(str(tmp_path / named))
