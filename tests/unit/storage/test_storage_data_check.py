"""A file of training data is read through: its format, its samples, its first bad line, in bounded memory."""

from __future__ import annotations

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muster.storage import data_check
from muster.storage.contents import ending_of
from muster.storage.data_check import Checked, check
from muster.storage.sources import find

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def checked(folder: Path, name: str, data: bytes) -> Checked:
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
    expected = Checked(format, samples, len(data), tokens_estimated=math.ceil(text / 4))
    assert checked(tmp_path, name, data) == expected
    assert checked(tmp_path, f"{name}.gz", gzip.compress(data)) == expected


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
        ("a.jsonl.gz", gzip.compress(lines(CHAT) * 100)[:-20], "a.jsonl.gz: is not a whole gzip file"),
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
    assert Checked(**json.loads(done.stdout)) == Checked("openai-chat", 1, path.stat().st_size, tokens_estimated=2)
    assert "torch" not in done.stderr, "the API's image has none"


@pytest.mark.parametrize(
    ("name", "ending"),
    [("a.jsonl", ".jsonl"), ("My A.JSONL.GZ", ".jsonl.gz"), ("README", ""), ("a.b c", ""), (".gz", ".gz")],
)  # fmt: skip
def test_a_name_keeps_the_ending_that_tells_the_format(name: str, ending: str) -> None:
    assert ending_of(name) == ending
