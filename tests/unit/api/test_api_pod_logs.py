"""Logs of pods in the state folder: long ones give up their older half, and those of jobs that are gone go, too."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from muster.api.core.cluster import pod_logs
from muster.api.core.cluster.pod_logs import PodLogs
from muster.api.core.logs.files import JobLogs, LogFollower, page
from muster.words.state_folder import StateFolder

BYTES_MAX = 256 << 10  # of some blocks, so that there can be holes
JOB: dict[str, Any] = {
    "metadata": {"name": "long", "namespace": "team"},
    "status": {"phase": "Running", "attempt": 1, "gang": {"wanted": 1}},
}


class ApiServer:
    """Its one pod writes these lines, torn anywhere, each time from the beginning."""

    def __init__(self, lines: list[str]) -> None:
        self.raw = "".join(lines).encode()

    async def stream(self, path: str, **query: str) -> AsyncIterator[bytes]:
        for start in range(0, len(self.raw), 10_007):
            yield self.raw[start : start + 10_007]


def numbered(count: int) -> list[str]:
    return [f"{number:07d} {'.' * 90}\n" for number in range(count)]


async def mirror(state: StateFolder, lines: list[str]) -> PodLogs:
    logs = PodLogs(ApiServer(lines), state, lambda uid: JOB)  # type: ignore[arg-type]
    logs.note("u", JOB)
    await logs.fetch("u", 1, 0)
    for task in list(logs._tasks.values()):
        await task
    return logs


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_logs, "LOG_BYTES_MAX", BYTES_MAX)


async def test_of_a_long_log_the_newest_part_is_kept_at_its_place(tmp_path: Path, small: None) -> None:
    state, lines = StateFolder(tmp_path), numbered(20_000)
    await mirror(state, lines)
    file = JobLogs(state, "u").file(1, 0)
    assert file.stat().st_size == len("".join(lines)), "places of readers stay true"
    assert file.stat().st_blocks * 512 <= BYTES_MAX + 4096
    kept = page(file, 0)
    assert kept.text.splitlines(keepends=True) == lines[-kept.text.count("\n") :]
    assert len(kept.text) >= BYTES_MAX // 2
    assert (kept.offset + len(kept.text), kept.at_end) == (file.stat().st_size, True)
    assert page(file, kept.next_offset).text == ""


async def test_who_reads_along_goes_on_where_something_is_left(tmp_path: Path, small: None) -> None:
    state, lines = StateFolder(tmp_path), numbered(20_000)
    await mirror(state, lines[:1_000])
    follower = LogFollower(JobLogs(state, "u"), 1, 0)
    told = follower.lines(final=False)
    await mirror(state, lines)  # as an API that was started anew: what is there is not written twice
    while more := follower.lines(final=False):
        told += more
    texts = [f"{line.text}\n" for line in told]
    assert texts[:1_000] == lines[:1_000]
    assert texts[1_000:] == lines[1_000 - len(texts) :]


async def test_the_logs_of_a_job_go_with_it(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    logs = await mirror(state, numbered(3))
    for uid in ("a", "b"):
        state.worker(uid, 1, 0).mkdir(parents=True)
    logs.keep_only({"u", "a"})
    assert {folder.name for folder in state.jobs.iterdir()} == {"u", "a"}
    logs.remove("u")
    assert {folder.name for folder in state.jobs.iterdir()} == {"a"}
