"""Tokenizers: the built-in byte-level one, and files of Hugging Face's `tokenizers` library.

A document's text is always text: where it spells a mark (`<|endoftext|>`), it is tokenised letter by letter, so that no
document can end itself or speak for a role. Marks come only from Muster.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers

from muster.contract.address import Address, data_address
from muster.contract.architecture import (
    ASSISTANT_MARK,
    BYTE_VOCABULARY,
    END_OF_DOCUMENT,
    END_OF_TURN,
    USER_MARK,
)
from muster.storage.errors import NotFound, Refused
from muster.storage.model_folder import has_file
from muster.storage.store import open_source
from muster.trainer.data.chat_template import ChatTemplate
from muster.trainer.data.slow_tokenizers import SLOW_FILES, why_not_fast
from muster.trainer.errors import StorageError, UserError

Ids = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]

BYTES = "bytes"
# How the marks of the byte-level tokenizer are shown to people; they have no spelling of their own.
_BYTE_MARKS = {
    END_OF_DOCUMENT: "<|eos|>",
    END_OF_TURN: "<|end|>",
    USER_MARK: "<|user|>",
    ASSISTANT_MARK: "<|assistant|>",
}


@dataclass(frozen=True)
class ChatMarks:
    """The ids that stand around a turn of a conversation."""

    opening: dict[str, tuple[int, ...]]  # by role (`system`, `user`, `assistant`)
    closing: tuple[int, ...]  # from the end of turn on

    @property
    def end_of_turn(self) -> int:
        return self.closing[0]  # the one that an assistant learns to end its turn with


class Tokenizer(Protocol):
    """Turns text into ids in [0, vocab_size), and ids back into text."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos(self) -> int: ...  # the id of the end of a document
    @property
    def bos(self) -> tuple[int, ...]: ...  # the ids before every document
    @property
    def chat(self) -> ChatMarks | None: ...  # None where its marks are unknown
    @property
    def template(self) -> ChatTemplate | None: ...  # None where it has none, so that its marks are written
    @property
    def special(self) -> re.Pattern[str] | None: ...  # finds its special tokens in a text; None: it has none
    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, without `bos` or end of document."""

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each text, as arrays."""

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of what a template wrote, its special tokens as such, and the characters [start, end) of each."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; marks are left out, broken UTF-8 becomes U+FFFD."""

    def spell(self, ids: Iterable[int]) -> str:
        """The text of the ids, marks included."""

    def text_bytes(self) -> Int64s | None:
        """The bytes of UTF-8 that each id stands for in a text, int64 [vocab_size]; 0 for special tokens. None where
        ids don't say it, because the text is changed on the way (lower case, no accents)."""

    def describe(self) -> dict[str, Any]:
        """All that `tokenizer_from_commit` needs to make an equal one, as JSON types. Goes into Commit.tokenizer."""


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; then end of document, end of turn, user mark, assistant mark.

    There is no fifth mark for the system role: a turn that opens with neither role mark is the system's. As every
    turn ends with an end of turn, that can't be mistaken.
    """

    vocab_size = BYTE_VOCABULARY
    eos = END_OF_DOCUMENT
    bos: tuple[int, ...] = ()
    chat = ChatMarks(
        opening={"system": (), "user": (USER_MARK,), "assistant": (ASSISTANT_MARK,)},
        closing=(END_OF_TURN,),
    )

    template: ChatTemplate | None = None
    special: re.Pattern[str] | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        places = [(at, at + 1) for at, letter in enumerate(text) for _ in letter.encode()]
        return self.encode(text), places

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def spell(self, ids: Iterable[int]) -> str:
        pieces = (bytes((token,)) if token < 256 else _BYTE_MARKS[token].encode() for token in ids)
        return b"".join(pieces).decode(errors="replace")

    def text_bytes(self) -> Int64s:
        return (np.arange(self.vocab_size) < 256).astype(np.int64)

    def describe(self) -> dict[str, Any]:
        return {"kind": BYTES}


class HuggingFaceTokenizer:
    """The tokenizer of a `tokenizer.json`.

    `text` is the file's content and `where` its address, for messages. `eos` names the token that ends a document where
    the vocabulary has none of the well-known ones.
    """

    def __init__(self, text: str, where: str, eos: str | None = None, template: ChatTemplate | None = None) -> None:
        self._json = text
        self.template = template
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
        self.eos = _eos(vocabulary, eos, where)
        self.bos = _bos(self._tokenizer.encode("").ids, self.eos)
        self.chat = _chat_marks(vocabulary, self._ids)
        added = self._tokenizer.get_added_tokens_decoder().values()
        names = sorted((re.escape(token.content) for token in added if token.special), key=len, reverse=True)
        self.special = re.compile("|".join(names)) if names else None

    @cached_property
    def _of_rendered(self) -> tokenizers.Tokenizer:
        """Like the other one, but for the special tokens in a text, which it takes for such."""
        other = tokenizers.Tokenizer.from_str(self._json)
        other.no_truncation()
        other.no_padding()
        return other

    def encode_rendered(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self._of_rendered.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> list[int]:
        return list(self._ids(text))

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.uint32) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def spell(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def text_bytes(self) -> Int64s | None:
        measure = _measure(json.loads(self._json).get("decoder"))
        if measure is None:
            return None
        added = self._tokenizer.get_added_tokens_decoder()
        found = np.zeros(self.vocab_size, np.int64)
        for token, id_ in self._tokenizer.get_vocab(with_added_tokens=False).items():
            found[id_] = measure(token)
        for id_, one in added.items():
            found[id_] = 0 if one.special else len(one.content.encode())
        return found

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "huggingface",
            "sha256": hashlib.sha256(self._json.encode()).hexdigest(),
            "end_of_document": self._tokenizer.id_to_token(self.eos),
            "json": self._json,
            **({"chat_template": asdict(self.template)} if self.template else {}),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return tokenizer_from_commit, (self.describe(),)

    def with_template(self, source: str) -> HuggingFaceTokenizer:
        """The same tokenizer with another chat template."""
        tokens = self.template.tokens if self.template else {}
        return HuggingFaceTokenizer(self._json, "", self._tokenizer.id_to_token(self.eos), ChatTemplate(source, tokens))


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


def _eos(vocabulary: dict[str, int], wanted: str | None, where: str) -> int:
    # The well-known names come first: an instruct model's configuration calls its end of turn the end of everything.
    for name in (*_ENDS, wanted):
        if name is not None and name in vocabulary:
            return vocabulary[name]
    raise UserError(
        f"tokenizer {where} has no token for the end of a document (looked for {', '.join(_ENDS)}); "
        'name it as "eos_token" in a tokenizer_config.json beside the file'
    )


def _bos(ids_of_nothing: list[int], eos: int) -> tuple[int, ...]:
    """What the tokenizer's own post-processor puts before a text: `<|begin_of_text|>` for Llama, nothing for Qwen."""
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


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: `bytes`, or a tokenizer.json (or its folder) at a path, file:// or s3://.

    Raises UserError when there is none or it can't be read.
    """
    if spec == BYTES:
        return ByteTokenizer()
    place = data_address(spec)
    if place.scheme == "builtin":
        raise UserError(f"data.tokenizer: {spec} is none; use `bytes`, a path, or a file:// or s3:// address")
    if place.scheme == "file" and place.local.is_dir():
        place = place.child("tokenizer.json")
    above, _, name = place.path.rpartition("/")
    folder = replace(place, path=above or ("/" if place.path.startswith("/") else ""))
    configuration = _read(folder, "tokenizer_config.json")
    text = None if name in SLOW_FILES else _read(folder, name)
    if text is None and any(has_file(open_source(folder), slow) for slow in SLOW_FILES):
        reason = why_not_fast(configuration, partial(has_file, open_source(folder)))
        raise UserError(f"data.tokenizer: the folder of {spec} {reason}")
    if text is None:
        raise UserError(f"data.tokenizer: {spec} does not exist; use `bytes` or the address of a tokenizer.json")
    return tokenizer_of_folder(text, configuration, spec, _read(folder, "chat_template.jinja"))


def tokenizer_of_folder(
    text: str, configuration: str | None, where: str, template: str | None = None
) -> HuggingFaceTokenizer:
    """The tokenizer of a model's folder, made of the texts of its tokenizer.json and, as `configuration`, of its
    tokenizer_config.json (None where there is none). `where` names the folder in messages. `template` is the text of
    its chat_template.jinja; an older folder has that in its configuration.
    """
    tokens = _configured_tokens(configuration)
    source = template or _configured_template(configuration)
    made = ChatTemplate(source, tokens) if source else None
    return HuggingFaceTokenizer(text, where, tokens.get("eos_token"), made)


def templated(tokenizer: Tokenizer, address: str | None) -> Tokenizer:
    """The tokenizer with the chat template in a file; the tokenizer itself where `address` is None. Raises UserError
    where there is no such file, or the tokenizer has marks of its own."""
    if address is None:
        return tokenizer
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UserError("data.chatTemplate: the tokenizer `bytes` writes marks of its own; name a tokenizer.json")
    place = data_address(address)
    above, _, name = place.path.rpartition("/")
    text = _read(replace(place, path=above or ("/" if place.path.startswith("/") else "")), name)
    if text is None:
        raise UserError(f"data.chatTemplate: {address} does not exist; give the address of a Jinja file")
    return tokenizer.with_template(text)


def add_tokens(text: str, tokens: Sequence[str], where: str) -> tuple[str, tuple[int, ...]]:
    """The text of a tokenizer.json with further tokens, and their ids. They are no special ones: a document that spells
    one has it. `where` names the tokenizer in messages. Raises UserError for tokens that are there already.
    """
    tokenizer = tokenizers.Tokenizer.from_str(text)
    ids = set(tokenizer.get_vocab(with_added_tokens=True).values())
    there = {token: tokenizer.token_to_id(token) for token in tokens if tokenizer.token_to_id(token) is not None}
    if there:
        known = ", ".join(f"{token!r} ({number})" for token, number in there.items())
        raise UserError(f"data.addTokens: the tokenizer of {where} has {known} already; leave out what is there")
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens])
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    new = tuple(vocabulary[token] for token in tokens)
    if ids & {*new} or len({*new}) < len(new):
        raise UserError(
            f"data.addTokens: the ids of the tokenizer of {where} have gaps, and new tokens would get those of others; "
            "add them with `tokenizer.add_tokens` and save the folder anew"
        )
    return tokenizer.to_str(), new


def tokenizer_from_commit(described: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `describe()` described. Raises StorageError when the description is damaged."""
    kind = described.get("kind")
    if kind == BYTES:
        return ByteTokenizer()
    if kind != "huggingface" or not isinstance(described.get("json"), str):
        raise StorageError(f"the commit describes no tokenizer that this version knows (kind {kind!r})")
    text = described["json"]
    if hashlib.sha256(text.encode()).hexdigest() != described.get("sha256"):
        raise StorageError("the tokenizer in the commit is damaged: its SHA-256 does not match; use another commit")
    template = described.get("chat_template")
    made = ChatTemplate(template["source"], template["tokens"]) if template else None
    return HuggingFaceTokenizer(text, "of the commit", described.get("end_of_document"), made)


def _read(folder: Address, name: str) -> str | None:
    """The file's text; None when it is not there."""
    try:
        return open_source(folder).read(name).decode()
    except NotFound:
        return None
    except (Refused, UnicodeDecodeError) as error:
        raise UserError(f"data.tokenizer: can't read {folder.child(name)}: {error}") from None


def _configured_tokens(configuration: str | None) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like of a tokenizer_config.json, which writes each as text or as
    {"content": text}."""
    tokens = {}
    for name, value in _parsed(configuration).items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token
    return tokens


def _configured_template(configuration: str | None) -> str | None:
    """The chat template of a tokenizer_config.json: the one, or of several the one named `tool_use`, or `default`."""
    found = _parsed(configuration).get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("tool_use") or named.get("default")
    return found if isinstance(found, str) else None


def _parsed(configuration: str | None) -> dict[str, Any]:
    try:
        found = json.loads(configuration) if configuration else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
