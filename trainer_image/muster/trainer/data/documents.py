"""From files to documents, in bounded memory: a text file is one document; each line of a JSONL file is one.

Every fault names file and line (or byte), what is wrong there and what to do.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple, cast

from muster.trainer.data import chat
from muster.trainer.data.chat import Part
from muster.trainer.data.sources import BLOCK_BYTES, File
from muster.trainer.data.tokenizer import Tokenizer
from muster.trainer.errors import StorageError, UserError

# A longer text, of whatever format, is tokenised in pieces that end at line ends: memory stays bounded, and only a
# tokenizer that merges across line ends could tell the difference.
PIECE_BYTES = 8 << 20
# A line is parsed whole, which takes several times its size (at 53 MB, the process grew by 290 to 320 MiB); 64 MiB is
# twenty long novels.
LINE_BYTES_MAX = 64 << 20


class Chunk(NamedTuple):
    """A document or a piece of one."""

    parts: tuple[Part, ...]
    hash: int | None  # 64 bits of the whole content, with the last chunk; None where more of the document follows


class Reading:
    """Reads one file and remembers what it saw. advance(n): n more bytes were read, for the progress line."""

    def __init__(self, file: File, advance: Callable[[int], None]) -> None:
        self.file = file
        self._advance = advance
        self._state = hashlib.blake2b(digest_size=20)

    def chunks(self, format: str, field: str, tokenizer: Tokenizer) -> Iterator[Chunk]:
        """The file's documents in order; empty ones are passed over. Raises UserError, StorageError."""
        with self._open() as stream:
            if format == "text":
                yield from _text(stream, self.file.address, tokenizer)
            elif format == "jsonl":
                for place, text in _strings(stream, self.file.address, field):
                    yield from _in_pieces(_document(text, tokenizer, place))
            else:
                for place, record in _records(stream, self.file.address):
                    yield from _in_pieces(_conversation(record, tokenizer, place))

    def digest(self) -> str:
        """BLAKE2b of the bytes read so far, in hex, as `sources.digest` makes it of a whole local file."""
        return self._state.hexdigest()

    def _open(self) -> BinaryIO:
        raw = io.BufferedReader(_Observed(self.file.open(), self._saw), BLOCK_BYTES)
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if self.file.address.endswith(".gz") else cast(BinaryIO, raw)

    def _saw(self, block: memoryview) -> None:
        self._state.update(block)
        self._advance(len(block))


class _Observed(io.RawIOBase):
    """A stream whose bytes are shown to somebody else as they pass."""

    def __init__(self, stream: BinaryIO, saw: Callable[[memoryview], None]) -> None:
        self._stream = stream
        self._saw = saw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._stream.readinto(buffer)  # type: ignore[attr-defined]
        self._saw(memoryview(buffer)[:count])
        return int(count)

    def close(self) -> None:
        self._stream.close()
        super().close()


