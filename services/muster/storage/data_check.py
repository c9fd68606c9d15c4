"""python -m muster.storage.data_check ADDRESS --name NAME

Reads a file of training data from its first byte to its last, as a job's first rank will, and prints a JSON document:
its format, how many samples it holds, how many bytes they are and how many tokens their text may be, and the first
fault with its line. Memory is bounded, also where the file is made to burst it: a compressed one may grow EXPANSION_MAX
times, a record has RECORD_BYTES_MAX. So are its rows, by the file's size, and the processor's time.

It is a process of its own, because what it reads was sent by somebody else. It needs no torch and no tokenizer.
"""

from __future__ import annotations

import argparse
import codecs
import importlib.util
import io
import json
import math
import os
import resource
import signal
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, Final, cast

from muster.recipe.data_formats import CONVERSATIONS, SHAPES, columns_of, shapes_of
from muster.storage import sources
from muster.storage.conversations import conversation
from muster.storage.errors import StorageError
from muster.storage.file_beginnings import begins_as_json, refuse_stand_in
from muster.storage.records import arrow, broken, is_table, open_bytes, read_records
from muster.storage.sources import COMPRESSED, SourceFile, ending, is_of_records
from muster.storage.text_size import BYTES_PER_TOKEN, text_bytes
from muster.words.base import UserError

# Text that people write shrinks 3 to 10 times and logs 30 times; what grows more is made to. Small files may.
EXPANSION_MAX: Final = 200
EXPANDED_BYTES_FREE: Final = 64 << 20
# Rows take time where they take no bytes: fifty millions that are empty lie in 131 KB. A text that people write takes
# more than a byte of its file; a tenth allows for what is there again and again. Small files may have more.
ROWS_PER_BYTE_MAX: Final = 10
ROWS_FREE: Final = 1_000_000
MEMORY_BYTES_MAX: Final = 4 << 30  # a record of 64 MiB takes 0.4 GB to parse
BLOCK_BYTES: Final = 1 << 20
EXIT_STORAGE: Final = 83
_LAST_SECONDS: Final = 5


@dataclass(frozen=True)
class CheckedContents:
    """Contents of a file. `bytes` are those of its records as they are read, without a compression; of a table, as its
    own list of contents says. `tokens_estimated` are the bytes of their text by BYTES_PER_TOKEN. `others` are further
    formats whose columns its first record has: a task may take its own of them. Where `fault` is not empty nothing can
    be learnt from it, and the counts are of what comes before; where `unknown` is not, nobody could read it here, and
    why."""

    format: str | None = None
    samples: int | None = None
    bytes: int | None = None
    fault: str = ""
    unknown: str = ""
    tokens_estimated: int | None = None
    others: list[str] = field(default_factory=list)


def check(file: SourceFile, name: str) -> CheckedContents:
    """Read all of `file`, which is called `name` in messages. Raises StorageError where a disk or a store fails."""
    bounded = _BoundedFile(file, name)
    if (name.lower().endswith((".zst", ".arrow")) or is_table(bounded)) and importlib.util.find_spec("pyarrow") is None:
        return CheckedContents(
            unknown="Parquet, Arrow and .zst files are read by pyarrow, which is not installed beside the API"
        )
    counted = _CountedRecords()
    try:
        of_records = is_of_records(name)
        refuse_stand_in(_BoundedFile(file, name), text=not of_records)
        if not of_records and begins_as_json(_BoundedFile(file, name)):
            if ending(bounded):
                raise UserError(f"{name}: begins as records in JSON; call it .jsonl or .json")
            of_records = True
        reader = _records if of_records else _text
        if is_table(bounded):
            _must_be_small(bounded, counted)
        reader(bounded, counted)
    except UserError as error:
        return CheckedContents(counted.format, counted.samples, bounded.bytes or counted.bytes, fault=str(error)[:1000])
    except _OutOfTime:
        fault = (
            f"{name}: reading it takes longer than a file of its size may ({counted.samples:,} samples were read); "
            "split it, or write its records in fewer and longer ones"
        )
        return CheckedContents(counted.format, counted.samples, fault=fault)
    except (MemoryError, RecursionError):
        what = f"{name}: after {counted.samples:,} samples comes more at once than the memory of this check holds"
        fault = f"{what}; make its records shorter, or give the API's container more"
        return CheckedContents(counted.format, counted.samples, fault=fault)
    tokens = math.ceil(counted.text_bytes / BYTES_PER_TOKEN)
    read = bounded.bytes or counted.bytes
    return CheckedContents(counted.format, counted.samples, read, tokens_estimated=tokens, others=counted.others)


class _OutOfTime(BaseException):
    """The processor's time is used up. No reader takes it for a fault of the file."""


@dataclass
class _CountedRecords:
    format: str | None = None
    samples: int = 0
    bytes: int = 0
    text_bytes: int = 0
    others: list[str] = field(default_factory=list)


def _text(file: _BoundedFile, counted: _CountedRecords) -> None:
    """Check one document, whatever is in it, as long as it is text."""
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    with file.open() as stream:
        while True:
            block = stream.read(BLOCK_BYTES)
            waiting = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                where = at - waiting + error.start
                raise UserError(f"{file.address}: is not UTF-8 text: {error.reason} at byte {where}") from None
            if not block:
                break
            at += len(block)
    if not at:
        raise UserError(f"{file.address}: is empty")
    counted.format, counted.samples, counted.text_bytes = "text", 1, at


