"""The token store: made once per content, never half, never wrong, and split by content."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.data.making import CHATML, chat_record, contents, stored, write_jsonl, write_texts, write_tokenizer

from muster.recipe.data_config import Source
from muster.storage import sources
from muster.storage.records import RawRecord
from muster.trainer.data import build, encode, load_tokenizer, prepare, processes, reading
from muster.trainer.data import store as stores
from muster.trainer.data.draft import StoreDraft
from muster.trainer.data.packing import ConcatPacking
from muster.trainer.data.prepare import prepared
from muster.trainer.data.store import TokenStore
from muster.trainer.errors import StorageError, UserError


def made(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "tokens").iterdir())


def same(one: TokenStore, other: TokenStore) -> bool:
    return contents(one) == contents(other) and one.hashes.tolist() == other.hashes.tolist()


def test_a_store_is_made_once_and_found_by_its_content(tmp_path: Path) -> None:
    lines: list[str] = []
    cache, tokenizer = tmp_path / "cache", load_tokenizer("bytes")
    here = write_texts(tmp_path / "here", ["one", "two", "three"])
    there = tmp_path / "there" / "sub"
    shutil.copytree(here, there)
    (there / "00000.txt").rename(there / "zzz.txt")
    for folder in (here, here, there):
        prepared(Source(source=str(folder)), tokenizer, cache, lines.append)
    assert [line for line in lines if "prepared" in line] == lines[:1]
    assert "3 documents, 14 tokens" in lines[0]
    assert len(made(cache)) == 1


def test_the_key_follows_contents_format_field_and_tokenizer(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x", "body": "y", **chat_record(("assistant", "z"))}])
    tokenizer = write_tokenizer(tmp_path / "t.json", CHATML)
    stored(path, cache, format="text")
    stored(path, cache, format="text", field="body")  # text has no field
    assert len(made(cache)) == 1
    stored(path, cache, format="jsonl")
    stored(path, cache, format="jsonl", field="body")
    stored(path, cache, format="openai-chat")
    stored(path, cache, str(tokenizer), format="text")
    assert len(made(cache)) == 5
    stored(path, cache)  # which is openai-chat, found by looking
    assert len(made(cache)) == 5
    path.write_text(path.read_text() + "\n")
    assert contents(stored(path, cache, format="jsonl")) == [b"x"]
    assert len(made(cache)) == 6


TEXTS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=12)


@settings(max_examples=30)
@given(texts=TEXTS, order=st.randoms(use_true_random=False), cut=st.integers(0, 12))
def test_the_index_depends_on_contents_alone(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], order: random.Random, cut: int
) -> None:
    """Whatever the order and number of the files: the same documents in the same index order."""
    folder = tmp_path_factory.mktemp("index")
    records = [{"text": text} for text in texts]
    one = stored(write_jsonl(folder / "one.jsonl", records), folder / "cache", format="jsonl")
    order.shuffle(records)
    write_jsonl(folder / "two" / "b.jsonl", records[:cut])
    write_jsonl(folder / "two" / "a.jsonl", records[cut:])
    two = stored(folder / "two", folder / "cache", format="jsonl")
    assert same(one, two)
    assert one.meta.contents == two.meta.contents
    assert sorted(contents(one)) == sorted(text.encode() for text in texts)
    assert (np.diff(one.hashes.astype(object)) >= 0).all()


def test_text_and_jsonl_of_the_same_text_have_the_same_hash(tmp_path: Path) -> None:
    text = stored(write_texts(tmp_path / "in", ["smile 😀"]), tmp_path / "cache")
    line = stored(write_jsonl(tmp_path / "a.jsonl", [{"text": "smile 😀"}]), tmp_path / "cache", format="jsonl")
    assert text.hashes.tolist() == line.hashes.tolist()


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", ["the fox"])
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "t.json", CHATML)))
    small = prepared(Source(source=str(source)), tokenizer, tmp_path / "small", lambda _: None)
    tokenizer.vocab_size = 128_256  # type: ignore[misc]
    large = prepared(Source(source=str(source)), tokenizer, tmp_path / "large", lambda _: None)
    assert (small.meta.dtype, large.meta.dtype) == ("uint16", "uint32")
    assert small.tokens.tolist() == large.tokens.tolist() == [*tokenizer.encode("the fox"), tokenizer.eos]


@pytest.mark.parametrize("damage", ["cut", "meta", "version", "missing"])
def test_a_damaged_store_is_made_again(tmp_path: Path, damage: str) -> None:
    source, cache = write_texts(tmp_path / "in", ["one", "two"]), tmp_path / "cache"
    before = contents(stored(source, cache))
    (name,) = made(cache)
    folder = cache / "tokens" / name
    if damage == "cut":
        (folder / "tokens.bin").write_bytes(b"xx")
    elif damage == "meta":
        (folder / "meta.json").write_text('{"version": 1')
    elif damage == "version":
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps(meta | {"version": 0}))
    else:
        (folder / "bounds.bin").unlink()
    assert TokenStore.open(folder) is None
    assert contents(stored(source, cache)) == before
    assert made(cache) == [name]


def test_ids_that_no_tokenizer_has_are_told_and_the_store_is_made_again(tmp_path: Path) -> None:
    source, cache = write_texts(tmp_path / "in", ["some words " * 20]), tmp_path / "cache"
    store = stored(source, cache)
    (path,) = cache.glob("tokens/*/tokens.bin")
    before = path.read_bytes()
    tokens = np.memmap(path, np.uint16, mode="r+")
    tokens[::16] = 60_000
    tokens.flush()
    sample = ConcatPacking(stores.split(store, 0)[0], 64, 0, seed=0, stream=0).sample
    with pytest.raises(StorageError, match="holds the id 60000"):
        sample(0, 0)
    with pytest.raises(StorageError, match="holds the id 60000"):
        sample(0, 0)  # a neighbour that comes later is told the same
    assert stored(source, cache).meta == store.meta
    assert path.read_bytes() == before


def test_what_fails_halfway_leaves_nothing(tmp_path: Path) -> None:
    records: list[object] = [{"text": "x" * 1000}] * 3000
    path = write_jsonl(tmp_path / "a.jsonl", [*records, "bad"])
    with pytest.raises(UserError, match="line 3001"):
        stored(path, tmp_path / "cache", format="jsonl")
    assert made(tmp_path / "cache") == []


def test_what_a_dead_starter_left_is_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documents that were written are not tokenised again, and the bytes are those of one that never died."""
    records = [{"text": f"document {number} " * 3} for number in range(40)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    monkeypatch.setattr(build, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(build, "KEEP_SECONDS", 0.0)
    whole = stored(path, tmp_path / "whole", format="jsonl")
    real, tokenised = encode.BatchEncoder.encode, list[int]()

    def dying(self: encode.BatchEncoder, units: Sequence[RawRecord]) -> encode.EncodedDocuments:
        if len(tokenised) == 3:
            raise KeyboardInterrupt
        return counted(self, units)

    def counted(self: encode.BatchEncoder, units: Sequence[RawRecord]) -> encode.EncodedDocuments:
        tokenised.append(len(units))
        return real(self, units)

    with monkeypatch.context() as patch:
        patch.setattr(encode.BatchEncoder, "encode", dying)
        with pytest.raises(KeyboardInterrupt):
            stored(path, tmp_path / "cache", format="jsonl")
    assert [name[:10] for name in made(tmp_path / "cache")] == [".building-"]
    (left,) = (tmp_path / "cache" / "tokens").iterdir()
    (left / "tokens.bin").write_bytes((left / "tokens.bin").read_bytes() + b"written after it was last kept")
    monkeypatch.setattr(encode.BatchEncoder, "encode", counted)
    lines: list[str] = []
    prepared(Source(source=str(path), format="jsonl"), load_tokenizer("bytes"), tmp_path / "cache", lines.append)
    assert sum(tokenised) == len(records)
    assert f"{sum(tokenised[:3])} documents are prepared already" in lines[0]
    assert made(tmp_path / "cache") == [whole.meta.key]
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")


def files_of(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (cache / "tokens").rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.parametrize("format", ["text", "jsonl", "openai-chat"])
def test_other_processes_make_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    tokenizer = str(write_tokenizer(tmp_path / "t.json", CHATML))
    if format == "text":
        monkeypatch.setattr(reading, "PIECE_BYTES", 2000)
        path = write_texts(tmp_path / "in", ["line of text\n" * count for count in (1, 300, 5, 1000)])
    else:
        texts = [f"the quick brown fox {number} " * (1 + number % 7) for number in range(60)]
        given = [{"text": text, **chat_record(("user", text), ("assistant", text))} for text in texts]
        path = write_jsonl(tmp_path / "a.jsonl", given)
    stored(path, tmp_path / "alone", tokenizer, format=format)
    monkeypatch.setattr(build, "BATCH_CHARACTERS", 1000)
    monkeypatch.setattr(build, "processes_for", lambda size: 2)
    stored(path, tmp_path / "together", tokenizer, format=format)
    assert files_of(tmp_path / "together") == files_of(tmp_path / "alone")


def test_a_fault_that_another_process_finds_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*[{"text": "fine"}] * 30, {"txt": "x"}, *[{"text": "fine"}] * 30, "bad"])
    monkeypatch.setattr(build, "BATCH_CHARACTERS", 200)
    monkeypatch.setattr(build, "processes_for", lambda size: 2)
    with pytest.raises(UserError, match=r"a\.jsonl, line 31: has no field 'text'"):
        stored(path, tmp_path / "cache", format="jsonl")
    assert made(tmp_path / "cache") == []


@pytest.mark.long
def test_a_process_that_is_killed_is_told_and_what_was_prepared_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"document {number}"} for number in range(500)])
    monkeypatch.setattr(build, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(build, "KEEP_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(build, "processes_for", lambda size: 2)
        real, asked = processes._EncodingProcess.encode, list[int]()

        def killed(self: processes._EncodingProcess, units: Sequence[RawRecord]) -> encode.EncodedDocuments:
            asked.append(len(units))
            if len(asked) == 12:
                self._process.kill()
            return real(self, units)

        patch.setattr(processes._EncodingProcess, "encode", killed)
        with pytest.raises(StorageError, match=r"ended with -9 .*what was prepared is kept, so start again"):
            stored(path, tmp_path / "cache", format="jsonl")
    lines: list[str] = []
    prepared(Source(source=str(path), format="jsonl"), load_tokenizer("bytes"), tmp_path / "cache", lines.append)
    assert "documents are prepared already" in lines[0]
    stored(path, tmp_path / "whole", format="jsonl")
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_texts(tmp_path / "in", ["before"])
    real = sources.digest

    def changing(file: sources.SourceFile) -> str:
        digest = real(file)
        Path(file.address).write_text("behind")
        return digest

    monkeypatch.setattr(sources, "digest", changing)
    with pytest.raises(UserError, match=r"00000\.txt: changed while it was being read"):
        stored(source, tmp_path / "cache")
    assert made(tmp_path / "cache") == []


def test_a_large_file_is_hashed_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "TRUST_STAMP_BYTES", 4)
    source, cache = write_texts(tmp_path / "in", ["long enough", "abc"]), tmp_path / "cache"
    hashed: list[str] = []
    real = sources.digest

    def counted(file: sources.SourceFile) -> str:
        hashed.append(Path(file.address).name)
        return real(file)

    monkeypatch.setattr(sources, "digest", counted)
    stored(source, cache)
    stored(source, cache)
    assert hashed == ["00000.txt", "00001.txt", "00001.txt"]
    (source / "00000.txt").write_text("long enougH")
    assert b"long enougH" in contents(stored(source, cache))
    assert hashed.count("00000.txt") == 2
    for memory in (cache / "digests").iterdir():
        memory.write_text("damaged")
    stored(source, cache)
    assert hashed.count("00000.txt") == 3


@pytest.mark.parametrize("number", sorted(prepare.NO_ROOM))
def test_a_full_disk_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(self: StoreDraft, *_: object) -> None:
        raise OSError(number, "No space left on device")

    monkeypatch.setattr(StoreDraft, "add", full)
    source = write_texts(tmp_path / "in", ["x"])
    with pytest.raises(StorageError, match=r"no room for the token store in .*free some space, or set MUSTER_"):
        stored(source, tmp_path / "cache")
    assert made(tmp_path / "cache") == []


def store_with(hashes: list[int]) -> TokenStore:
    meta = stores.StoreMetadata(1, "", "", "", len(hashes), len(hashes), "uint16", False, 0)
    ones = np.arange(len(hashes) + 1)
    return TokenStore(meta, ones, None, np.array(sorted(hashes), np.uint64), ones[:-1], ones, None)


HASHES = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40)


