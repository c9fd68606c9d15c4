"""Several processes prepare the same data at once, die in the middle, or run out of disk."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.polling import WAIT_SECONDS_MAX, eventually
from tests.processes import is_alive
from tests.unit.data.making import chat_record, config, contents, opened, stored, write_jsonl, write_texts

from muster.recipe.data_config import Source
from muster.trainer.data import build, load_tokenizer
from muster.trainer.data.draft import StoreDraft
from muster.trainer.data.prepare import Report, prepared
from muster.trainer.data.store import TokenStore

# Forked, so that no starter has to import torch first: they really start together.
FORK = multiprocessing.get_context("fork")
TIMEOUT_SECONDS = WAIT_SECONDS_MAX


def prepare(source: Path, cache: Path, report: Report) -> TokenStore:
    return prepared(Source(source=str(source)), load_tokenizer("bytes"), cache, report)


def start(work: Callable[[Connection], None]) -> tuple[ForkProcess, Connection]:
    """Run `work` in a process of its own; the connection leads there."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=work, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


def answer(connection: Connection) -> Any:
    assert connection.poll(TIMEOUT_SECONDS), "no answer"
    return connection.recv()


def made(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "tokens").iterdir())


def test_rival_starters_make_one_store(tmp_path: Path) -> None:
    source = write_texts(tmp_path / "in", [f"document {number} " * 200 for number in range(500)])

    def work(connection: Connection) -> None:
        lines: list[str] = []
        connection.recv()
        store = prepare(source, tmp_path / "cache", lines.append)
        connection.send((lines, store.meta, store.tokens[-100:].tolist()))

    started = [start(work) for _ in range(4)]
    for _, connection in started:
        connection.send("now")
    answers = [answer(connection) for _, connection in started]
    for process, _ in started:
        process.join(TIMEOUT_SECONDS)
    said = [line for lines, _, _ in answers for line in lines]
    assert len([line for line in said if line.startswith("data: prepared")]) == 1
    assert all((meta, tokens) == answers[0][1:] for _, meta, tokens in answers)
    assert made(tmp_path / "cache") == [answers[0][1].key]


def test_a_second_starter_says_that_it_waits_and_takes_over_from_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = write_texts(tmp_path / "in", ["some text"]), tmp_path / "cache"

    def stop_in_the_middle(connection: Connection) -> None:
        def report(line: str) -> None:
            connection.send(line)
            connection.recv()  # and nobody will ever send

        prepare(source, cache, report)

    with monkeypatch.context() as patch:
        patch.setattr(build, "PROGRESS_SECONDS", 0)
        first, connection = start(stop_in_the_middle)
    assert "preparing" in answer(connection)

    lines: list[str] = []
    stores: list[TokenStore] = []
    second = threading.Thread(target=lambda: stores.append(prepare(source, cache, lines.append)))
    second.start()
    try:
        waiting = eventually(lambda: lines, "the second starter to say that it waits")[0]
        assert waiting.startswith(f"data: waiting for another process to prepare {source} (process {first.pid}: ")
        assert "preparing" in waiting
        assert not stores
        assert [name[:10] for name in made(cache)] == [".building-"]
    finally:
        first.kill()
        first.join(TIMEOUT_SECONDS)
        second.join(TIMEOUT_SECONDS)
    assert contents(stores[0]) == [b"some text"]
    assert made(cache) == [stores[0].meta.key]


