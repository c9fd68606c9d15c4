"""Size of a record's text, and an estimate of its tokens without a tokenizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

BYTES_PER_TOKEN: Final = 4.0  # of English text, with the usual vocabularies; 1 where bytes are tokens
# With a template, each turn of a conversation has two marks, the name of its role and line breaks besides its text.
TURN_MARKS: Final = 2
TURN_BYTES: Final = 8
_BYTE_VOCABULARY_MAX: Final = 512  # tokens of a vocabulary of bytes, and marks
_TURNS: Final = ("messages", "conversations")
_NOT_TEXT: Final = ("role", "from", "type", "id")


def bytes_per_token(vocabulary: int | None) -> float:
    """Return about how many bytes of text a token of a vocabulary of this size has: 1 where bytes are tokens, half a
    byte more each time that the vocabulary doubles, and BYTES_PER_TOKEN from 32,768 tokens on."""
    if vocabulary is None:
        return BYTES_PER_TOKEN
    return min(BYTES_PER_TOKEN, 1.0 + 0.5 * max(0.0, math.log2(max(1, vocabulary) / _BYTE_VOCABULARY_MAX)))


def text_tokens(record: Any, format: str, field: str, per_token: float) -> float:
    """Return about how many tokens the document in a record has, those of a chat template included."""
    turns = sum(len(record[key]) for key in _TURNS if isinstance(record.get(key), list)) if format != "jsonl" else 0
    return ((text_bytes(record, format, field) or 0) + TURN_BYTES * turns) / per_token + TURN_MARKS * turns


def text_bytes(record: Any, format: str, field: str = "text") -> int | None:
    """Return the bytes of the document in a record, in UTF-8, or None if the record has none."""
    if not isinstance(record, Mapping):
        return None
    if format == "jsonl":
        text = record.get(field)
        return len(text.encode()) if isinstance(text, str) else None
    return _content_bytes(record) or None


def _content_bytes(value: Any) -> int:
    """The bytes of all text in a conversation, whatever its format: names of columns and roles are not counted."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, Mapping):
        return sum(_content_bytes(inner) for key, inner in value.items() if key not in _NOT_TEXT)
    return sum(map(_content_bytes, value)) if isinstance(value, Sequence) else 0