def _text(stream: BinaryIO, address: str, tokenizer: Tokenizer) -> Iterator[Chunk]:
    """One document. A chunk is given out only when the next piece is there, so that the last one is known as such."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    state = hashlib.blake2b(digest_size=8)
    opening: tuple[Part, ...] = (Part(ids=tokenizer.bos),) if tokenizer.bos else ()
    held, offset = "", 0
    for block in _pieces(stream, address):
        text = _decode(decoder, block, offset, address)
        text = text.removeprefix("\ufeff") if offset == 0 else text
        offset += len(block)
        state.update(text.encode())
        if held:
            cut = held.rfind("\n") + 1 or len(held)
            yield Chunk((*opening, Part(held[:cut])), None)
            opening, held = (), held[cut:]
        held += text
    _decode(decoder, b"", offset, address, final=True)
    if held:
        eos = Part(ids=(tokenizer.eos,))
        yield Chunk((*opening, Part(held), eos), int.from_bytes(state.digest(), "little"))


def _pieces(stream: BinaryIO, address: str) -> Iterator[bytes]:
    try:
        while piece := stream.read(PIECE_BYTES):
            yield piece
    except (EOFError, zlib.error, OSError) as error:
        raise _broken(address, error) from None


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, offset: int, address: str, final: bool = False) -> str:
    waiting = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise _not_utf8(address, offset - waiting + error.start, error) from None


def _records(stream: BinaryIO, address: str) -> Iterator[tuple[str, object]]:
    """(place, parsed line) of every line that is not blank."""
    offset = 0
    for number, line in enumerate(_lines(stream, address), start=1):
        place = f"{address}, line {number}"
        if len(line) > LINE_BYTES_MAX:
            raise UserError(f"{place}: is longer than {LINE_BYTES_MAX >> 20} MiB; a JSONL file has one object per line")
        try:
            text = line.decode().removeprefix("\ufeff") if number == 1 else line.decode()
        except UnicodeDecodeError as error:
            raise _not_utf8(place, offset + error.start, error) from None
        offset += len(line)
        if text.strip():
            yield place, _parsed(text.rstrip(), place, number)


def _lines(stream: BinaryIO, address: str) -> Iterator[bytes]:
    try:
        while line := stream.readline(LINE_BYTES_MAX + 1):
            yield line
    except (EOFError, zlib.error, OSError) as error:
        raise _broken(address, error) from None


def _parsed(text: str, place: str, number: int) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        array = number == 1 and text.lstrip().startswith("[")
        hint = "; the file looks like one JSON array: write one object per line instead" if array else ""
        raise UserError(f"{place}: is not valid JSON: {error.msg} at column {error.pos + 1}{hint}") from None
    except (ValueError, RecursionError) as error:  # a number of many thousand digits; brackets a thousand deep
        raise UserError(f"{place}: is not valid JSON: {_reason(error)}") from None


def _strings(stream: BinaryIO, address: str, field: str) -> Iterator[tuple[str, str]]:
    """(place, text) of every line whose field is not empty."""
    for place, record in _records(stream, address):
        if not isinstance(record, dict):
            raise UserError(f'{place}: is not an object like {{"{field}": "…"}}')
        if field not in record:
            there = ", ".join(sorted(map(str, record))[:10]) or "none"
            raise UserError(f"{place}: has no field {field!r} (its fields: {there}); set the source's `field`")
        text = record[field]
        if not isinstance(text, str):
            raise UserError(f"{place}: field {field!r} is a {type(text).__name__}; it must be text")
        if text:
            yield place, text


def _conversation(record: object, tokenizer: Tokenizer, place: str) -> Chunk:
    marks = chat.chat_marks(tokenizer)
    try:
        turns = chat.conversation(record)
        return Chunk(chat.parts(turns, marks, tokenizer.bos), chat.content_hash(turns))
    except ValueError as error:  # UnicodeEncodeError is one
        raise UserError(f"{place}: {_reason(error)}") from None


def _document(text: str, tokenizer: Tokenizer, place: str) -> Chunk:
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: {_reason(error)}") from None
    bos = (Part(ids=tokenizer.bos),) if tokenizer.bos else ()
    eos = Part(ids=(tokenizer.eos,))
    return Chunk((*bos, Part(text), eos), _hash(content))


def _in_pieces(document: Chunk) -> Iterator[Chunk]:
    """A long document in chunks of at most PIECE_BYTES characters: its tokens need not be in memory all at once.

    It is cut between its parts, or at a line end of a long one, as a text file is.
    """
    waiting: list[Part] = []
    room = PIECE_BYTES
    for part in document.parts:
        start = 0
        while len(part.text) - start > room:
            cut = part.text.rfind("\n", start, start + room) + 1 or (start if waiting else start + room)
            if cut > start:
                waiting.append(part._replace(text=part.text[start:cut]))
            yield Chunk(tuple(waiting), None)
            waiting, start, room = [], cut, PIECE_BYTES
        waiting.append(part._replace(text=part.text[start:]) if start else part)
        room -= len(part.text) - start
    yield Chunk(tuple(waiting), document.hash)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        escape = f"\\u{ord(error.object[error.start]):04x}"
        return f"has half a character ({escape} alone), which no UTF-8 text can hold; write both halves or leave it out"
    return str(error)


def _not_utf8(place: str, offset: int, error: UnicodeDecodeError) -> UserError:
    where = f"byte {offset} of the file (0x{error.object[error.start]:02x})"
    return UserError(
        f"{place}: is not UTF-8 text: {error.reason} at {where}; convert it, or choose the files with a glob"
    )


def _broken(address: str, error: Exception) -> UserError | StorageError:
    if isinstance(error, gzip.BadGzipFile | EOFError | zlib.error):
        return UserError(f"{address}: is not a whole gzip file: {error}")
    return StorageError(f"{address}: can't be read: {error}")
