"""Conversion of records to documents: each is parsed, checked against the rules and cut into parts to tokenise, in
bounded memory.

Every fault names file and line (or row), what is wrong there and what to do.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from muster.recipe.data_config import Source
from muster.recipe.data_formats import columns_of
from muster.storage import conversations
from muster.storage.data_format import of_another_format, renamed_columns
from muster.storage.records import RawRecord, Record, parsed
from muster.trainer.data import chat, preference
from muster.trainer.data.chat import DocumentPart
from muster.trainer.data.chat_template import THOUGHTS, FittedConversation, fit
from muster.trainer.data.preference import AnswerComparison
from muster.trainer.data.rules import DocumentLook, RuleReader
from muster.trainer.data.tokenizer import Tokenizer
from muster.trainer.errors import UserError
from muster.trainer.verify.references import ReferenceColumns
from muster.words.data_report import EXAMPLES_MAX
from muster.words.text import with_codes

# The text of a longer record is tokenised in pieces that end at line ends: its tokens take many times its size while
# they are made, and only a tokenizer that merges across line ends could tell the difference.
PIECE_CHARACTERS = 8 << 20


# How a record is parsed that compares answers, by the format.
COMPARISONS: Final[dict[str, Callable[[object], AnswerComparison]]] = {
    "preference": preference.pair,
    "unpaired-preference": preference.labelled,
}


# What is told of records beside their number, in words that a report ends with. What nobody learns or sees is a warning
# where the assistant said it.
UNREAD: Final = "which the chat template does not write: they are neither learnt nor shown to the model"
NO_END: Final = "teach no end of the assistant's turn, for no special token ends it in the chat template"
NOT_READ: Final = "hold a column that is not read: "
COLUMNS_MAX: Final = 50  # that are told of; records may have keys without number


def is_warned_of(words: str) -> bool:
    """Return whether a report about records in these words is a warning."""
    return words.endswith(NO_END) or (words.endswith(UNREAD) and any(f"`{key}`" in words for key in THOUGHTS))


class DocumentChunk(NamedTuple):
    """A document or a piece of one."""

    parts: tuple[DocumentPart, ...]
    hash: int | None  # 64 bits of the whole content, with the last chunk; None where more of the document follows
    split: int | None = None  # the part with which a pair's second side begins
    value: float | None = None  # a pair's margin, or an answer's label
    place: str = ""  # with the last chunk: where the document is
    look: DocumentLook | None = None  # with the last chunk: what was seen of its text, where rules ask for that
    columns: bytes = b""  # with the last chunk: what verifiers read of the record, as JSON


class LeftOut:
    """Records that were left out, by reason: how many there are, and the places of the first of them."""

    def __init__(
        self, counts: Mapping[str, int] | None = None, examples: Mapping[str, list[str]] | None = None
    ) -> None:
        self.counts = Counter[str](counts or {})
        self.examples = {reason: list(places) for reason, places in (examples or {}).items()}

    def add(self, reason: str, places: Sequence[str], count: int = 1) -> None:
        """Add `count` records that were left out for a reason, after the earlier ones."""
        self.counts[reason] += count
        examples = self.examples.setdefault(reason, [])
        examples.extend(places[: EXAMPLES_MAX - len(examples)])

    def merge(self, later: LeftOut) -> None:
        for reason, count in later.counts.items():
            self.add(reason, later.examples[reason], count)


class RecordReader:
    """Makes the documents of a source's records, and remembers what it saw. What can't be learnt from is noted in
    `left_out`. A record with a fault is noted in `faults`, where there are such, and else raised. `references` takes
    what verifiers read of each record."""

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        train_on: str = "assistant",
        rules: RuleReader | None = None,
        references: ReferenceColumns | None = None,
        faults: list[str] | None = None,
    ) -> None:
        self.kinds = Counter[str]()  # what was seen of records, in words
        self.left_out = LeftOut()
        self._source, self._tokenizer, self._train_on = source, tokenizer, train_on
        self._rules, self._references, self._faults = rules, references, faults
        self._columns = renamed_columns(source)
        read = (
            frozenset({source.field})
            if source.format == "jsonl"
            else conversations.COLUMNS.get(source.format, frozenset())
        )
        self._read = read | (references.columns if references else frozenset())

    def chunks(self, raw: Iterable[RawRecord]) -> Iterator[DocumentChunk]:
        """The documents in order; empty ones are passed over. Raises UserError."""
        source = self._source
        for one in raw:
            try:
                record = parsed(one, self._columns)
            except UserError as error:
                # A line that is no JSON says nothing of the next one. A column that is missing is missing in all.
                if self._faults is None or self._columns:
                    raise
                self._faults.append(str(error))
                continue
            try:
                self._note_columns(record.value)
                if source.format in COMPARISONS:
                    yield from self._comparison(record, COMPARISONS[source.format](record.value))
                else:
                    yield from self._document(record)
            except ValueError as error:  # UnicodeEncodeError is one
                words = f"{record.place}: {_reason(error)}{of_another_format(record.value, source)}"
                if self._faults is None:
                    raise UserError(words) from None
                self._faults.append(words)

    def _note_columns(self, record: Any) -> None:
        """Note the columns that nobody reads."""
        unread = [name for name in record if name not in self._read] if isinstance(record, Mapping) else []
        for name in unread:
            words = f"records {NOT_READ}{with_codes(name)}"
            if record[name] is not None and (words in self.kinds or len(self.kinds) < COLUMNS_MAX):
                self.kinds[words] += 1

    def _note_keys(self, fitted: FittedConversation, what: str) -> None:
        """Note what becomes of further keys of messages."""
        for key in sorted(fitted.unread):
            self.kinds[f"{what} hold `{with_codes(key)}` in their messages, {UNREAD}"] += 1
        for key, name in sorted(fitted.renamed.items()):
            self.kinds[f"{what} hold `{key}` in their messages, which the chat template reads as `{name}`"] += 1

    def _comparison(self, record: Record, one: AnswerComparison) -> Iterator[DocumentChunk]:
        """One chunk, or none where nothing can be learnt from it. Raises ValueError for half a character."""
        if one.fault:
            self.left_out.add(one.fault, (record.place,))
            return
        self.kinds[one.kind] += 1
        one, fitted = preference.fitted(one, self._tokenizer)
        self._note_keys(fitted, "pairs" if len(one.sides) == 2 else "answers")
        content_hash = preference.content_hash(one, fitted.left_out)  # first, for it refuses half a character
        if not (look := self._looked_at(preference.words(one), record.place))[0]:
            return
        columns = self._references.of(record.value, preference.good_answer(one)) if self._references else b""
        first, *second = preference.parts(one, self._tokenizer)
        split = len(first) if second else None
        yield DocumentChunk(
            (*first, *(part for side in second for part in side)),
            content_hash,
            split,
            one.value,
            record.place,
            look[1],
            columns,
        )

    def _document(self, record: Record) -> Iterator[DocumentChunk]:
        """The document of a record in chunks, or none where it is empty or a rule drops it. Raises ValueError saying
        what is wrong and where in the record."""
        if self._source.format == "jsonl":
            text = _text_of(record.value, self._source.field)
            document = _document(text, self._tokenizer)  # first, for it refuses half a character
            kept, look = self._looked_at(text, record.place)
            if kept:
                yield from _in_pieces(document._replace(place=record.place, look=look))
            return
        given = conversations.conversation(record.value, self._source.format, self._train_on)
        fitted = chat.fitted(given, self._tokenizer)
        given = fitted.given
        self._note_keys(fitted, "conversations")
        content_hash = fit(given, {}, fitted.left_out).hash()
        words = "\n".join(turn.content for turn in given.turns if turn.role != "system")
        kept, look = self._looked_at(words, record.place)
        if kept:
            parts = chat.parts(given, self._tokenizer, prompted=self._references is not None)
            if not given.whole and chat.teaches_no_end(parts, self._tokenizer):
                self.kinds[f"conversations {NO_END}"] += 1
            said = next(turn.content for turn in given.turns if turn.loss_mask)
            columns = self._references.of(record.value, said) if self._references else b""
            yield from _in_pieces(DocumentChunk(parts, content_hash, place=record.place, look=look, columns=columns))

    def _looked_at(self, text: str, place: str) -> tuple[bool, DocumentLook | None]:
        """Return whether a document is kept, and the findings about it."""
        if self._rules is None or not text:
            return True, None
        look = self._rules.look()
        look.add(text)
        if reason := look.verdict():
            self.left_out.add(reason, (f"{place}: {look.beginning}",))
        return not reason, look


def _text_of(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        raise ValueError(f'is not an object like {{"{field}": "…"}}')
    if field not in record:
        raise ValueError(f"has no field {field!r} (its fields: {columns_of(record)}); set the source's `field`")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} is a {type(text).__name__}; it must be text")
    return text


def _document(text: str, tokenizer: Tokenizer) -> DocumentChunk:
    if not text:
        return DocumentChunk((), None)
    content = text.encode()
    bos = (DocumentPart(ids=tokenizer.bos),) if tokenizer.bos else ()
    return DocumentChunk((*bos, DocumentPart(text), DocumentPart(ids=(tokenizer.eos,))), _hash(content))


def _in_pieces(document: DocumentChunk) -> Iterator[DocumentChunk]:
    """A long document in chunks of at most PIECE_CHARACTERS characters: its tokens need not be in memory all at once.

    It is cut between its parts, or at a line end of a long one, as a text file is.
    """
    if not document.parts:
        return
    waiting: list[DocumentPart] = []
    room = PIECE_CHARACTERS
    for part in document.parts:
        start = 0
        while len(part.text) - start > room:
            cut = part.text.rfind("\n", start, start + room) + 1 or (start if waiting else start + room)
            if cut > start:
                waiting.append(part._replace(text=part.text[start:cut]))
            yield DocumentChunk(tuple(waiting), None)
            waiting, start, room = [], cut, PIECE_CHARACTERS
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
