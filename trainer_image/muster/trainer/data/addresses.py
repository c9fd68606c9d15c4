"""How an address of the configuration becomes a path: file:// or a plain path, `~` expanded."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from muster.trainer.errors import UserError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def scheme_of(address: str) -> str:
    """`s3` of `s3://bucket/key`; `file` for a plain path."""
    match = _SCHEME.match(address)
    return match[1].lower() if match else "file"


def local_path(address: str) -> Path:
    """The path of a file:// address or plain path. A relative one counts from the working directory.

    Raises UserError for a file:// address of another machine, which is usually a relative path.
    """
    if not _SCHEME.match(address):
        return Path(address).expanduser()
    parts = urlsplit(address)
    if parts.netloc not in ("", "localhost"):
        raise UserError(f"{address}: a file address is absolute and has three slashes, as in file:///data/books")
    return Path(unquote(parts.path))
