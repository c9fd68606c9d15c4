"""What hangs or misleads in one job's folder holds up neither another job nor the end of the operator."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from tests.polling import WAIT_SECONDS_MAX

from muster.operator.commit_lookup import CommitLookup, KnownCommits
from muster.operator.core.observed import CommittedSteps
from muster.operator.local.processes import CLAIM, REMOVED, WorkerKey, is_claimed, mark_removed, read_record, start
from muster.operator.local.reading import HeartbeatReader, log_tail, read_exit
from muster.storage.listing import CommitSummary
from muster.storage.small_files import open_to_append, read_regular
from muster.words.state_folder import StateFolder

COMMIT = CommitSummary(7, 1, 5.0, world_size=1, tokens=0, metrics={}, best=False, bytes=0, files=0)


def test_a_store_that_hangs_is_told_in_time_and_not_asked_twice() -> None:
    release, asked = threading.Event(), []

    def read(folder: str) -> tuple[CommitSummary, ...]:
        asked.append(folder)
        if "dead" in folder:
            release.wait()
        return (COMMIT,)

    async def main() -> None:
        lookup = CommitLookup(read, seconds_max=0.5)
        hangs = await lookup.look("a", "/dead/a")
        lookup._seconds_max = WAIT_SECONDS_MAX  # what does answer may take its time
        well = await lookup.look("b", "/live/b")
        assert "/dead/a has not answered" in hangs.unreadable
        assert well == KnownCommits(CommittedSteps(7, 5.0))
        assert (await lookup.look("a", "/dead/a")).unreadable
        assert asked.count("/dead/a") == 1, "one thread at most waits for it"
        release.set()
        for thread in [thread for thread in threading.enumerate() if thread.name == "commits of a"]:
            await asyncio.to_thread(thread.join, WAIT_SECONDS_MAX)
        assert (await lookup.look("a", "/dead/a")).committed == CommittedSteps(7, 5.0), "it answers again"

    asyncio.run(main())


@pytest.mark.parametrize("error", [RecursionError("too deep"), OSError("no such bucket"), KeyError("step")])
def test_whatever_a_reading_raises_is_a_reason(error: Exception) -> None:
    def read(folder: str) -> tuple[CommitSummary, ...]:
        raise error

    known = asyncio.run(CommitLookup(read).look("a", "/ckpt/a"))
    assert known.committed is None
    assert str(error.args[0]) in known.unreadable


def test_a_fifo_a_link_or_a_giant_in_place_of_a_workers_file_is_no_news(tmp_path: Path) -> None:
    state, key = StateFolder(tmp_path), WorkerKey("job", 1, 0)
    folder = key.folder(state)
    folder.mkdir(parents=True)
    (tmp_path / "secret").write_text("{}")
    for name in ("rank-0.json", "exit.json", "worker.json", "log", "rank-1.json"):
        path = folder / name
        path.symlink_to(tmp_path / "secret") if name == "rank-1.json" else os.mkfifo(path)
    assert HeartbeatReader(state).read(key) == ()
    assert read_exit(state, key) is None
    assert read_record(state, key) is None
    assert log_tail(folder / "log") == ""
    for refused in (lambda: read_regular(folder / "log"), lambda: open_to_append(folder / "log")):
        with pytest.raises(OSError, match="log"):
            refused()
    large = tmp_path / "large"
    large.write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_regular(large, bytes_max=10)


def test_marks_of_the_operator_go_through_no_link(tmp_path: Path) -> None:
    state, key, target = StateFolder(tmp_path), WorkerKey("job", 1, 0), tmp_path / "made-elsewhere"
    folder = key.folder(state)
    folder.mkdir(parents=True)
    for name in (REMOVED, CLAIM):
        (folder / name).symlink_to(target)
    mark_removed(state, key)
    assert not is_claimed(state, key)
    with pytest.raises(OSError, match=CLAIM):
        start(state, key, "node-0", ["true"], {})
    assert not target.exists()
