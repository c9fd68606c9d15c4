"""Several processes prepare the same data at once, die in the middle, or run out of disk."""

import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest
from tests.polling import eventually
from tests.unit.data.making import contents, stored, write_texts

from muster.contract.data_config import Source
from muster.trainer.data import build, load_tokenizer
from muster.trainer.data.prepare import Report, prepared
from muster.trainer.data.store import TokenStore

# Forked, so that no starter has to import torch first: they really start together.
FORK = multiprocessing.get_context("fork")
TIMEOUT_SECONDS = 60


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
