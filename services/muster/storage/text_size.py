"""Size of a record's text, and an estimate of its tokens without a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

BYTES_PER_TOKEN: Final = 4.0  # of English text, with the usual vocabularies; 1 where bytes are tokens
_NOT_TEXT: Final = ("role", "from", "type", "id")


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
