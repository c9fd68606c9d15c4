"""A prompt and its answer are tokenised as the one text that they are, whatever kind of tokenizer reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from muster.storage.conversations import conversation
from muster.trainer.data import load_tokenizer, preference, tokenizer_of_folder
from muster.trainer.data.chat import DocumentPart, parts
from muster.trainer.data.hugging_face_tokenizer import HuggingFaceTokenizer
from muster.trainer.data.tokenizer import Tokenizer

CORPUS = ["Q: hello world\n\nA: fine, thank you <user> [INST] a fox\n"] * 20
SPECIAL = ["<unk>", "<s>", "</s>", "<user>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% else %}[INST] {{ m.content }}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[INST]{% endif %}"
)


def pieces(scheme: str) -> tokenizers.Tokenizer:
    """Llama 2's: spaces are letters, and one stands before a text (`legacy`: before every stretch of it)."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if scheme == "legacy" else scheme)
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    if scheme == "legacy":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        made.pre_tokenizer = pre_tokenizers.Split("\ue0ff", "isolated")  # which nothing holds
    made.decoder = decoders.Metaspace()
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


def of_bytes() -> tokenizers.Tokenizer:
    """GPT-2's, which leaves the space before a word out of its offsets."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


def words() -> tokenizers.Tokenizer:
    """BERT's."""
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL))
    made.decoder = decoders.WordPiece()
    return made


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "legacy Llama 2": lambda: pieces("legacy"),
    "Metaspace, first": lambda: pieces("first"),
    "Metaspace, always": lambda: pieces("always"),
    "byte level": of_bytes,
    "WordPiece": words,
}
TOKENIZERS = {kind: make() for kind, make in KINDS.items()}


def ours(kind: str) -> HuggingFaceTokenizer:
    return tokenizer_of_folder(TOKENIZERS[kind].to_str(), {"chat_template.jinja": TEMPLATE}, kind)


def flagged(found: tuple[DocumentPart, ...], tokenizer: Tokenizer) -> list[tuple[int, bool]]:
    return [(token, part.loss_mask) for part in found for token in (part.ids or tokenizer.encode(part.text))]


def bare(kind: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(TOKENIZERS[kind].to_str())
    made.post_processor = None
    made.encode_special_tokens = True
    return made


TEXTS = [
    ("Q: hello\nA:", " fine"),
    ("hello\n", "world"),
    ("Q: ", "fine"),
    ("Q: hel", "lo"),
    ("A:\n", "\nfine"),
    ("</s>", "x"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompt", "completion"), TEXTS)
def test_a_prompt_and_its_completion_are_the_tokens_of_the_whole_text(kind: str, prompt: str, completion: str) -> None:
    """And the loss is on each token that holds a character of the completion."""
    tokenizer = ours(kind)
    record = {"prompt": prompt, "completion": completion}
    found = flagged(parts(conversation(record, "prompt-completion"), tokenizer), tokenizer)
    whole = bare(kind).encode(prompt + completion)
    assert [token for token, _ in found] == [*tokenizer.bos, *whole.ids, tokenizer.eos]
    learnt = [end > len(prompt) for _, end in whole.offsets]
    if any(learnt) and not learnt[0]:
        assert [flag for _, flag in found] == [*(False for _ in tokenizer.bos), *learnt, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_is_answered_stands_alone_where_a_token_would_reach_over_its_end(kind: str) -> None:
    tokenizer = ours(kind)
    given_ = conversation({"prompt": "Q: hel", "completion": "lo"}, "prompt-completion")
    found = flagged(parts(given_, tokenizer, prompted=True), tokenizer)
    assert [token for token, flag in found if not flag] == [*tokenizer.bos, *tokenizer.encode("Q: hel")]


@pytest.mark.parametrize("kind", KINDS)
def test_both_sides_of_a_pair_stand_after_one_prompt(kind: str) -> None:
    tokenizer = ours(kind)
    one = preference.pair({"prompt": "Q: hel", "chosen": "lo", "rejected": ", you"})
    sides = [flagged(side, tokenizer) for side in preference.parts(one, tokenizer)]
    for side, words in zip(sides, ("lo", ", you"), strict=True):
        assert [token for token, _ in side] == [*tokenizer.bos, *tokenizer.encode(f"Q: hel{words}"), tokenizer.eos]
    first, second = ([token for token, flag in side if not flag] for side in sides)
    assert first == second != []


@pytest.mark.parametrize("kind", KINDS)
@given(words=st.sampled_from(["</s>", "a </s> fox", "<s>", "<user>fine", "x<user></s>"]))
def test_a_special_token_that_a_user_spells_is_tokenised_as_the_letters_that_it_is(kind: str, words: str) -> None:
    """All else is as a tokenizer without that special token has it."""
    tokenizer = ours(kind)
    messages = [{"role": "user", "content": words}, {"role": "assistant", "content": "fine"}]
    found = flagged(parts(conversation({"messages": messages}, "openai-chat"), tokenizer), tokenizer)
    start, end = tokenizer.encode_rendered("<user>")[0][-1], tokenizer.encode_rendered("</s>")[0][-1]
    ids = [token for token, _ in found]
    assert (ids.count(start), ids.count(end)) == (1, 1)
    assert ids[-1] == end
    # The same stretch between two special tokens, read by the library where it is told that special tokens are text.
    other = tokenizers.Tokenizer.from_str(TOKENIZERS[kind].to_str())
    other.post_processor = None
    other.encode_special_tokens = True
    other.add_tokens([tokenizers.AddedToken("\ue0ff", normalized=False)])
    assert ids[1:-1] == other.encode(f"\ue0ff{words}[INST] fine").ids[1:]


def test_the_tokenizer_of_bytes_is_as_before() -> None:
    tokenizer = load_tokenizer("bytes")
    found = parts(conversation({"prompt": "é", "completion": "b"}, "prompt-completion"), tokenizer)
    assert flagged(found, tokenizer) == [(0xC3, False), (0xA9, False), (ord("b"), True), (256, True)]
