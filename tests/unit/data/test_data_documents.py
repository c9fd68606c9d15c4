"""Input files: what is read, and a clear error with file, line and next step for all that can't be."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.data.making import contents, stored, write_jsonl, write_texts

from muster.recipe.data_config import Source
from muster.storage import records, sources
from muster.trainer.data import documents, load_tokenizer, reading
from muster.trainer.errors import StorageError, UserError

TEXT = "one\ntwo €\nthree\n"


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "in", [TEXT, "", "\ufeff" + TEXT + "x", "crlf\r\nstays"])
    store = stored(folder, tmp_path / "cache")
    assert sorted(contents(store)) == sorted([TEXT.encode(), (TEXT + "x").encode(), b"crlf\r\nstays"])


def test_every_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"body": "a"}\r\n\n  \n{"body": ""}\n{"body": "\\ud83d\\ude00", "text": 1}')
    assert sorted(contents(stored(path, tmp_path / "cache", format="jsonl", field="body"))) == [b"a", "😀".encode()]


def test_a_long_document_of_jsonl_is_tokenised_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are never in memory all at once, and the store is the same."""
    text = "".join(f"line {number}\n" for number in range(200)) + "x" * 500
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "short"}) + "\n")
    whole = stored(path, tmp_path / "whole", format="jsonl")
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 100)
    pieced = stored(path, tmp_path / "pieced", format="jsonl")
    assert sorted(contents(pieced)) == sorted(contents(whole)) == sorted([text.encode(), b"short"])
    assert pieced.meta.contents == whole.meta.contents
    (file,) = sources.find(str(path), "jsonl")
    given, tokenizer = Source(source="x", format="jsonl"), load_tokenizer("bytes")
    chunks = list(documents.RecordReader(given, tokenizer).chunks(reading.FileReading(file).units(given, tokenizer)))
    assert max(sum(len(part.text) for part in chunk.parts) for chunk in chunks) <= 100
    assert [chunk.hash is None for chunk in chunks].count(False) == 2


def test_compressed_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(TEXT.encode()))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}\n{"text": "c"}'))
    assert contents(stored(tmp_path / "a.txt.gz", tmp_path / "cache")) == [TEXT.encode()]
    assert sorted(contents(stored(tmp_path / "b.jsonl.gz", tmp_path / "cache", format="jsonl"))) == [b"b", b"c"]


@settings(max_examples=25)
@given(
    st.text("aé€😀\n", min_size=1, max_size=60).filter(lambda text: not text.startswith("\ufeff")),
    st.integers(1, 9),
)
def test_a_long_file_read_in_pieces_is_the_same_document(
    tmp_path_factory: pytest.TempPathFactory, text: str, piece: int
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    path = write_texts(folder / "in", [text])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE_BYTES", piece)
        in_pieces = stored(path, folder / "one")
    whole = stored(path, folder / "two")
    assert contents(in_pieces) == contents(whole) == [text.encode()]
    assert in_pieces.meta == whole.meta


def test_pieces_end_where_lines_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", 20)
    folder = write_texts(tmp_path / "in", ["short\nlines, €€\n" * 9 + "end"])
    (file,) = sources.find(str(folder), "text")
    chunks = reading.FileReading(file).units(Source(source="x", format="text"), load_tokenizer("bytes"))
    texts = [part.text for chunk in chunks for part in chunk.parts if part.text]
    assert "".join(texts) == (folder / "00000.txt").read_text()
    assert len(texts) > 5
    assert [text for text in texts if not text.endswith("\n")] == texts[-1:]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', r"is not valid JSON: Expecting ',' delimiter at column 13"),
        (b"{'text': 'x'}", "is not valid JSON: Expecting property name"),
        (b"hello", "is not valid JSON"),
        (b'["x"]', 'is not an object like {"text": "…"}'),
        (b"17", "is not an object like"),
        (b'{"txt": "x", "id": 3}', r"has no field 'text' \(its fields: id, txt\); set the source's `field`"),
        (b"{}", r"has no field 'text' \(its fields: none\)"),
        (b'{"text": null}', "field 'text' is a NoneType; it must be text"),
        (b'{"text": ["x"]}', "field 'text' is a list"),
        (b'{"text": "caf\xe9"}', r"is not UTF-8 text: .* at byte 47 of the file \(0xe9\)"),
        (b'{"text": "\\ud83d"}', r"has half a character \(\\ud83d alone\)"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"text": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"\x00\x01\x02", "is not valid JSON"),
    ],
)
def test_a_corrupt_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "data.jsonl"
    good = json.dumps({"text": "fine"}).encode() + b"\n"
    path.write_bytes(good + good + line + b"\n" + good)
    with pytest.raises(UserError, match=rf"data\.jsonl, line 3: .*{message}"):
        stored(path, tmp_path / "cache", format="jsonl")
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_a_json_array_that_is_called_lines_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('[\n{"text": "x"}\n]')
    with pytest.raises(UserError, match=r"line 1: .*one JSON array: call it \.json, or write one object per line"):
        stored(tmp_path / "a.jsonl", tmp_path / "cache", format="jsonl")


