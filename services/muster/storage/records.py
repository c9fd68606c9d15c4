"""The records of a data file, one at a time, in bounded memory: lines of JSON, a JSON array, rows of CSV, Parquet
or Arrow.

A file whose name ends in .gz or .zst is decompressed as it is read. Every fault names the file and the line, element or
row, what is wrong there and what to do.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import importlib
import io
import json
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, cast

from muster.recipe.data_formats import columns_of
from muster.storage.errors import StorageError
from muster.storage.sources import BLOCK_BYTES, SourceFile, ending
from muster.words.base import UserError

# A record is parsed whole, which takes several times its size (a line of 53 MB: the process grew by 290 to 320 MiB);
# 64 MiB is twenty long novels.
RECORD_BYTES_MAX = 64 << 20
ROWS_AT_ONCE = 256  # of Parquet; a page of text is about 3 KB

Saw = Callable[[memoryview], None]


@dataclass(frozen=True)
class Record:
    """One record and its place, for messages."""

    place: str
    value: Any


class RawRecord(NamedTuple):
    """One record as it stands in its file: a line of JSON that is not parsed yet, or the value of an element or row."""

    place: str
    value: Any
    line: int = 0  # the number of the line that `value` is the text of; 0 where it is parsed


def nobody(_: memoryview) -> None:
    """Take the bytes that were read for a caller who does not want them."""


def open_bytes(file: SourceFile, saw: Saw = nobody) -> BinaryIO:
    """The file's bytes, decompressed. `saw` is shown the bytes as they are stored."""
    raw = io.BufferedReader(_ObservedStream(file.open(), saw), BLOCK_BYTES)
    name = file.address.lower()
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if name.endswith(".zst"):
        return cast(BinaryIO, io.BufferedReader(_ZstdStream(raw), BLOCK_BYTES))
    return cast(BinaryIO, raw)


def read_records(file: SourceFile, columns: Mapping[str, str], saw: Saw = nobody) -> Generator[Record, None, None]:
    """Yield every record that is not blank. `columns` gives another name to some, by the name that they have in the
    file.

    Raises UserError for a file that is damaged or lacks one of `columns`, StorageError for a disk that fails.
    """
    for raw in raw_records(file, saw):
        yield parsed(raw, columns)


def parsed(raw: RawRecord, columns: Mapping[str, str]) -> Record:
    """The record, with `columns` renamed. Raises UserError for a line that is no JSON, and where one of `columns` is
    missing."""
    value = _json(raw.value, raw.place, raw.line) if raw.line else raw.value
    record = Record(raw.place, value)
    return _renamed(record, columns) if columns else record


def is_table(file: SourceFile) -> bool:
    """Return whether the file is read at several places, so that `saw` gets nothing of it."""
    return ending(file) == ".parquet"


def raw_records(file: SourceFile, saw: Saw = nobody) -> Generator[RawRecord, None, None]:
    """Yield every record that is not blank, for somebody else to parse. Raises UserError for a file that is damaged,
    StorageError for a disk that fails."""
    kind = ending(file)
    if kind == ".parquet":
        yield from _rows_of_parquet(file)
        return
    with open_bytes(file, saw) as stream:
        if kind in (".csv", ".tsv"):
            yield from _rows_of_csv(stream, file.address, "\t" if kind == ".tsv" else ",")
        elif kind == ".arrow":
            yield from _rows_of_arrow(stream, file.address)
        elif kind in (".json", "") and _is_array(stream, file.address):
            yield from _elements(stream, file.address)
        else:
            yield from _lines_of_json(stream, file.address)


def _renamed(record: Record, columns: Mapping[str, str]) -> Record:
    if not isinstance(record.value, Mapping):
        return record
    for theirs in columns:
        if theirs not in record.value:
            raise UserError(
                f"{record.place}: has no column {theirs!r} (its columns: {columns_of(record.value)}); change the "
                "source's `columns`"
            )
    return Record(record.place, {columns.get(key, key): value for key, value in record.value.items()})