def _records(file: _BoundedFile, counted: _CountedRecords) -> None:
    """Check that every record has the format of the first."""
    for record in read_records(file, {}):
        shapes = shapes_of(record.value)
        if not shapes:
            raise UserError(f"{record.place}: {_of_no_format(record.value)}")
        if counted.format is None:
            counted.format, *counted.others = shapes
        fault = _other(shapes[0], counted.format) or _fault(record.value, counted.format)
        if fault:
            raise UserError(f"{record.place}: {fault}")
        counted.samples += 1
        counted.text_bytes += text_bytes(record.value, counted.format) or 0
        # Where a table says one value of many rows, or an Arrow stream is compressed within, nobody counted bytes.
        _refuse_expansion(file.address, counted.text_bytes, file.size)
        _refuse_rows(file.address, counted.samples, file.size)
    if not counted.samples:
        raise UserError(f"{file.address}: holds no record")


def _of_no_format(value: object) -> str:
    if not isinstance(value, Mapping):
        return f"is a {type(value).__name__}, and a record is an object"
    shapes = "; ".join(SHAPES.values())
    return f'has the columns {columns_of(value)}, which are those of no format: {{"text": …}}; {shapes}'


def _other(shape: str, format: str) -> str:
    return "" if shape == format else f"looks like {shape}, and the records before it like {format}"


def _fault(value: Any, format: str) -> str:
    """Return a job's faults with the record, as far as no tokenizer is needed to find them."""
    try:
        if format in CONVERSATIONS:
            conversation(value, format).hash()
        else:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        return f"has half a character ({half} alone), which no UTF-8 text can hold; write both halves or leave it out"
    except ValueError as error:
        return str(error)
    return ""


def _must_be_small(file: _BoundedFile, counted: _CountedRecords) -> None:
    """A table says itself how large its pages are; one that lies is stopped by the bound of memory."""
    with file.open_anywhere() as stream:
        try:
            about = arrow("pyarrow.parquet").ParquetFile(stream).metadata
        except (ValueError, OSError) as error:
            raise UserError(f"{file.address}: is not a Parquet file that can be read: {error}") from None
    counted.bytes = sum(about.row_group(group).total_byte_size for group in range(about.num_row_groups))
    _refuse_expansion(file.address, counted.bytes, file.size)
    _refuse_rows(file.address, about.num_rows, file.size)


def _refuse_expansion(name: str, expanded: int, stored: int) -> None:
    if expanded > max(EXPANDED_BYTES_FREE, EXPANSION_MAX * stored):
        raise UserError(
            f"{name}: grows to more than {EXPANSION_MAX} times its size when it is decompressed, which no text does; "
            "send it uncompressed if it is meant"
        )


def _refuse_rows(name: str, rows: int, stored: int) -> None:
    if rows > max(ROWS_FREE, ROWS_PER_BYTE_MAX * stored):
        raise UserError(
            f"{name}: holds more than {ROWS_PER_BYTE_MAX} rows for each byte of the file, so nearly all of them are "
            "empty or the same; leave those out"
        )


class _BoundedFile:
    """A file under its own name, decompressed and counted as it is read."""

    def __init__(self, file: SourceFile, name: str) -> None:
        self._file = file
        self.name = self.address = name
        for compressed in COMPRESSED:
            if name.lower().endswith(compressed):
                self.address = name[: -len(compressed)]
        self.size, self.stamp = file.size, file.stamp
        self.bytes = 0

    def open(self) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_CountingStream(open_bytes(self._file), self), BLOCK_BYTES))

    def open_anywhere(self) -> BinaryIO:
        return self._file.open_anywhere()

    def saw(self, count: int) -> None:
        self.bytes += count
        _refuse_expansion(self.address, self.bytes, self.size)


class _CountingStream(io.RawIOBase):
    """The bytes of a stream, which are counted for the file as they pass."""

    def __init__(self, stream: BinaryIO, file: _BoundedFile) -> None:
        self._stream, self._file = stream, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(min(len(buffer), BLOCK_BYTES))
        except (EOFError, zlib.error, OSError) as error:
            raise broken(self._file.name, error) from None
        buffer[: len(data)] = data
        self._file.saw(len(data))
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m muster.storage.data_check", description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--name", required=True)
    parser.add_argument("--memory-bytes", type=int, default=MEMORY_BYTES_MAX, help="that it may write to")
    parser.add_argument("--cpu-seconds", type=float, help="of the processor that it may take")
    given = parser.parse_args(arguments)
    for name in ("ARROW_IO_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):  # each has a stack of its own
        os.environ[name] = "1"
    # Not of addresses: Arrow reserves more of them than a small container has memory.
    resource.setrlimit(resource.RLIMIT_DATA, (given.memory_bytes, given.memory_bytes))
    try:
        if given.cpu_seconds is not None:
            _limit_time(given.cpu_seconds)
        (file,) = sources.find(given.address, "text")
        report = check(file, given.name)
    except StorageError as error:
        print(json.dumps({"error": str(error)}), file=sys.stderr)
        return EXIT_STORAGE
    print(json.dumps(asdict(report)))
    return 0


def _limit_time(seconds: float) -> None:
    """Raise _OutOfTime in this thread when so much of the processor's time is used. The kernel ends the process some
    seconds later, where a library has not returned by then."""

    def out_of_time(number: int, frame: object) -> None:
        raise _OutOfTime

    signal.signal(signal.SIGXCPU, out_of_time)
    soft = math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + _LAST_SECONDS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