def test_a_disk_that_fills_up_is_reported_and_cleaned(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the kernel refuses the write in the same way."""
    source = write_texts(tmp_path / "in", [os.urandom(100_000).hex()])

    def write_too_much(connection: Connection) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            prepare(source, tmp_path / "cache", lambda line: None)
        except Exception as error:
            connection.send((type(error).__name__, str(error)))

    process, connection = start(write_too_much)
    name, message = answer(connection)
    process.join(TIMEOUT_SECONDS)
    assert name == "StorageError"
    assert message.startswith(f"no room for the token store in {tmp_path / 'cache'}: ")
    assert made(tmp_path / "cache") == []
    assert stored(source, tmp_path / "cache").meta.tokens == 200_001


def _said(connection: Connection) -> Any:
    """What came through a connection; None where its other end died before it said anything."""
    try:
        return connection.recv()
    except EOFError:
        return None


@pytest.mark.long
def test_a_preparation_that_is_killed_at_fifty_moments_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each starter dies by SIGKILL at a random moment, the last one does not; curation makes an index of its own. What
    one wrote and kept, none after it tokenises again: their positions only grow."""
    monkeypatch.setattr(build, "BATCH_CHARACTERS", 4000)
    monkeypatch.setattr(build, "KEEP_SECONDS", 0.0)
    words = random.Random(0)
    texts = [" ".join(words.choices(["alpha", "beta", "gamma", "delta", "eps"], k=60)) for _ in range(300)]
    source = write_jsonl(tmp_path / "in.jsonl", [{"text": text} for text in (*texts, *texts[:20])])
    given = config(
        [{"source": str(source), "format": "jsonl"}], 64, curation={"exactDuplicates": True, "nearDuplicates": {}}
    )

    def bytes_of(cache: Path) -> dict[str, bytes]:
        folders = [cache / "tokens", cache / "curated"]
        paths = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(cache)): path.read_bytes() for path in paths}

    opened(given, tmp_path / "warm")  # the first one also imports, and would make all moments too late ones
    began = time.monotonic()
    want = opened(given, tmp_path / "whole").fingerprint
    seconds = time.monotonic() - began

    def work(connection: Connection) -> None:
        opened(given, tmp_path / "cache")
        connection.send("done")

    def documents_kept() -> int:
        kept = list((tmp_path / "cache").glob("tokens/.building-*/progress.json"))
        return json.loads(kept[0].read_text())["documents"] if kept else 0

    killed, rounds, before, gone_on = 0, 0, 0, 0
    while killed < 50:
        rounds += 1
        assert rounds < 500, "hardly any starter was killed before it was done"
        process, connection = start(work)
        connection.poll(words.uniform(0, seconds))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(TIMEOUT_SECONDS)
        done = _said(connection) == "done"
        connection.close()
        killed += not done
        building = [
            folder for folder in (tmp_path / "cache").glob("tokens/.building-*") if not (folder / "meta.json").exists()
        ]  # and not a whole store, of which the rest was being cleaned away
        after = documents_kept()
        assert not before or not building or after >= before, "what one starter kept, the next one has"
        gone_on += bool(before)
        before = after
        if done and killed < 50:  # the next one shall find work; what a killed one left stays for it
            shutil.rmtree(tmp_path / "cache")
            before = 0
    assert gone_on > 5, "starters found what was kept"
    assert opened(given, tmp_path / "cache").fingerprint == want
    assert bytes_of(tmp_path / "cache") == bytes_of(tmp_path / "whole")
    assert not list((tmp_path / "cache").rglob(".building-*")), "what the dead began is cleared away"


@pytest.mark.long
def test_one_that_is_killed_while_others_tokenise_for_it_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversations, with their loss masks. The processes that tokenise end with the one that started them."""
    monkeypatch.setattr(build, "BATCH_CHARACTERS", 4000)
    monkeypatch.setattr(build, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(build, "processes_for", lambda size: 2)
    dice = random.Random(1)
    turns = [("".join(dice.choices("abcde ", k=400)), "".join(dice.choices("xyz ", k=300))) for _ in range(600)]
    source = write_jsonl(tmp_path / "in.jsonl", [chat_record(("user", a), ("assistant", b)) for a, b in turns])
    given = Source(source=str(source), format="openai-chat")
    whole = prepared(given, load_tokenizer("bytes"), tmp_path / "whole", lambda line: None)

    keep = StoreDraft.keep

    def work_until(goal: int, connection: Connection) -> None:
        """Prepare until so many documents are kept, say so and stand there."""

        def keep_and_stand(draft: StoreDraft) -> None:
            keep(draft)
            if draft.progress.documents >= goal:
                connection.send(draft.progress.documents)
                connection.recv()  # and nobody will ever send

        monkeypatch.setattr(StoreDraft, "keep", keep_and_stand)  # of this process alone
        prepared(given, load_tokenizer("bytes"), tmp_path / "cache", lambda line: None)

    for goal in range(100, 600, 100):
        process, connection = start(partial(work_until, goal))
        kept = answer(connection)
        others = psutil.Process(process.pid).children()
        process.kill()
        process.join(TIMEOUT_SECONDS)
        connection.close()
        assert len(others) == 2, "they tokenise"
        eventually(lambda others=others: not any(map(is_alive, others)), "the end of those that tokenised for it")
        assert goal <= kept < 600, "it was killed before it was done"
    made_again = prepared(given, load_tokenizer("bytes"), tmp_path / "cache", lambda line: None)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / cache / "tokens" / whole.meta.key).iterdir()}
        for cache in ("whole", "cache")
    )
    assert first == second
    assert (made_again.meta, made_again.meta.documents) == (whole.meta, 600)
