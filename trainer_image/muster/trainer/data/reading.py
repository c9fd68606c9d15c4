"""Reading of files into units of work, in bounded memory: a record that is not parsed yet, or a piece of a text file.

Every fault names file and line (or byte), what is wrong there and what to do.
"""

from __future__ import annotations

import codecs
import hashlib
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

from muster.recipe.data_config import Source
from muster.storage import sources
from muster.storage.file_beginnings import refuse_pointer
from muster.storage.records import RawRecord, broken, is_table, not_utf8, open_bytes, raw_records
from muster.storage.sources import SourceFile
from muster.trainer.data.chat import DocumentPart
from muster.trainer.data.documents import DocumentChunk
from muster.trainer.data.rules import RuleReader
from muster.trainer.data.tokenizer import Tokenizer

# A longer text file is tokenised in pieces that end at line ends: memory stays bounded, and only a tokenizer that
# merges across line ends could tell the difference.
PIECE_BYTES = 8 << 20


class FileReading:
    """Reads one file. advance(n): n more bytes were read, for the progress line."""

    def __init__(self, file: SourceFile, advance: Callable[[int], None] = lambda count: None) -> None:
        self.file = file
        self._advance = advance
        self._state = hashlib.blake2b(digest_size=20)

    def units(
        self, source: Source, tokenizer: Tokenizer, rules: RuleReader | None = None
    ) -> Iterator[RawRecord | DocumentChunk]:
        """The file in order: its records, or of format text the chunks of its one document, looked at by `rules`.
        Raises UserError, StorageError."""
        if source.format == "text":
            with open_bytes(self.file, self._saw) as stream:
                yield from _text(stream, self.file.address, tokenizer, rules)
            return
        yield from raw_records(self.file, self._saw)
        if is_table(self.file):
            self._advance(self.file.size)

    def digest(self) -> str:
        """BLAKE2b of the bytes read so far, in hex, as `sources.digest` makes it of a whole local file. A file that is
        read at several places is read once more."""
        return sources.digest(self.file) if is_table(self.file) else self._state.hexdigest()

    def _saw(self, block: memoryview) -> None:
        self._state.update(block)
        self._advance(len(block))


def _text(stream: BinaryIO, address: str, tokenizer: Tokenizer, rules: RuleReader | None) -> Iterator[DocumentChunk]:
    """One document. A chunk is given out only when the next piece is there, so that the last one is known as such."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    state = hashlib.blake2b(digest_size=8)
    opening: tuple[DocumentPart, ...] = (DocumentPart(ids=tokenizer.bos),) if tokenizer.bos else ()
    pending, offset, look = "", 0, rules.look() if rules else None
    for block in _pieces(stream, address):
        if offset == 0:
            refuse_pointer(block, address)
        text = _decode(decoder, block, offset, address)
        text = text.removeprefix("\ufeff") if offset == 0 else text
        offset += len(block)
        state.update(text.encode())
        if pending:
            cut = pending.rfind("\n") + 1 or len(pending)
            if look:
                look.add(pending[:cut])
            yield DocumentChunk((*opening, DocumentPart(pending[:cut])), None)
            opening, pending = (), pending[cut:]
        pending += text
    _decode(decoder, b"", offset, address, final=True)
    if pending:
        if look:
            look.add(pending)
        eos = DocumentPart(ids=(tokenizer.eos,))
        parts = (*opening, DocumentPart(pending), eos)
        yield DocumentChunk(parts, int.from_bytes(state.digest(), "little"), place=address, look=look)


def _pieces(stream: BinaryIO, address: str) -> Iterator[bytes]:
    try:
        while piece := stream.read(PIECE_BYTES):
            yield piece
    except (EOFError, zlib.error, OSError) as error:
        raise broken(address, error) from None


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, offset: int, address: str, final: bool = False) -> str:
    waiting = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise not_utf8(address, offset - waiting + error.start, error) from None
