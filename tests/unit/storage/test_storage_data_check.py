"""A file of training data is read through: its format, its samples, its first bad line, in bounded memory."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from muster.api.data.files.arrivals import memory_of_a_check
from muster.storage import data_check
from muster.storage.contents import ending_of
from muster.storage.data_check import MEMORY_BYTES_MAX, CheckedContents, check
from muster.storage.sources import LocalFile, find

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def checked(folder: Path, name: str, data: bytes) -> CheckedContents:
    path = folder / name
    path.write_bytes(data)
    (file,) = find(str(path), "text")
    return check(file, name)


@pytest.mark.parametrize(
    ("name", "data", "format", "samples", "text"),
    [
        ("a.jsonl", lines({"text": "one", "n": 1}, {"text": "twö"}), "jsonl", 2, 7),
        ("a.jsonl", lines(CHAT, CHAT, CHAT), "openai-chat", 3, 3 * 7),
        ("a.json", json.dumps([PAIR, PAIR]).encode(), "preference", 2, 2 * 3),
        ("a.csv", b"instruction,output\na,b\n", "alpaca", 1, 2),
        ("a.txt", "Größe".encode(), "text", 1, 7),
    ],
)
def test_the_format_the_samples_and_a_quarter_of_the_texts_bytes_are_told(
    tmp_path: Path, name: str, data: bytes, format: str, samples: int, text: int
) -> None:
    expected = CheckedContents(format, samples, len(data), tokens_estimated=math.ceil(text / 4))
    assert checked(tmp_path, name, data) == expected
    assert checked(tmp_path, f"{name}.gz", gzip.compress(data)) == expected


def test_further_formats_that_a_task_may_take_are_told(tmp_path: Path) -> None:
    """Preferences that are published with `messages` beside them are also conversations."""
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    pair = {"prompt": "q", "chosen": said, "rejected": said, "messages": said}
    found = checked(tmp_path, "a.jsonl", lines(pair, pair))
    assert (found.format, found.others, found.samples) == ("preference", ["openai-chat"], 2)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", lines(CHAT, CHAT) + b"{oops\n", "a.jsonl, line 3: is not valid JSON"),
        ("a.jsonl", lines(CHAT, {"messages": [{"role": "wizard", "content": ""}]}), "line 2: messages[0].role"),
        ("a.jsonl", lines(CHAT, {"text": "x"}), "line 2: looks like jsonl, and the records before it like openai-chat"),
        ("a.jsonl", lines({"title": "x"}), "line 1: has the columns title"),
        ("a.jsonl", lines([1]), "line 1: is a list, and a record is an object"),
        ("a.jsonl", b"\n \n", "a.jsonl: holds no record"),
        ("a.jsonl", lines({"text": "\ud800"}), "line 1: has half a character"),
        ("a.txt", b"fine \xff", "a.txt: is not UTF-8 text: invalid start byte at byte 5"),
        ("a.csv", b"text\na\nb,c\n", "a.csv, line 3: has 2 fields"),
        ("a.parquet", b"PAR1 not", "a.parquet: is not a Parquet file"),
        ("a.jsonl.gz", gzip.compress(lines(CHAT) * 100, mtime=0)[:-20], "a.jsonl.gz: is not a whole gzip file"),
        ("a.jsonl.zst", b"nothing of it", "a.jsonl.zst: is not a whole zstd file"),
    ],
)  # fmt: skip
def test_the_first_fault_is_told_with_its_place(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    assert words in checked(tmp_path, name, data).fault


@pytest.mark.parametrize("fill", [b"\n", b" "], ids=["blank lines", "one line"])
def test_a_file_that_bursts_is_left_at_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: bytes) -> None:
    monkeypatch.setattr(data_check, "EXPANDED_BYTES_FREE", 1 << 20)
    found = checked(tmp_path, "bomb.jsonl.gz", gzip.compress(fill * (8 << 20)))
    assert "grows to more than 200 times its size" in found.fault
    assert (found.bytes or 0) < 4 << 20, "the rest of it was not read"


def zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


def repeated(rows: int, size: int) -> pa.Table:
    """One text that every row has, kept once."""
    return pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * rows), pa.array(["x" * size]))})


def write_bomb(path: Path, kind: str) -> None:
    """Some kilobytes that are gigabytes when they are read, or a hundred megabytes at once."""
    if kind == "frames":
        path.write_bytes(zstd(lines({"text": "x" * (1 << 20)}) * 32) * 100)
    elif kind == "rows":
        parquet.write_table(repeated(10_000, 64 << 10), path, compression="zstd")
    elif kind == "groups":
        parquet.write_table(repeated(1_000, 16 << 20), path, compression="zstd")
    elif kind == "pages":
        texts = pa.table({"text": pa.array(["x" * (1 << 20)] * 100)})
        parquet.write_table(texts, path, compression="zstd", use_dictionary=False)
    else:
        texts = pa.table({"text": pa.array(["x" * (1 << 20)] * 256)})
        with ipc.new_stream(path, texts.schema, options=ipc.IpcWriteOptions(compression="zstd")) as stream:
            stream.write_table(texts)


# A process begins with the peak of the one that starts it, which is a small one here.
MEASURED = """
import resource, subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
GROWS, TOO_MUCH = "grows to more than 200 times its size", "comes more at once than the memory of this check holds"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("a.jsonl.zst", "frames", GROWS),
        ("a.parquet", "rows", GROWS),
        ("a.parquet", "groups", TOO_MUCH),
        ("a.parquet", "pages", GROWS),
        ("a.arrow", "body", TOO_MUCH),
    ],
)
def test_a_bomb_is_refused_in_the_memory_that_it_is_given(tmp_path: Path, name: str, kind: str, words: str) -> None:
    path = tmp_path / name
    write_bomb(path, kind)
    assert path.stat().st_size < 512 << 10
    memory = 256 << 20
    tool = ["-m", "muster.storage.data_check", path.as_uri(), "--name", name, "--memory-bytes", str(memory)]
    done = subprocess.run([sys.executable, "-c", MEASURED, *tool], capture_output=True, text=True, check=True)
    said, rss_kib = done.stdout.splitlines()
    assert words in CheckedContents(**json.loads(said)).fault
    assert int(rss_kib) << 10 < memory + (64 << 20), "that, and the libraries themselves"


