"""More than one API on one database, and processes that are killed where it hurts, or replaced one after another."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.forked import ForkedProgram
from tests.integration.api.platform import document
from tests.integration.api.postgres import PostgresServer
from tests.polling import WAIT_SECONDS_MAX, eventually
from tests.ports import free_port

from muster.local.cluster import LocalCluster, VersionConflict
from muster.words.state_folder import StateFolder
from muster.words.status import Phase

KILLS, KILL_SECONDS = 3, 2.0  # each replica once, and on until a request and a stream were cut


@dataclass
class Replicas:
    """Some API processes on one database. `kill` ends one of them at once and starts it again; `replace` does what an
    upgrade does: nobody is sent there any more, then it is asked to end. `leaving` are those that nobody is sent to."""

    state: Path
    environment: dict[str, str]
    ports: list[int]
    processes: list[ForkedProgram] = field(default_factory=list)
    leaving: set[int] = field(default_factory=set)
    asked: Counter[int] = field(default_factory=Counter)  # requests that are under way at each
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, port: int) -> ForkedProgram:
        words: list[str | Path] = ["--state", self.state, "--port", str(port), "--no-auth"]
        return ForkedProgram("muster.api", words, self.state.parent / f"api-{port}.log", self.environment)

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self.ports[number % len(self.ports)]}/api/v1"

    @contextlib.contextmanager
    def chosen(self, number: int) -> Iterator[str]:
        """The address of that replica, or of the next that takes new requests."""
        with self.lock:
            count = len(self.ports)
            number = next(each % count for each in range(number, number + count) if each % count not in self.leaving)
            self.asked[number] += 1
        try:
            yield self.url(number)
        finally:
            with self.lock:
                self.asked[number] -= 1

    def kill(self, number: int) -> None:
        self.processes[number].send_signal(signal.SIGKILL)
        self.processes[number].wait()
        self.processes[number] = self.start(self.ports[number])

    def replace(self, number: int) -> None:
        with self.lock:
            self.leaving.add(number)
        eventually(lambda: not self.asked[number], "the end of what it was asked")
        self.processes[number].send_signal(signal.SIGTERM)
        assert self.processes[number].wait(WAIT_SECONDS_MAX) == 0
        self.processes[number] = self.start(self.ports[number])
        eventually(lambda: self.answers(number), "the new one", 300.0)
        with self.lock:
            self.leaving.discard(number)

    def answers(self, number: int) -> bool:
        """Raises RuntimeError with its last words where it has ended, for then it never will."""
        if (code := self.processes[number].poll()) is not None:
            log = self.state.parent / f"api-{self.ports[number]}.log"
            raise RuntimeError(f"replica {number} ended with {code}:\n{log.read_text()[-2_000:]}")
        try:
            return httpx2.get(self.url(number).replace("/api/v1", "/readyz")).status_code == 200
        except httpx2.TransportError:
            return False


@contextlib.contextmanager
def replicas(state: Path, database: str, count: int = 3, **settings: str) -> Iterator[Replicas]:
    environment = {**os.environ, "MUSTER_API_DATABASE_URL": database, **settings}
    there = Replicas(state, environment, [free_port() for _ in range(count)])
    state.mkdir()
    try:
        for port in there.ports:
            there.processes.append(there.start(port))
        eventually(lambda: all(map(there.answers, range(count))), "the replicas", 180.0)
        yield there
    finally:
        for process in there.processes:
            process.kill()
            process.wait()


class Load:
    """Clients that submit, an operator that moves jobs on, and readers that follow their events, each anywhere."""

    def __init__(self, there: Replicas) -> None:
        self.there = there
        self.ids: dict[str, str] = {}
        self.heard: dict[str, list[int]] = {}
        self.reconnects = 0
        self.dropped = 0
        self.stop = threading.Event()
        self.faults: list[str] = []

    def submit(self, client: int) -> None:
        for number in itertools.count():
            if self.stop.is_set():
                return
            name, key = f"job-{client}-{number}", str(uuid.uuid4())
            made = self.answered("POST", "/jobs", json=document(name), headers={"Idempotency-Key": key})
            self.ids[name] = made["id"]
            if self.answered("GET", f"/jobs/{made['id']}")["metadata"]["name"] != name:
                self.faults.append(f"{made['id']} is another job at another replica")
            if number % 5 == 0:
                threading.Thread(target=self.follow, args=(self.ids[name],), daemon=True).start()
            time.sleep(0.3)  # not a wait: the pace of the load

    def answered(self, method: str, path: str, **request: Any) -> dict[str, Any]:
        """The answer of whichever replica gives one. `dropped` counts the tries without."""
        for attempt in itertools.count(random.randrange(3)):
            with contextlib.suppress(httpx2.TransportError), self.there.chosen(attempt) as url:
                reply = httpx2.request(method, f"{url}{path}", **request)
                if reply.is_success:
                    answer: dict[str, Any] = reply.json()
                    return answer
                if reply.status_code != 503 or "retry-after" not in reply.headers:
                    self.faults.append(reply.text)
            self.dropped += 1
            time.sleep(0.02)  # not a wait: a client pauses before it tries another replica
        raise AssertionError("unreachable")

    def operate(self) -> None:
        """Each job runs, and ends with the next look."""
        cluster = LocalCluster(StateFolder(self.there.state).cluster)
        following = {Phase.QUEUED: Phase.RUNNING, Phase.RUNNING: Phase.SUCCEEDED}
        while not self.stop.is_set() or any(job.status.phase in following for job in cluster.jobs()):
            for job in cluster.jobs():
                if (phase := following.get(job.status.phase)) is not None:
                    told = {"phase": phase, "code": "Test", "because": str(phase), "since": time.time()}
                    with contextlib.suppress(VersionConflict):
                        status = job.status.model_copy(update=told)
                        cluster.write_status(job.metadata.uid, status, job.metadata.resource_version)
            time.sleep(0.5)  # not a wait: how often the operator looks

    def follow(self, uid: str) -> None:
        """All events of a job, over streams that are cut: each goes on at another replica after the last id."""
        seen = self.heard[uid] = []
        for replica in itertools.count(random.randrange(3)):
            headers = {"Last-Event-ID": str(seen[-1])} if seen else {}
            params = {"follow": "true"}
            try:
                url = f"{self.there.url(replica)}/jobs/{uid}/events"
                with httpx2.stream("GET", url, params=params, headers=headers) as reply:
                    if reply.status_code == 204:
                        seen.append(-1)
                        return
                    if _followed(reply.iter_lines(), seen):
                        seen.append(-1)
                        return
            except httpx2.TransportError:
                self.reconnects += 1
                time.sleep(0.05)  # not a wait: a reader pauses before it connects again


@contextlib.contextmanager
def under_load(there: Replicas) -> Iterator[Load]:
    """Three clients and an operator until the end of the block; then until every job has ended."""
    load = Load(there)
    threads = [threading.Thread(target=load.submit, args=(client,)) for client in range(3)]
    operator = threading.Thread(target=load.operate)
    for thread in (*threads, operator):
        thread.start()
    try:
        yield load
    finally:
        load.stop.set()
        for thread in threads:
            thread.join(WAIT_SECONDS_MAX)
    operator.join(2 * WAIT_SECONDS_MAX)


def _followed(lines: Iterator[str], seen: list[int]) -> bool:
    """Add the ids of the stream's events; whether it came to the job's end."""
    frame: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if line:
            frame[name] = value
            continue
        if frame.get("event") == "end":
            return True
        if "id" in frame:
            seen.append(int(frame["id"]))
        frame = {}
    return False


@pytest.mark.long
@pytest.mark.timeout(1_200)
@pytest.mark.postgres
def test_three_replicas_of_which_one_after_the_other_is_killed_lose_and_double_nothing(
    tmp_path: Path, postgres: PostgresServer, migrated: str
) -> None:
    url = postgres.url(postgres.new_database(migrated))
    # None of its requests is to be refused because a busy machine keeps the database from answering for a while.
    patient = {"MUSTER_API_DATABASE_TIMEOUT_SECONDS": str(WAIT_SECONDS_MAX)}
    with replicas(tmp_path / "state", url, **patient) as there:
        with under_load(there) as load:
            for kill in itertools.count():
                if kill >= KILLS and load.dropped and load.reconnects:
                    break
                before = len(load.ids)
                time.sleep(KILL_SECONDS)  # not a wait: how often one is killed
                # A machine that starts them more slowly gets them killed more slowly, and under load all the same.
                eventually(lambda kill=kill: there.answers(kill % 3), "its return", 300.0)
                eventually(lambda before=before: len(load.ids) > before, "one more job", 300.0)
                there.kill(kill % 3)
            eventually(lambda: all(map(there.answers, range(3))), "all three", 300.0)
            killed = load.dropped
            for number in range(3):
                there.replace(number)
            assert load.dropped == killed, "a request was dropped while replicas were replaced one after another"
        assert_nothing_lost_or_doubled(there, load)


def assert_nothing_lost_or_doubled(there: Replicas, load: Load) -> None:
    """Every job that was answered is there once, has every event once, and every stream told them all."""
    assert load.faults == []
    url = there.url(0)
    listed = [job for page in _pages(url) for job in page]
    assert {job["name"]: job["id"] for job in listed} == load.ids
    assert len(listed) == len(load.ids)
    told = {uid: _numbers(url, uid) for uid in load.ids.values()}
    eventually(lambda: all(seen and seen[-1] == -1 for seen in load.heard.values()), "the end of all streams")
    for uid, (numbers, types) in told.items():
        assert numbers == list(range(1, len(numbers) + 1)), uid
        assert (types.count("job.created"), types.count("job.succeeded")) == (1, 1), types
    for uid, seen in load.heard.items():
        assert seen[:-1] == told[uid][0], "a stream lost or repeated an event"


def _numbers(url: str, uid: str) -> tuple[list[int], list[str]]:
    def ended() -> list[dict[str, Any]]:
        items = list(httpx2.get(f"{url}/jobs/{uid}/events").json()["items"])
        return items if any(item["type"] == "job.succeeded" for item in items) else []

    items = eventually(ended, f"the end of {uid}")
    return [item["id"] for item in items], [item["type"] for item in items]


def _pages(url: str) -> Iterator[list[dict[str, Any]]]:
    cursor: dict[str, str] = {}
    while True:
        page = httpx2.get(f"{url}/jobs", params={"limit": 500, **cursor}).json()
        yield page["items"]
        if page["nextCursor"] is None:
            return
        cursor = {"cursor": page["nextCursor"]}
