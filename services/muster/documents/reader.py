"""Bytes in, a document out: the one way by which text that people write becomes data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from muster.documents.document import BYTES_MAX, Document, DocumentError
from muster.documents.json_text import read_json

Format = Literal["json", "yaml"]


def read(raw: bytes, form: Format) -> Document:
    """Raises DocumentError for what is too large, is not UTF-8, can't be read or breaks one of the limits."""
    if len(raw) > BYTES_MAX:
        raise DocumentError(f"is larger than {BYTES_MAX:,} bytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(f"is not UTF-8 text (byte {error.start})") from None
    if form == "json":
        return read_json(text)
    from muster.documents.yaml_text import read_yaml  # PyYAML takes 20 ms to import, and JSON needs none of it

    return read_yaml(text)


def read_file(path: Path) -> Document:
    """A file that people wrote, JSON by its ending `.json` and YAML otherwise. Raises DocumentError and OSError."""
    with path.open("rb") as file:
        raw = file.read(BYTES_MAX + 1)
    return read(raw, "json" if path.suffix == ".json" else "yaml")


def load_yaml(text: str) -> Any:
    """The data of a YAML text alone, for files such as a kubeconfig. Raises DocumentError, a ValueError."""
    return read(text.encode(), "yaml").data
