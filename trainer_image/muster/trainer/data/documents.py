"""From files to documents, in bounded memory: a text file is one document, or each record of a file is one.

Every fault names file and line (or byte), what is wrong there and what to do.
"""

from __future__ import annotations

import codecs
import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Final, NamedTuple

from muster.contract.data_config import Source
from muster.contract.data_formats import columns_of
from muster.contract.data_report import EXAMPLES_MAX
from muster.storage import conversations, sources
from muster.storage.data_format import of_another_format, renamed_columns
from muster.storage.records import Record, broken, is_table, not_utf8, open_bytes, read_records
from muster.storage.sources import File
from muster.trainer.data import chat, preference
from muster.trainer.data.chat import Part
from muster.trainer.data.preference import Comparison
from muster.trainer.data.rules import Look, Reader
from muster.trainer.data.tokenizer import Tokenizer
from muster.trainer.errors import UserError
from muster.trainer.verify.references import References

# A longer text, of whatever format, is tokenised in pieces that end at line ends: memory stays bounded, and only a
# tokenizer that merges across line ends could tell the difference.
PIECE_BYTES = 8 << 20


# How a record is parsed that compares answers, by the format.
COMPARISONS: Final[dict[str, Callable[[object], Comparison]]] = {
    "preference": preference.pair,
    "unpaired-preference": preference.labelled,
}


class Chunk(NamedTuple):
    """A document or a piece of one."""

    parts: tuple[Part, ...]
    hash: int | None  # 64 bits of the whole content, with the last chunk; None where more of the document follows
    split: int | None = None  # the part with which a pair's second side begins
    value: float | None = None  # a pair's margin, or an answer's label
    place: str = ""  # with the last chunk: where the document is
    look: Look | None = None  # with the last chunk: what was seen of its text, where rules ask for that
    columns: bytes = b""  # with the last chunk: what verifiers read of the record, as JSON


class LeftOut:
    """Why records were left out: how many, and where the first of them are."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.examples: dict[str, list[str]] = {}

    def add(self, reason: str, place: str) -> None:
        self.counts[reason] += 1
        places = self.examples.setdefault(reason, [])
        if len(places) < EXAMPLES_MAX:
            places.append(place)

    def __bool__(self) -> bool:
        return bool(self.counts)


class Reading:
    """Reads one file and remembers what it saw. advance(n): n more bytes were read, for the progress line. What can't
    be learnt from is noted in `left_out`. A record with a fault is noted in `faults`, where there are such.
    `references` takes what verifiers read of each record.
    """

    def __init__(
        self,
        file: File,
        advance: Callable[[int], None],
        left_out: LeftOut | None = None,
        faults: list[str] | None = None,
        rules: Reader | None = None,
        references: References | None = None,
    ) -> None:
        self.file = file
        self._references = references
        self._rules = rules
        self._advance, self._faults = advance, faults
        self.kinds = Counter[str]()  # of preferences, in words
        self._left_out = LeftOut() if left_out is None else left_out
        self._state = hashlib.blake2b(digest_size=20)

    def chunks(self, source: Source, tokenizer: Tokenizer, train_on: str = "assistant") -> Iterator[Chunk]:
        """The file's documents in order; empty ones are passed over. Raises UserError, StorageError."""
        if source.format == "text":
            with open_bytes(self.file, self._saw) as stream:
                yield from _text(stream, self.file.address, tokenizer, self._rules)
            return
        for record in read_records(self.file, renamed_columns(source), self._saw):
            try:
                if source.format in COMPARISONS:
                    yield from self._comparison(record, COMPARISONS[source.format](record.value), tokenizer)
                else:
                    yield from self._document(record, source, tokenizer, train_on)
            except ValueError as error:  # UnicodeEncodeError is one
                words = f"{record.place}: {_reason(error)}{of_another_format(record.value, source)}"
                if self._faults is None:
                    raise UserError(words) from None
                self._faults.append(words)
        if is_table(self.file):
            self._advance(self.file.size)

    def _comparison(self, record: Record, one: Comparison, tokenizer: Tokenizer) -> Iterator[Chunk]:
        """One chunk, or none where nothing can be learnt from it. Raises ValueError for half a character."""
        if one.fault:
            self._left_out.add(one.fault, record.place)
            return
        self.kinds[one.kind] += 1
        if not (look := self._looked_at(preference.words(one), record.place))[0]:
            return
        columns = self._references.of(record.value, preference.good_answer(one)) if self._references else b""
        first, *second = preference.parts(one, tokenizer)
        split = len(first) if second else None
        yield Chunk(
            (*first, *(part for side in second for part in side)),
            preference.content_hash(one),
            split,
            one.value,
            record.place,
            look[1],
            columns,
        )

    def _document(self, record: Record, source: Source, tokenizer: Tokenizer, train_on: str) -> Iterator[Chunk]:
        """The document of a record in chunks, or none where it is empty or a rule drops it. Raises ValueError saying
        what is wrong and where in the record."""
        if source.format == "jsonl":
            text = _text_of(record.value, source.field)
            kept, look = self._looked_at(text, record.place)
            if kept:
                yield from _in_pieces(_document(text, tokenizer)._replace(place=record.place, look=look))
            return
        given = conversations.conversation(record.value, source.format, train_on)
        words = "\n".join(turn.content for turn in given.turns if turn.role != "system")
        kept, look = self._looked_at(words, record.place)
        if kept:
            parts = chat.parts(given, tokenizer)
            said = next(turn.content for turn in given.turns if turn.loss_mask)
            columns = self._references.of(record.value, said) if self._references else b""
            yield from _in_pieces(Chunk(parts, given.hash(), place=record.place, look=look, columns=columns))

    def _looked_at(self, text: str, place: str) -> tuple[bool, Look | None]:
        """Whether a document is kept, and what was seen of it."""
        if self._rules is None or not text:
            return True, None
        look = self._rules.look()
        look.add(text)
        if reason := look.verdict():
            self._left_out.add(reason, f"{place}: {look.beginning}")
        return not reason, look

    def digest(self) -> str:
        """BLAKE2b of the bytes read so far, in hex, as `sources.digest` makes it of a whole local file. A file that is
        read at several places is read once more."""
        return sources.digest(self.file) if is_table(self.file) else self._state.hexdigest()

    def _saw(self, block: memoryview) -> None:
        self._state.update(block)
        self._advance(len(block))


