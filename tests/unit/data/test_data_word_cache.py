"""Words that are looked up: the same ids as the library's, or the library's own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from muster.trainer.data import load_tokenizer, word_cache
from muster.trainer.data.hugging_face_tokenizer import HuggingFaceTokenizer
from muster.trainer.data.word_cache import WordCache

ByteLevel, Split = pre_tokenizers.ByteLevel, pre_tokenizers.Split
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
# GPT-4o's, and gpt-oss': upper and lower case apart.
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [Path(json.__file__).read_text(), "naïve Ωμέγα Привет 你好,世界 かな 한국어 हिन्दी ไทย 🙂🙂 ½Ⅷ٣ it's I'LL " * 9]


def split_by(pattern: str, behavior: str = "isolated") -> Any:
    split = Split(Regex(pattern), behavior)
    return pre_tokenizers.Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


FAMILIES = {
    "gpt2": ByteLevel(add_prefix_space=False),
    "llama3": split_by(LLAMA3),
    "qwen2": split_by(QWEN2),
    "o200k": split_by(O200K),
}


def trained(pre_tokenizer: Any, normalizer: Any = None, added: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2_000, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([AddedToken(each, normalized=False) for each in added])
    made.encode_special_tokens = True
    return made


def cached(tokenizer: tokenizers.Tokenizer) -> WordCache:
    found = word_cache.word_cache(tokenizer)
    assert found is not None
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[tokenizers.Tokenizer, WordCache]:
    made = trained(FAMILIES[request.param])
    return made, cached(made)


def words(tokenizer: tokenizers.Tokenizer, text: str) -> list[str]:
    return [text[start:stop] for _, (start, stop) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def test_every_character_is_of_the_class_that_the_library_has_it_in(
    family: tuple[tokenizers.Tokenizer, WordCache],
) -> None:
    (tokenizer, cache), met = family, 0
    for block in range(0, 0x20000, 0x100):
        characters = [chr(code) for code in range(block, block + 0x100) if not 0xD800 <= code <= 0xDFFF]
        text = " ".join(f"a{c}b1{c}2 {c}{c}'{c}-{c}\n" for c in characters)
        if (found := cache.words(text)) is not None:
            met += 1
            assert found == words(tokenizer, text)
    assert met >= 255, "the basic plane but for surrogates, and emoji, are split here"


PIECES = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(
    [" ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "'ſ", "1234", "<|endoftext|>", "Ab", "ﬆ", "e\u0301", "🙂", "\u2028"]
)


@given(st.lists(PIECES).map("".join))
def test_ids_are_those_of_the_library(family: tuple[tokenizers.Tokenizer, WordCache], text: str) -> None:
    tokenizer, cache = family
    ids = cache.encode(text)
    if ids is None:
        assert any(ord(c) > 0xFFFF for c in text), "the library is asked for rare characters only"
    else:
        assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids


@given(st.lists(PIECES).map("".join))
def test_places_are_those_of_the_library(family: tuple[tokenizers.Tokenizer, WordCache], text: str) -> None:
    """A prompt's edge is found by them in the text that it makes with its answer."""
    tokenizer, cache = family
    encoded = tokenizer.encode(text, add_special_tokens=False)
    sizes = np.array([len(token) for token in encoded.tokens], np.int64)
    assert word_cache.places_of(text, sizes) == encoded.offsets
    if cache.encode(text) is not None and text:
        assert word_cache.places_of(text + "x", sizes) is None, "these are not the bytes of that text"


def test_a_prompt_and_its_answer_are_looked_up(tmp_path: Path) -> None:
    """They were tokenised by the library, for the sake of its offsets, at a fraction of the speed."""
    made = trained(FAMILIES["qwen2"], normalizers.NFC())
    tokenizer = HuggingFaceTokenizer(made.to_str(), "here", "<|endoftext|>")
    for text in ("It's naïve Ωμέγα 🙂🙂", "", "a<|endoftext|>b", "nai\u0308ve"):
        encoded = made.encode(text, add_special_tokens=False)
        assert tokenizer.encode_places(text) == (encoded.ids, encoded.offsets)
    assert tokenizer._words is not None
    assert " Ωμέγα" in tokenizer._words.ids_by_word


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        ByteLevel(add_prefix_space=True),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
        split_by(LLAMA3, "merged_with_next"),
        split_by(r"(\p{L}+)|."),
        split_by(r"\p{So}+|[^\p{So}]+"),
        split_by(r"\w+|\W+"),
        split_by(r"^a|[^a]+|a"),
        split_by(r"[\p{L}&&[^a]]+|."),
        None,
    ],
)
def test_what_may_be_split_otherwise_is_left_to_the_library(pre_tokenizer: Any) -> None:
    assert word_cache.word_cache(trained(pre_tokenizer)) is None


def test_a_text_of_which_the_pattern_covers_a_part_only_is_left_to_the_library() -> None:
    cache = word_cache.word_cache(trained(split_by(r"\p{L}+|\p{N}+")))
    assert cache is None, "the sample has spaces"


def test_composed_characters_are_looked_up_and_others_are_not() -> None:
    tokenizer = trained(FAMILIES["llama3"], normalizers.NFC())
    cache = cached(tokenizer)
    assert cache.encode("nai\u0308ve") is None
    assert cache.words("na\u00efve bayes") == ["na\u00efve", " bayes"]
    assert word_cache.word_cache(trained(FAMILIES["llama3"], normalizers.NFKC())) is None


def test_added_tokens_are_found_in_a_text(tmp_path: Path) -> None:
    made = trained(FAMILIES["llama3"], added=("<tool_call>", "<think>"))
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    texts = ["a plain one", "so <think>it is</think>", "", "plain again, with <|endoftext|> spelt", "<tool_call>"]
    found = [each.tolist() for each in tokenizer.encode_many(texts)]
    assert found == [made.encode(text, add_special_tokens=False).ids for text in texts]
    assert made.token_to_id("<think>") in found[1]
    assert cached(made).encode(texts[1]) is None
    assert cached(made).encode(texts[0]) is not None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cache, "WORDS_MAX", 50)
    tokenizer = trained(FAMILIES["gpt2"])
    cache = cached(tokenizer)
    texts = [f"word{'abcdefghij'[n % 10]}{'abcdefghij'[n // 10]} {'x' * 200}" for n in range(100)]
    for text in texts:
        ids = cache.encode(text)
        assert ids is not None
        assert ids.tolist() == tokenizer.encode(text, add_special_tokens=False).ids
    assert 0 < len(cache.ids_by_word) <= 50
    assert max(map(len, cache.ids_by_word)) <= word_cache.WORD_CHARACTERS_MAX