@given(st.lists(HASHES, min_size=1, max_size=3), st.floats(0.001, 0.5))
def test_no_content_stands_on_both_sides_of_the_split(all_hashes: list[list[int]], share: float) -> None:
    opened = [store_with(hashes) for hashes in all_hashes]
    different = {number for hashes in all_hashes for number in hashes}
    if len(different) == 1:
        with pytest.raises(ValueError, match="all documents have the same content"):
            stores.hold_out(opened, share)
        return
    threshold = stores.hold_out(opened, share)
    training, held_out = set[int](), set[int]()
    for store in opened:
        train, evaluation = stores.split(store, threshold)
        assert len(train) + len(evaluation) == store.meta.documents
        training |= set(store.hashes[train.first : train.last].tolist())
        held_out |= set(store.hashes[evaluation.first : evaluation.last].tolist())
    assert training
    assert held_out
    assert not training & held_out
    assert training | held_out == different


def test_the_share_is_about_the_share(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": str(number)} for number in range(4000)])
    store = stored(path, tmp_path / "cache", format="jsonl")
    _, evaluation = stores.split(store, stores.hold_out([store], 0.1))
    assert 300 < len(evaluation) < 500


def test_shared_contents_are_counted() -> None:
    def whole(hashes: list[int]) -> stores.DocumentRange:
        return stores.split(store_with(hashes), 0)[0]

    assert stores.shared_contents(whole([1, 5, 5, 2**64 - 1]), whole([5, 7, 2**64 - 1])) == 3
    assert stores.shared_contents(whole([9]), whole([5, 7])) == 0
