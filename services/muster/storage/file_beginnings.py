"""Format of a file by its first bytes, for a name that gives no format or a wrong one."""

from __future__ import annotations

import json
import re
from typing import Final

from muster.storage.records import open_bytes
from muster.storage.sources import SourceFile, ending
from muster.words.base import UserError

BEGINNING_BYTES: Final = 4_096
POINTER_BYTES_MAX: Final = 1_024  # a pointer of Git LFS has some 130
_PAGE = re.compile(rb"\s*(<!doctype html|<html[\s>])", re.IGNORECASE)
_POINTER = b"version https://git-lfs.github.com/spec/"
_BEGUN_OBJECT = re.compile(rb'\{\s*"[^"\n]{1,200}"\s*:')


def may_be_stand_in(file: SourceFile, text: bool) -> bool:
    """Return whether the file may be one that `refuse_stand_in` refuses, by its size and address alone."""
    return file.size <= POINTER_BYTES_MAX or (file.address.startswith("https://") and not text)


def refuse_stand_in(file: SourceFile, text: bool) -> None:
    """Raises UserError for what a server or a repository gives in place of a file: a page to sign in, a pointer. `text`
    says that whatever is there is to be read as text."""
    if not may_be_stand_in(file, text):
        return
    with file.open() as stream:
        begins = stream.read(BEGINNING_BYTES)
    refuse_pointer(begins, file.address)
    if not text and ending(file) not in (".html", ".htm") and _PAGE.match(begins.removeprefix(b"\xef\xbb\xbf")):
        raise UserError(
            f"{file.address}: is an HTML page, and not data (the server may want a sign-in, or shows the file in a "
            "page); take the address that downloads the file, or set the source's `format: text` to learn from pages"
        )


def refuse_pointer(begins: bytes, address: str) -> None:
    """Raises UserError for a file that begins as a pointer of Git LFS."""
    if begins.startswith(_POINTER):
        raise UserError(
            f"{address}: is a pointer of Git LFS, not the file itself; run `git lfs pull` where it was cloned, "
            "or take the address that downloads the file"
        )


def begins_as_json(file: SourceFile) -> bool:
    """Return whether the first line is a JSON object, or an array of objects begins."""
    try:
        with open_bytes(file) as stream:
            begins = stream.read(BEGINNING_BYTES)
    except (OSError, EOFError):  # whoever reads it says what is wrong with it
        return False
    line, ended, _ = begins.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    if line.startswith(b"["):
        return _BEGUN_OBJECT.match(begins[begins.index(b"[") + 1 :].lstrip()) is not None
    if not ended and len(begins) == BEGINNING_BYTES:
        return _BEGUN_OBJECT.match(line) is not None
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
