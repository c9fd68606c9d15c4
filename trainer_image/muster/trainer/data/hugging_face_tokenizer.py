"""The tokenizer of a `tokenizer.json`, as Hugging Face's `tokenizers` library reads it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers

from muster.trainer.data.chat_template import GUARD, ChatTemplate
from muster.trainer.data.tokenizer import ChatMarks, Ids, Int64s
from muster.trainer.data.word_cache import WordCache, places_of, word_cache
from muster.trainer.errors import StorageError, UserError

HUGGING_FACE = "huggingface"  # the kind, in a commit


class HuggingFaceTokenizer:
    """The tokenizer of a `tokenizer.json`.

    `text` is the file's content and `where` its address, for messages. `eos` names the token that ends a document, as
    a tokenizer_config.json does (`_end_of_document`) or, where it is `certain`, as a commit does. `templates` are the
    chat templates that came with it, by name, of which `template` may be chosen, and `tokens` the special tokens that
    they write by name.
    """

    def __init__(
        self,
        text: str,
        where: str,
        eos: str | None = None,
        template: ChatTemplate | None = None,
        certain: bool = False,
    ) -> None:
        self._json = text
        self.template = template
        self.templates: Mapping[str, str] = {}
        self.tokens: Mapping[str, str] = template.tokens if template else {}
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise UserError(
                f"tokenizer {where} is not a Hugging Face tokenizer.json: {error}. Save one with "
                "`tokenizer.save_pretrained(folder)`"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # a mark spelt inside a document stays text
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        added = self._tokenizer.get_added_tokens_decoder().values()
        special = frozenset(token.content for token in added if token.special)
        self.eos = (
            vocabulary[eos] if certain and eos in vocabulary else _end_of_document(vocabulary, special, eos, where)
        )
        self.bos = _bos(self._tokenizer.encode("").ids, self.eos)
        # It adds nothing to what is encoded from here on, and would leave spaces out of a token's place in the text.
        self._tokenizer.post_processor = None
        self.chat = _chat_marks(vocabulary, self._ids)
        names = sorted(map(re.escape, special), key=len, reverse=True)
        self.special = re.compile("|".join(names)) if names else None

    @cached_property
    def _of_rendered(self) -> tokenizers.Tokenizer:
        """Like the other one, but for the special tokens in a text, which it takes for such."""
        return _reading(json.loads(self._json))

    @cached_property
    def _of_guarded(self) -> tokenizers.Tokenizer:
        """Like `_of_rendered`, for a text with GUARD in it. Special tokens are looked for before a text is normalised,
        so that one with GUARD inside is none; then GUARD is taken out, and its letters are tokenised as any others."""
        document = json.loads(self._json)
        no_guard = {"type": "Replace", "pattern": {"String": GUARD}, "content": ""}
        own = [document["normalizer"]] if document.get("normalizer") else []
        document["normalizer"] = {"type": "Sequence", "normalizers": [no_guard, *own]}
        for token in document.get("added_tokens", ()):
            token["normalized"] = token["normalized"] and not token["special"]
        return _reading(document)

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        tokenizer = self._of_guarded if GUARD in text else self._of_rendered
        encoded = tokenizer.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids = self._words.encode(text) if self._words else None
        places = None if ids is None else places_of(text, self._token_bytes[ids])
        if ids is not None and places is not None:
            return ids.tolist(), places
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> list[int]:
        return list(self._ids(text))

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        cached = [self._words.encode(text) if self._words else None for text in texts]
        others = [text for text, ids in zip(texts, cached, strict=True) if ids is None]
        encoded = iter(self._tokenizer.encode_batch_fast(others, add_special_tokens=False))
        return [np.array(next(encoded).ids, np.uint32) if ids is None else ids for ids in cached]

    @cached_property
    def _words(self) -> WordCache | None:
        return word_cache(self._tokenizer)

    @cached_property
    def _token_bytes(self) -> Int64s:
        """The bytes that each id stands for, int64 [vocab_size], of a tokenizer with `_words`: each letter is one."""
        sizes = np.zeros(self.vocab_size, np.int64)
        for token, id_ in self._tokenizer.get_vocab(with_added_tokens=False).items():
            sizes[id_] = len(token)
        return sizes

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def spell(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def text_bytes(self) -> Int64s | None:
        measure = _measure(json.loads(self._json).get("decoder"))
        if measure is None:
            return None
        added = self._tokenizer.get_added_tokens_decoder()
        sizes = np.zeros(self.vocab_size, np.int64)
        for token, id_ in self._tokenizer.get_vocab(with_added_tokens=False).items():
            sizes[id_] = measure(token)
        for id_, one in added.items():
            sizes[id_] = 0 if one.special else len(one.content.encode())
        return sizes

    def describe(self) -> dict[str, Any]:
        return {
            "kind": HUGGING_FACE,
            "sha256": hashlib.sha256(self._json.encode()).hexdigest(),
            "end_of_document": self._tokenizer.id_to_token(self.eos),
            "json": self._json,
            **({"chat_template": self.template.describe()} if self.template else {}),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return HuggingFaceTokenizer.from_description, (self.describe(),)

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> HuggingFaceTokenizer:
        """The tokenizer that `describe()` described. Raises StorageError when the description is damaged."""
        text = description["json"]
        if hashlib.sha256(text.encode()).hexdigest() != description.get("sha256"):
            raise StorageError(
                "the checkpoint's tokenizer is damaged: its SHA-256 does not match; use another checkpoint"
            )
        template = description.get("chat_template")
        made = ChatTemplate(template["source"], template["tokens"], template.get("with_tools")) if template else None
        return cls(text, "of the checkpoint", description.get("end_of_document"), made, certain=True)

    def with_template(self, source: str) -> HuggingFaceTokenizer:
        """The same tokenizer with another chat template."""
        made = ChatTemplate(source, self.tokens)
        return HuggingFaceTokenizer(self._json, "", self._tokenizer.id_to_token(self.eos), made, certain=True)


def _reading(document: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a parsed tokenizer.json, for texts that are tokenised whole."""
    made = tokenizers.Tokenizer.from_str(json.dumps(document))
    made.no_truncation()
    made.no_padding()
    made.post_processor = None
    return made