class _ObservedStream(io.RawIOBase):
    """A stream whose bytes are shown to somebody else as they pass."""

    def __init__(self, stream: BinaryIO, saw: Saw) -> None:
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


class _ZstdStream(io.RawIOBase):
    """The decompressed bytes of a stream of zstd frames, by the codec that pyarrow brings."""

    def __init__(self, stream: BinaryIO) -> None:
        pa = arrow()
        self._stream = stream
        self._frames = pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._frames.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def arrow(module: str = "pyarrow") -> Any:
    """A module of pyarrow, which the trainer's extra brings: it is too large for those who only look at data. Raises
    UserError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(
            "Parquet, Arrow and .zst files are read by pyarrow: pip install 'muster-train[trainer]'"
        ) from None


def broken(address: str, error: Exception) -> UserError | StorageError:
    """Return the error to raise for one that came up while a file was read."""
    if isinstance(error, gzip.BadGzipFile | EOFError | zlib.error):
        return UserError(f"{address}: is not a whole gzip file: {error}; copy it again, or make it anew")
    if isinstance(error, OSError) and error.errno is None and address.lower().endswith(".zst"):
        return UserError(f"{address}: is not a whole zstd file: {error}; copy it again, or make it anew")
    return StorageError(f"{address}: can't be read: {error}")


def not_utf8(place: str, offset: int, error: UnicodeDecodeError) -> UserError:
    """Return the error to raise for text in another encoding; `offset` is the byte's in the decompressed file."""
    where = f"byte {offset} of the file (0x{error.object[error.start]:02x})"
    return UserError(
        f"{place}: is not UTF-8 text: {error.reason} at {where}; convert it, or choose the files with a glob"
    )


def _read(stream: BinaryIO, count: int, address: str) -> bytes:
    try:
        return stream.read(count)
    except (EOFError, zlib.error, OSError) as error:
        raise broken(address, error) from None


