"""Logs of workers in a cluster, mirrored into the state folder, where the API reads logs and steps of all jobs.

Worker 0 of each gang is followed as long as it lives, because its output also holds the step records. Other workers are
followed once somebody asks for their logs. For a worker that failed before that, the tail in the job's status is kept.
Of a long log the newest part is kept, and nothing of a job that is gone from the cluster.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import structlog

from muster.kube import paths
from muster.kube.client import ApiClient, Object
from muster.kube.errors import ApiError
from muster.words.names import LOG, STEP_LOG, WorkerId, worker_name
from muster.words.state_folder import StateFolder

log = structlog.get_logger("muster.api.kubernetes")

CONTAINER = "trainer"
RETRY_SECONDS = 1.0  # a container that does not run yet has no log
FETCH_SECONDS = 3.0  # how long a reader waits for the first words
LOG_BYTES_MAX = 64 << 20  # that a worker's log takes up; past it, the older half is given up
_LINE_BYTES_MAX = 1 << 20
_ALIVE = frozenset({"Starting", "Running", "Restarting", "Stopping"})
_STEP = b'"type":"step"'

Worker = tuple[str, int, int]  # job id, attempt, worker


class PodLogs:
    """Logs of pods, copied into the state folder. `find` gives a job's object as it was last seen."""

    def __init__(self, client: ApiClient, layout: StateFolder, find: Callable[[str], Object | None]) -> None:
        self._client, self._layout, self._find = client, layout, find
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._heard: dict[Worker, asyncio.Event] = {}

    def note(self, uid: str, item: Object) -> None:
        """Handle a change of the job: follow its worker 0, and keep the tail of a failed one."""
        status = item.get("status") or {}
        attempt = int(status.get("attempt") or 0)
        if attempt and status.get("phase") in _ALIVE:
            for worker in range(int((status.get("gang") or {}).get("wanted") or 0)):
                self._layout.worker(uid, attempt, worker).mkdir(parents=True, exist_ok=True)
            self._follow((uid, attempt, 0))
        self._keep_tail(uid, status.get("lastFailure") or {})

    async def fetch(self, uid: str, attempt: int | None, worker: int | None) -> None:
        """Follow what is asked for, and give the first words a moment to come.

        `attempt` is None for the current one, and `worker` is None for all of them.
        """
        item = self._find(uid)
        status = (item or {}).get("status") or {}
        current = int(status.get("attempt") or 0)
        if item is None or not current or status.get("phase") not in _ALIVE or (attempt or current) != current:
            return
        size = int((status.get("gang") or {}).get("wanted") or 0)
        asked = [(uid, current, each) for each in (range(size) if worker is None else [worker]) if each < size]
        for key in asked:
            self._follow(key)
        waits = [event.wait() for key in asked if (event := self._heard.get(key)) is not None]
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                await asyncio.gather(*waits)
        except TimeoutError:
            pass  # then there is nothing to read yet

    def remove(self, uid: str) -> None:
        """The job is gone from the cluster, and its workers with it."""
        for key in [key for key in self._heard if key[0] == uid and key not in self._tasks]:
            del self._heard[key]
        shutil.rmtree(self._layout.jobs / uid, ignore_errors=True)

    def keep_only(self, uids: set[str]) -> None:
        """Remove the logs of all other jobs: these are all that exist, and others were deleted while nobody watched."""
        there = self._layout.jobs.iterdir() if self._layout.jobs.is_dir() else ()
        for uid in {folder.name for folder in there} - uids:
            self.remove(uid)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _follow(self, key: Worker) -> None:
        if key not in self._heard:
            self._heard[key] = asyncio.Event()
            task = self._tasks[key] = asyncio.create_task(self._mirror(key), name=f"log {key}")
            task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _mirror(self, key: Worker) -> None:
        """Mirror the log until the container has ended, or nobody will see it again."""
        try:
            while (path := self._path(key)) is not None:
                try:
                    copy = _LogCopy(self._layout.worker(*key), steps=key[2] == 0)
                    async for piece in self._client.stream(path, container=CONTAINER, follow="true"):
                        copy.add(piece)
                        self._heard[key].set()
                    return
                except ApiError as error:
                    if error.status == 403:
                        log.warning("logs of pods can't be read: the role lacks `get pods/log`", error=str(error))
                        return
                except OSError as error:
                    log.info("a log's stream ended and is opened again", worker=key, error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._heard[key].set()
            if self._path(key) is None:
                self._heard.pop(key, None)

    def _path(self, key: Worker) -> str | None:
        """Return the path of the pod's log, or None when that attempt is over."""
        item = self._find(key[0])
        status = (item or {}).get("status") or {}
        if item is None or status.get("attempt") != key[1] or status.get("phase") not in _ALIVE:
            return None
        meta = item["metadata"]
        return f"{paths.core(meta['namespace'], 'pods', worker_name(meta['name'], WorkerId(key[1], key[2])))}/log"

    def _keep_tail(self, uid: str, failure: Object) -> None:
        tail, attempt, worker = failure.get("logTail"), failure.get("attempt"), failure.get("worker")
        if not tail or attempt is None or worker is None:
            return
        file = self._layout.worker(uid, attempt, worker) / LOG
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{tail.rstrip()}\n")


class _LogCopy:
    """A worker's log as a file, and of worker 0 its step records as another. What is there already is skipped: the API
    server always begins at the beginning.
    """

    def __init__(self, folder: Path, steps: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log, self._steps = folder / LOG, folder / STEP_LOG if steps else None
        self._skip = self._size = self._log.stat().st_size if self._log.exists() else 0
        self._kept_from = 0  # where this file may begin to hold something, in bytes of the whole log
        self._rest = self._last_line()

    def add(self, piece: bytes) -> None:
        fresh = piece[self._skip :]
        self._skip = max(0, self._skip - len(piece))
        if not fresh:
            return
        with self._log.open("ab") as file:
            file.write(fresh)
        self._size += len(fresh)
        if self._size - self._kept_from > LOG_BYTES_MAX:
            self._give_up_older_half()
        if self._steps is None:
            return
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        records = [line + b"\n" for line in lines if line.startswith(b"{") and _STEP in line]
        if records:
            with self._steps.open("ab") as file:
                file.writelines(records)

    def _last_line(self) -> bytes:
        """Return the last line, as far as it has been written."""
        if not self._size:
            return b""
        with self._log.open("rb") as file:
            file.seek(max(0, self._size - _LINE_BYTES_MAX))
            return file.read().rpartition(b"\n")[2]

    def _give_up_older_half(self) -> None:
        """The file gets a hole in its place, which takes up nothing: readers know their places by bytes of the whole
        log.
        """
        shorter = self._log.with_name(f".{LOG}")
        with self._log.open("rb") as old, shorter.open("wb") as new:
            old.seek(self._size - LOG_BYTES_MAX // 2)
            old.readline()
            self._kept_from = new.seek(old.tell())
            shutil.copyfileobj(old, new)
        os.replace(shorter, self._log)