def _measure(decoder: Any) -> Callable[[str], int] | None:
    """Counts the bytes of a token, by the decoder of a tokenizer.json. None for one that does not give back the text
    as it was."""
    if not isinstance(decoder, dict):
        return None
    kinds = {each.get("type") for each in (decoder, *(decoder.get("decoders") or ()))}
    if "ByteLevel" in kinds:
        return len  # a character stands for a byte
    if kinds & {"ByteFallback", "Metaspace"}:
        return lambda token: 1 if _BYTE.fullmatch(token) else len(token.replace("\u2581", " ").encode())
    return None


_BYTE = re.compile("<0x[0-9A-F]{2}>")

# The end of a document as the well-known vocabularies spell it; the first that is there counts.
_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
# How the end of a turn is called, letters alone: <|im_end|>, <|eot_id|>, [|endofturn|], <|return|>.
_END_OF_TURN = re.compile(
    "imend|eot|eotid|eom|eomid|end|return|call|.*endof(turn|utterance).*|.*(message|assistant)end.*"
)


def _end_of_document(vocabulary: dict[str, int], special: frozenset[str], configured: str | None, where: str) -> int:
    """The token that `eos_token` names. An instruct model's configuration calls its end of turn so: there, and where it
    names none, it is the well-known token that is a special one. An ordinary token that is spelt so is a word
    (Gemma's `</s>` is HTML's strike-through)."""
    candidates = [name for name in _ENDS if name in special]
    is_end_of_turn = configured is not None and _END_OF_TURN.fullmatch(re.sub("[^a-z]", "", configured.lower()))
    for name in (*(candidates if is_end_of_turn else ()), configured, *candidates):
        if name is not None and name in vocabulary:
            return vocabulary[name]
    raise UserError(
        f"tokenizer {where} has no token for the end of a document (looked for a special token {', '.join(_ENDS)}); "
        'name it as "eos_token" in a tokenizer_config.json beside the file'
    )


def _bos(ids_of_nothing: list[int], eos: int) -> tuple[int, ...]:
    """Return the tokens that the tokenizer's own post-processor puts before a text: `<|begin_of_text|>` for Llama,
    nothing for Qwen."""
    first = ids_of_nothing[:1]
    return () if first == [eos] else tuple(first)


def _chat_marks(vocabulary: dict[str, int], ids: Any) -> ChatMarks | None:
    """The family is recognised by its marks: Llama 3, ChatML (Qwen and others) or Gemma; None for any other."""
    line = ids("\n")
    if {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"} <= vocabulary.keys():
        start, end = vocabulary["<|start_header_id|>"], vocabulary["<|end_header_id|>"]
        roles = ("system", "user", "assistant")
        opening = {role: (start, *ids(role), end, *ids("\n\n")) for role in roles}
        return ChatMarks(opening, (vocabulary["<|eot_id|>"],))
    if {"<|im_start|>", "<|im_end|>"} <= vocabulary.keys():
        start = vocabulary["<|im_start|>"]
        opening = {role: (start, *ids(f"{role}\n")) for role in ("system", "user", "assistant")}
        return ChatMarks(opening, (vocabulary["<|im_end|>"], *line))
    if {"<start_of_turn>", "<end_of_turn>"} <= vocabulary.keys():
        start = vocabulary["<start_of_turn>"]
        # Gemma has no system role: its own template writes the system's words as the user's.
        names = {"system": "user", "user": "user", "assistant": "model"}
        opening = {role: (start, *ids(f"{name}\n")) for role, name in names.items()}
        return ChatMarks(opening, (vocabulary["<end_of_turn>"], *line))
    return None
