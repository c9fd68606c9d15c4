"""A quick look at training data: how much there is, and how long its documents are. A sample, not a reading of all."""

from __future__ import annotations

import fnmatch
import glob
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from muster.contract.address import Address, parse_address
from muster.contract.data_config import Source
from muster.contract.training import TrainingConfig
from muster.contract.warnings import DataShape
from muster.storage.errors import StorageError
from muster.storage.settings import S3Settings
from muster.storage.store import Store, open_store

SAMPLE_BYTES: Final = 4 << 20  # that are read of all sources together
FILES_MAX: Final = 20_000
BYTES_PER_TOKEN: Final = 4.0  # of English text, with the usual vocabularies; 1 where bytes are tokens


@dataclass(frozen=True)
class _File:
    name: str
    size: int


def look_at(training: TrainingConfig) -> DataShape | None:
    """None where a source can't be looked at from here: on another machine's disk, on the web, built in, not there."""
    per_token = 1.0 if training.data.tokenizer == "bytes" and training.model.shape is not None else BYTES_PER_TOKEN
    total, documents, lengths = 0.0, 0.0, list[float]()
    for source in training.data.train:
        try:
            found = _look(source, SAMPLE_BYTES // len(training.data.train))
        except (OSError, StorageError, ValueError):
            return None
        if found is None:
            return None
        total, documents, lengths = total + found[0], documents + found[1], [*lengths, *found[2]]
    if not lengths:
        return None
    ordered = sorted(length / per_token for length in lengths)
    at = [round(ordered[min(len(ordered) - 1, int(share * len(ordered)))]) for share in (0.5, 0.9, 0.99)]
    return DataShape(
        documents=round(documents),
        tokens=max(1, round(total / per_token)),
        exact=False,
        lengths=(at[0], at[1], at[2]),
    )


def _look(source: Source, budget: int) -> tuple[float, float, list[float]] | None:
    """Bytes of text, documents, and the lengths of some in bytes."""
    address = parse_address(source.source)
    if address.scheme not in ("file", "s3"):
        return None
    files = list(_files(address))
    if not files:
        return None
    size = float(sum(file.size for file in files))
    if source.format == "text":
        return size, float(len(files)), [float(file.size) for file in files]
    lines = list(_lines(address, files, budget))
    lengths = [length for line in lines if (length := _text_bytes(line, source)) is not None]
    if not lengths:
        return None
    read = sum(len(line) + 1 for line in lines)
    return size * sum(lengths) / read, size / read * len(lengths), lengths


def _files(address: Address) -> Iterator[_File]:
    if address.scheme == "file":
        paths: Iterable[str] = glob.iglob(address.path, recursive=True)
        for path in paths:
            inner: Iterable[Path] = Path(path).rglob("*") if os.path.isdir(path) else (Path(path),)
            for number, each in enumerate(inner):
                if number >= FILES_MAX:
                    raise ValueError("more files than a look takes")
                if each.is_file():
                    yield _File(str(each), each.stat().st_size)
        return
    folder, pattern = _split(address)
    for number, found in enumerate(_bucket(folder).objects("")):
        if number >= FILES_MAX:
            raise ValueError("more files than a look takes")
        if pattern is None or fnmatch.fnmatchcase(found.key, pattern):
            yield _File(found.key, found.bytes)


def _split(address: Address) -> tuple[Address, str | None]:
    """The folder before the first wildcard or the file's name, and what is left."""
    parts = address.path.split("/")
    first = next((i for i, part in enumerate(parts) if any(letter in part for letter in "*?[")), len(parts) - 1)
    if first == len(parts) - 1 and "." not in parts[-1]:
        return address, None
    return parse_address(f"s3://{address.host}/{'/'.join(parts[:first]).strip('/')}"), "/".join(parts[first:])


def _bucket(folder: Address) -> Store:
    return open_store(folder, S3Settings.for_a_look(os.environ))


def _lines(address: Address, files: Sequence[_File], budget: int) -> Iterator[bytes]:
    """Whole lines from the beginnings of a few files."""
    some = files[:: max(1, len(files) // 4)][:4]
    for file in some:
        size = min(file.size, budget // len(some))
        if address.scheme == "file":
            with open(file.name, "rb") as opened:
                data = opened.read(size)
        else:
            buffer = bytearray(size)
            _bucket(_split(address)[0]).read_into(file.name, 0, memoryview(buffer))
            data = bytes(buffer)
        lines = data.split(b"\n")
        yield from (line for line in (lines if size == file.size else lines[:-1]) if line.strip())


def _text_bytes(line: bytes, source: Source) -> float | None:
    """Of what is learnt from. None where the line is no document."""
    try:
        document: Any = json.loads(line)
        if source.format == "openai-chat":
            return float(sum(len(str(message["content"]).encode()) for message in document["messages"]))
        return float(len(str(document[source.field]).encode()))
    except (ValueError, KeyError, TypeError):
        return None