def _text(stream: BinaryIO, address: str, tokenizer: Tokenizer, rules: Reader | None) -> Iterator[Chunk]:
    """One document. A chunk is given out only when the next piece is there, so that the last one is known as such."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    state = hashlib.blake2b(digest_size=8)
    opening: tuple[Part, ...] = (Part(ids=tokenizer.bos),) if tokenizer.bos else ()
    held, offset, look = "", 0, rules.look() if rules else None
    for block in _pieces(stream, address):
        text = _decode(decoder, block, offset, address)
        text = text.removeprefix("\ufeff") if offset == 0 else text
        offset += len(block)
        state.update(text.encode())
        if held:
            cut = held.rfind("\n") + 1 or len(held)
            if look:
                look.add(held[:cut])
            yield Chunk((*opening, Part(held[:cut])), None)
            opening, held = (), held[cut:]
        held += text
    _decode(decoder, b"", offset, address, final=True)
    if held:
        if look:
            look.add(held)
        eos = Part(ids=(tokenizer.eos,))
        parts = (*opening, Part(held), eos)
        yield Chunk(parts, int.from_bytes(state.digest(), "little"), place=address, look=look)


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


def _text_of(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f'is not an object like {{"{field}": "…"}}')
    if field not in record:
        raise ValueError(f"has no field {field!r} (its fields: {columns_of(record)}); set the source's `field`")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} is a {type(text).__name__}; it must be text")
    return text


def _document(text: str, tokenizer: Tokenizer) -> Chunk:
    if not text:
        return Chunk((), None)
    content = text.encode()
    bos = (Part(ids=tokenizer.bos),) if tokenizer.bos else ()
    return Chunk((*bos, Part(text), Part(ids=(tokenizer.eos,))), _hash(content))


def _in_pieces(document: Chunk) -> Iterator[Chunk]:
    """A long document in chunks of at most PIECE_BYTES characters: its tokens need not be in memory all at once.

    It is cut between its parts, or at a line end of a long one, as a text file is.
    """
    if not document.parts:
        return
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
    yield document._replace(parts=tuple(waiting))


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        escape = f"\\u{ord(error.object[error.start]):04x}"
        return f"has half a character ({escape} alone), which no UTF-8 text can hold; write both halves or leave it out"
    return str(error)