def test_a_line_without_end_is_refused_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORD_BYTES_MAX", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(b" " * (3 << 20))
    with pytest.raises(UserError, match="line 1: is longer than 1 MiB"):
        stored(tmp_path / "a.jsonl", tmp_path / "cache", format="jsonl")


@pytest.mark.parametrize("piece", [4, 5, 6, 7, 1 << 20])
def test_text_that_is_not_utf8_names_file_and_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(reading, "PIECE_BYTES", piece)
    folder = write_texts(tmp_path / "in", ["fine", b"abc\xe2\x82\xacde\xe2\x82("])
    with pytest.raises(UserError, match=r"00001\.txt: is not UTF-8 text: .* at byte 8 of the file \(0xe2\)"):
        stored(folder, tmp_path / "cache")


def test_text_cut_within_a_character_is_refused(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "in", [b"abc\xe2\x82"])
    with pytest.raises(UserError, match=r"unexpected end of data at byte 3 of the file \(0xe2\)"):
        stored(folder, tmp_path / "cache")


def test_a_broken_gzip_file_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "' + bytes(range(65, 91)) * 100 + b'"}\n')
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-12])
    (tmp_path / "not.txt.gz").write_bytes(b"plain text")
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz: is not a whole gzip file"):
        stored(tmp_path / "cut.jsonl.gz", tmp_path / "cache", format="jsonl")
    with pytest.raises(UserError, match=r"not\.txt\.gz: is not a whole gzip file"):
        stored(tmp_path / "not.txt.gz", tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "data", "format", "message"),
    [
        ("empty.txt", b"", "text", "nothing to train on: all its files are empty"),
        ("empty.jsonl", b"", "jsonl", "all its files are empty"),
        ("blank.jsonl", b"\n \n\n", "jsonl", "every document in it is empty"),
        ("void.jsonl", b'{"text": ""}\n', "jsonl", "every document in it is empty"),
        ("empty.jsonl", b"", "openai-chat", "all its files are empty"),
        ("mark.txt", b"\xef\xbb\xbf", "text", "every document in it is empty"),
    ],
)
def test_empty_data_is_refused(tmp_path: Path, name: str, data: bytes, format: str, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=f"{name}: has nothing to train on: {message}|{message}"):
        stored(tmp_path / name, tmp_path / "cache", format=format)
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []


def test_a_disk_that_fails_to_read_is_not_the_users_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}])

    def fail(self: records._ObservedStream, buffer: memoryview) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(records._ObservedStream, "readinto", fail)
    with pytest.raises(StorageError, match=r"a\.jsonl: can't be read: .*Input/output error"):
        stored(path, tmp_path / "cache", format="jsonl")