def _lines(stream: BinaryIO, address: str) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of each line, without a byte order mark."""
    offset, number = 0, 0
    while True:
        number += 1
        place = f"{address}, line {number}"
        try:
            line = stream.readline(RECORD_BYTES_MAX + 1)
        except (EOFError, zlib.error, OSError) as error:
            raise broken(address, error) from None
        if not line:
            return
        if len(line) > RECORD_BYTES_MAX:
            raise UserError(
                f"{place}: is longer than {RECORD_BYTES_MAX >> 20} MiB; a file of records has one record per line"
            )
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise not_utf8(place, offset + error.start, error) from None
        yield number, text.removeprefix("\ufeff") if number == 1 else text
        offset += len(line)


def _lines_of_json(stream: BinaryIO, address: str) -> Iterator[RawRecord]:
    for number, text in _lines(stream, address):
        if text.strip():
            yield RawRecord(f"{address}, line {number}", text.rstrip(), number)


def _json(text: str, place: str, number: int) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = ""
        if number == 1 and text.lstrip().startswith("["):
            hint = "; the file looks like one JSON array: call it .json, or write one object per line"
        elif number == 1 and text.strip() == "{":
            hint = "; the file looks like one object over many lines: write one object per line, or an array of them"
        raise UserError(f"{place}: is not valid JSON: {error.msg} at column {error.pos + 1}{hint}") from None
    except (ValueError, RecursionError) as error:  # a number of many thousand digits; brackets a thousand deep
        raise UserError(f"{place}: is not valid JSON: {error}") from None


def _is_array(stream: BinaryIO, address: str) -> bool:
    try:
        start = cast(io.BufferedReader, stream).peek(BLOCK_BYTES)
    except (EOFError, zlib.error, OSError) as error:
        raise broken(address, error) from None
    return start.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def _elements(stream: BinaryIO, address: str) -> Iterator[RawRecord]:
    """The objects of one JSON array. What is read ahead doubles for as long as an element does not end in it, so that
    the time grows with the size of the file only."""
    decoder, text = json.JSONDecoder(), _TextWindow(stream, address)
    text.fill(1)
    text.skip_space()
    text.at += 1  # the bracket
    number = 0
    while True:
        number += 1
        place = f"{address}, element {number}"
        text.skip_space()
        if text.here() == "]":
            text.at += 1
            text.skip_space()
            if text.here():
                raise UserError(f"{place}: something follows the end of the array; keep the array alone in the file")
            return
        if number > 1:
            if text.here() != ",":
                raise UserError(f"{place}: is not valid JSON: a comma or ] should come here{_ended(text)}")
            text.at += 1
            text.skip_space()
        if text.here() != "{":
            raise UserError(f"{place}: is no object{_ended(text)}; a file of records is an array of objects")
        yield RawRecord(place, _element(decoder, text, place))


def _element(decoder: json.JSONDecoder, text: _TextWindow, place: str) -> object:
    size = BLOCK_BYTES
    while True:
        try:
            value, text.at = decoder.raw_decode(text.buffer, text.at)
            return value
        except (ValueError, RecursionError) as error:
            if len(text.buffer) - text.at > RECORD_BYTES_MAX:
                raise UserError(f"{place}: is longer than {RECORD_BYTES_MAX >> 20} MiB, or not valid JSON") from None
            if isinstance(error, json.JSONDecodeError) and text.fill(size):
                size *= 2
                continue
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise UserError(f"{place}: is not valid JSON: {reason}{_ended(text)}") from None


def _ended(text: _TextWindow) -> str:
    return " (the file ends early)" if text.over else ""


class _TextWindow:
    """A window of decoded text that moves over a stream."""

    def __init__(self, stream: BinaryIO, address: str) -> None:
        self._stream, self._address = stream, address
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._offset = 0
        self.buffer, self.at, self.over = "", 0, False

    def fill(self, count: int) -> bool:
        """Read at least `count` bytes more; False at the end."""
        if self.over:
            return False
        block = _read(self._stream, max(count, BLOCK_BYTES), self._address)
        waiting = len(self._decoder.getstate()[0])
        try:
            more = self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise not_utf8(self._address, self._offset - waiting + error.start, error) from None
        self._offset += len(block)
        self.buffer, self.at = self.buffer[self.at :] + more, 0
        self.over = not block
        return not self.over

    def here(self) -> str:
        """The next character, or nothing at the end."""
        while self.at >= len(self.buffer) and self.fill(1):
            pass
        return self.buffer[self.at : self.at + 1]

    def skip_space(self) -> None:
        while self.here().isspace():
            self.at += 1


def _rows_of_csv(stream: BinaryIO, address: str, delimiter: str) -> Iterator[RawRecord]:
    csv.field_size_limit(RECORD_BYTES_MAX)
    reader = csv.reader((text for _, text in _lines(stream, address)), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        place = f"{address}, line {reader.line_num + 1}"
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise UserError(f"{place}: is not valid CSV: {error}; quote a field that holds quotes or lines") from None
        if row is None:
            return
        if header is None:
            header = row
            if len(set(header)) < len(header) or not all(name.strip() for name in header):
                raise UserError(f"{place}: is no header: the first line of a CSV file names every column, each once")
        elif row:
            if len(row) != len(header):
                raise UserError(
                    f"{place}: has {len(row)} fields, but the header names {len(header)}; quote what holds a comma"
                )
            yield RawRecord(place, dict(zip(header, row, strict=True)))


def _rows_of_parquet(file: SourceFile) -> Iterator[RawRecord]:
    pa, parquet = arrow(), arrow("pyarrow.parquet")
    with file.open_anywhere() as stream:
        try:
            table = parquet.ParquetFile(stream)
            number = 0
            # Without threads and read-ahead, one group of rows is decoded bit by bit: memory is bounded by its pages.
            for batch in table.iter_batches(batch_size=ROWS_AT_ONCE, use_threads=False):
                for value in _values(batch):
                    number += 1
                    yield RawRecord(f"{file.address}, row {number}", value)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, EOFError) as error:
            raise UserError(f"{file.address}: is not a Parquet file that can be read: {error}") from None
        except OSError as error:
            if error.errno is None:  # Arrow's own, of damaged pages
                raise UserError(f"{file.address}: is damaged: {error}; copy it again, or make it anew") from None
            raise StorageError(f"{file.address}: can't be read: {error}") from None


def _rows_of_arrow(stream: BinaryIO, address: str) -> Iterator[RawRecord]:
    """Yield the rows of a stream of record batches, as `datasets` stores a data set (`save_to_disk`)."""
    pa, ipc = arrow(), arrow("pyarrow.ipc")
    number = 0
    try:
        for batch in ipc.open_stream(pa.PythonFile(stream, mode="r")):
            batch.validate(full=True)  # else what a file says of its own offsets is believed
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                for value in _values(batch.slice(start, ROWS_AT_ONCE)):
                    number += 1
                    yield RawRecord(f"{address}, row {number}", value)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, EOFError) as error:
        words = f"{address}: is not a stream of Arrow that can be read, as save_to_disk of datasets writes: {error}"
        raise UserError(f"{words}; write it as Parquet") from None
    except OSError as error:
        raise broken(address, error) from None


def _values(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a record batch. Dates and times become text: Python has no year 10000, and of nanoseconds pyarrow
    makes objects of pandas, which a trainer does not have."""
    pa = arrow()
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if (plain := _without_times(column.type)) != column.type:
            column = column.cast(_without_times(column.type, zones_alone=True)).cast(plain)
        columns.append((name, column))
    for row in pa.RecordBatch.from_arrays([column for _, column in columns], [name for name, _ in columns]).to_pylist():
        yield {name: _without_nulls(value) for name, value in row.items()}