def test_rows_that_take_no_bytes_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty millions take twenty minutes, and 131 KB."""
    path, empty = tmp_path / "rows.parquet", repeated(1_000_000, 0)
    with parquet.ParquetWriter(path, empty.schema, compression="zstd") as writer:
        for _ in range(50):
            writer.write_table(empty)
    assert path.stat().st_size < 256 << 10
    read = []
    monkeypatch.setattr(data_check, "_records", lambda *arguments: read.append(arguments))
    found = check(LocalFile(path, path.stat().st_size, ""), path.name)
    assert "holds more than 10 rows for each byte of the file" in found.fault
    assert not read


def test_rows_of_what_tells_no_number_are_refused_at_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_check, "ROWS_FREE", 1_000)
    path, empty = tmp_path / "rows.arrow", repeated(100_000, 0)
    with ipc.new_stream(path, empty.schema, options=ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_table(empty, max_chunksize=50_000)
    found = check(LocalFile(path, path.stat().st_size, ""), path.name)
    assert "holds more than 10 rows for each byte of the file" in found.fault
    assert (found.samples or 0) < 100_000


def test_a_check_that_takes_longer_than_it_may_ends_with_that_verdict(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(repeated(999_999, 0), path)
    tool = ["-m", "muster.storage.data_check", path.as_uri(), "--name", path.name, "--cpu-seconds", "0.1"]
    done = subprocess.run([sys.executable, *tool], capture_output=True, text=True, check=True)
    found = CheckedContents(**json.loads(done.stdout))
    assert "a.parquet: reading it takes longer than a file of its size may" in found.fault
    assert (found.samples or 0) < 999_999


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.zst"])
def test_honest_data_is_read_in_the_least_memory_that_a_check_has(tmp_path: Path, name: str) -> None:
    """A quarter of the 512 MiB that the chart gives the API."""
    path, texts = tmp_path / name, pa.table({"text": pa.array([f"text {number} " * 50 for number in range(5_000)])})
    if name == "a.parquet":
        parquet.write_table(texts, path)
    elif name == "a.arrow":
        with ipc.new_stream(path, texts.schema) as stream:
            stream.write_table(texts, max_chunksize=1_000)
    else:
        path.write_bytes(zstd(lines(*texts.to_pylist())))
    command = [sys.executable, "-m", "muster.storage.data_check", path.as_uri(), "--name", name]
    done = subprocess.run([*command, "--memory-bytes", str(128 << 20)], capture_output=True, text=True, check=True)
    assert (CheckedContents(**json.loads(done.stdout)).samples, CheckedContents(**json.loads(done.stdout)).fault) == (
        5_000,
        "",
    )


def test_a_check_has_a_share_of_its_containers_memory(tmp_path: Path) -> None:
    (tmp_path / "unbounded").write_text("max\n")
    (tmp_path / "bounded").write_text(f"{512 << 20}\n")
    assert memory_of_a_check([tmp_path / "none", tmp_path / "bounded"]) == 128 << 20
    assert memory_of_a_check([tmp_path / "unbounded", tmp_path / "none"]) == MEMORY_BYTES_MAX


def test_the_tool_prints_what_it_found(tmp_path: Path) -> None:
    path = tmp_path / "9f86.jsonl"
    path.write_bytes(lines(CHAT))
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "muster.storage.data_check",
        path.as_uri(),
        "--name",
        "chat.jsonl",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert CheckedContents(**json.loads(done.stdout)) == CheckedContents(
        "openai-chat", 1, path.stat().st_size, tokens_estimated=2
    )
    assert "torch" not in done.stderr, "the API's image has none"


@pytest.mark.parametrize(
    ("name", "ending"),
    [("a.jsonl", ".jsonl"), ("My A.JSONL.GZ", ".jsonl.gz"), ("README", ""), ("a.b c", ""), (".gz", ".gz")],
)  # fmt: skip
def test_a_name_keeps_the_ending_that_tells_the_format(name: str, ending: str) -> None:
    assert ending_of(name) == ending
