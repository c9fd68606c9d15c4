"""Protocol of a tokenizer, and the built-in byte-level tokenizer.

A document's text is always text: where it spells a mark (`<|endoftext|>`), it is tokenised letter by letter, so that no
document can end itself or pose as a role. Marks come only from Muster.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from muster.recipe.architecture import (
    ASSISTANT_MARK,
    BYTE_VOCABULARY,
    END_OF_DOCUMENT,
    END_OF_TURN,
    USER_MARK,
)
from muster.trainer.data.chat_template import ChatTemplate

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
        """Ids of what a template wrote, its special tokens as such, and the characters [start, end) of each, the spaces
        in front of a word included. GUARD within words keeps them from being a special token, and is no character."""

    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode`, and the characters [start, end) of each id."""

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

    def encode_places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        return self.encode_rendered(text)

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