def _without_times(type_: Any, zones_alone: bool = False) -> Any:
    """The type of a column with text in place of every date and time, however deep; with `zones_alone` only the time
    zones are taken away, whose names Arrow would look up in a database that slim images lack."""
    pa, types = arrow(), arrow("pyarrow.types")

    def inner(one: Any) -> Any:
        return _without_times(one, zones_alone)

    if types.is_temporal(type_):
        if not zones_alone:
            return pa.string()
        return pa.timestamp(type_.unit) if types.is_timestamp(type_) else type_
    if types.is_dictionary(type_):
        plain = inner(type_.value_type)
        return type_ if plain == type_.value_type else plain
    if types.is_struct(type_):
        return pa.struct([field.with_type(inner(field.type)) for field in type_])
    if types.is_map(type_):
        return pa.map_(inner(type_.key_type), inner(type_.item_type))
    if types.is_fixed_size_list(type_):
        return pa.list_(type_.value_field.with_type(inner(type_.value_type)), type_.list_size)
    if types.is_list(type_):
        return pa.list_(type_.value_field.with_type(inner(type_.value_type)))
    if types.is_large_list(type_):
        return pa.large_list(type_.value_field.with_type(inner(type_.value_type)))
    return type_


def rows_of_table(file: SourceFile) -> int:
    """Return the number of rows of a Parquet file, from its footer. Raises UserError, StorageError."""
    parquet = arrow("pyarrow.parquet")
    with file.open_anywhere() as stream:
        try:
            return int(parquet.ParquetFile(stream).metadata.num_rows)
        except (ValueError, OSError) as error:
            raise UserError(f"{file.address}: is not a Parquet file that can be read: {error}") from None


def _without_nulls(value: Any) -> Any:
    """A table has every key of any row in every row; those that a row does not have are null there."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value
