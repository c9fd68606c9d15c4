"""Processing of a file after its last byte has arrived: it is stored by its content's hash and checked.

The row says how far the processing is, so that another process can continue after one that was killed at any point: the
reference to the bytes is written before they are moved, and the status last.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
from sqlalchemy import select

from muster.api.core.background import BackgroundWork
from muster.api.core.clock import clock, now_in
from muster.api.core.database.db import Database
from muster.api.core.database.tables import FileRow, ProjectRow
from muster.api.core.errors import ApiError
from muster.api.core.limits import ProjectLimits
from muster.api.data.files import repository
from muster.api.data.files.staging import UploadStaging
from muster.api.data.tool import run_module
from muster.replies.files import FileStatus, Purpose
from muster.storage.contents import UploadedContents
from muster.storage.data_check import MEMORY_BYTES_MAX, CheckedContents
from muster.storage.errors import StorageError
from muster.words.address import StorageAddress

log = structlog.get_logger("muster.api.files")

AT_ONCE = 2  # files that are read through; each takes a core
# The processor's time that a check may take. Data is read at 5 to 50 MB/s, compressed data as fast by what it grows to.
# Half of it would refuse honest files on slow machines; all of it, for a small file, is what a hostile one can take.
CPU_SECONDS_FREE = 60.0
BYTES_PER_CPU_SECOND = 500_000
CHECKER = "muster.storage.data_check"
ARRIVAL_SECONDS = 5.0  # between looks for files that another process left
RETRY_SECONDS = 30.0
ELSEWHERE_SECONDS = 2 * 24 * 3600.0  # that an upload may lie on another replica's disk
FAULT_LENGTH_MAX = 1_000
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class _FileSender:
    """Person who sent a file, and the project that has it. The checks are shared out between persons, and then between
    projects: one person may have many."""

    person: str
    project: str


@dataclass
class _FileIntake:
    """A file that is being taken in. Its check may be broken off at any time, for another does it anew."""

    sender: _FileSender
    task: asyncio.Task[None]
    in_check: bool = False


class FileArrivals:
    """Takes the files in that have arrived, a few at a time, each in a task of its own: a small one does not wait for a
    large one.

    Senders take turns: the next file is the oldest of the person and the project that have the fewest under way, and
    whose turns are longest ago. It takes the place of the youngest check that would come after it if both waited.
    """

    def __init__(self, database: Database, staging: UploadStaging, contents: UploadedContents) -> None:
        self._database, self._staging, self._contents = database, staging, contents
        self._taking: dict[str, _FileIntake] = {}
        self._turns: Counter[tuple[str, str]] = Counter()  # when a person or project was last served: a count, no time
        self._not_before: dict[str, float] = {}
        self.work = BackgroundWork("files", self.step, ARRIVAL_SECONDS)

    async def step(self) -> bool:
        """Start processing what waits, as far as there is room; False, because each file that ends calls for the next
        round."""
        self._taking = {file_id: taking for file_id, taking in self._taking.items() if not taking.task.done()}
        async with self._database.read() as session:
            columns = select(FileRow.id, FileRow.owner, FileRow.project)
            query = columns.where(FileRow.status == FileStatus.CHECKING).order_by(FileRow.seq)
            arrived = {row.id: _FileSender(row.owner, row.project) for row in await session.execute(query)}
        for own, taking in self._taking.items():
            if own not in arrived:  # it was deleted, here or by another process
                self._break_off(taking)
        now = time.monotonic()
        self._not_before = {one: at for one, at in self._not_before.items() if one in arrived and at > now}
        waiting = {one: sender for one, sender in arrived.items() if one not in {*self._taking, *self._not_before}}
        while waiting and (following := self._next(waiting)) is not None:
            self._begin(following, waiting.pop(following))
        return False

    def _next(self, waiting: dict[str, _FileSender]) -> str | None:
        """The file to begin with now; None where there is no room yet."""
        following = min(waiting, key=lambda each: self._rank(waiting[each]))
        if len(self._taking) < AT_ONCE:
            return following
        for own, taking in reversed(self._taking.items()):
            # Strictly before it, or two files would break each other off for ever.
            if taking.in_check and self._rank(waiting[following], own)[:2] < self._rank(taking.sender, own)[:2]:
                self._break_off(taking)  # when it has ended, this is looked at anew
                break
        return None

    def _rank(self, sender: _FileSender, without: str = "") -> tuple[int, int, int, int]:
        """The place of a sender's file among those that wait, the least first, as if the file `without` waited too."""
        others = [taking.sender for own, taking in self._taking.items() if own != without]
        return (
            sum(other.person == sender.person for other in others),
            sum(other.project == sender.project for other in others),
            self._turns["person", sender.person],
            self._turns["project", sender.project],
        )

    def _begin(self, file_id: str, sender: _FileSender) -> None:
        turn = max(self._turns.values(), default=0) + 1
        self._turns["person", sender.person] = self._turns["project", sender.project] = turn
        taking = _FileIntake(sender, asyncio.create_task(self._take_in(file_id)))
        taking.task.add_done_callback(lambda _: self.work.wake.set())
        self._taking[file_id] = taking

    def _break_off(self, taking: _FileIntake) -> None:
        if taking.in_check:
            taking.task.cancel()

    async def stop(self) -> None:
        """End what is under way; another process, or this one when it starts again, does it anew."""
        for taking in self._taking.values():
            taking.task.cancel()
        await asyncio.gather(*(taking.task for taking in self._taking.values()), return_exceptions=True)

    async def _take_in(self, file_id: str) -> None:
        try:
            async with self._database.read() as session:
                row = await repository.get(session, file_id)
            if row is not None and row.status == FileStatus.CHECKING:
                await self._put_away(row)
        except (ApiError, StorageError, OSError) as error:  # the world's fault: it will be done later
            self._not_before[file_id] = time.monotonic() + RETRY_SECONDS
            log.warning("a file waits to be taken in", file=file_id, cause=str(error)[:500])

    async def _put_away(self, row: FileRow) -> None:
        if row.key is None:
            if not self._staging.path(row.id).exists():
                await self._give_up_what_is_gone(row)
                return
            digest = self._staging.digest(row.id) or await asyncio.to_thread(self._staging.read_digest, row.id)
            if row.sha256 not in (None, digest):
                fault = f"what arrived has the SHA-256 {digest}, and {row.sha256} was announced; upload it again"
                await self._finish(row, FileStatus.FAILED, fault=fault)
                self._staging.remove(row.id)
                return
            row.key, row.sha256 = self._contents.key(row.project, str(digest), row.name), str(digest)
            await self._refer(row)
        key = row.key
        if not await asyncio.to_thread(self._contents.has, key):
            if not self._staging.path(row.id).exists():
                await self._give_up_what_is_gone(row)
                return
            own_key = await self._kms_key_of(row.project)
            await asyncio.to_thread(self._contents.put, key, self._staging.path(row.id), own_key)
        self._staging.remove(row.id)
        checked = await self._check(row, key) if Purpose(row.purpose).is_data else None
        fault = checked.fault if checked is not None else ""
        await self._finish(row, FileStatus.FAILED if fault else FileStatus.READY, checked, fault)

    async def _give_up_what_is_gone(self, row: FileRow) -> None:
        """Give up uploads whose bytes are not here: they are on another replica's disk, and after a while they went
        with it."""
        async with self._database.read() as session:
            waited = await clock(session) - row.created_at
        if waited > ELSEWHERE_SECONDS:
            gone = "its bytes are gone from the folder of uploads; upload it again"
            await self._finish(row, FileStatus.FAILED, fault=gone)

    async def _kms_key_of(self, project: str) -> str | None:
        """The key that the project's limits name, which its commits are encrypted by, too."""
        async with self._database.read() as session:
            row = await session.get(ProjectRow, project)
        return ProjectLimits.model_validate(row.limits).kms_key_id if row is not None else None

    async def _refer(self, row: FileRow) -> None:
        """Write the reference to the bytes. From here on nobody deletes them, whether they exist already or arrive
        now."""
        async with self._database.write() as session:
            await repository.lock_project(session, row.project)
            now = await repository.get(session, row.id, lock=True)
            if now is None:
                raise ApiError("file_not_found", f"{row.id} was deleted while it was taken in.")
            now.key, now.sha256 = row.key, row.sha256

    async def _finish(
        self, row: FileRow, status: FileStatus, checked: CheckedContents | None = None, fault: str = ""
    ) -> None:
        async with self._database.write() as session:
            now = await repository.get(session, row.id, lock=True)
            if now is None:
                return
            now.status, now.fault = status, fault[:FAULT_LENGTH_MAX] or None
            now.checked = asdict(checked) if checked is not None else None
            if row.lifetime_seconds is not None:
                now.expires_at = await clock(session) + row.lifetime_seconds

    async def _check(self, row: FileRow, key: str) -> CheckedContents:
        """Check the file in a separate process, because somebody else sent its content."""
        seconds = CPU_SECONDS_FREE + row.bytes / BYTES_PER_CPU_SECOND
        limits = ("--memory-bytes", str(memory_of_a_check()), "--cpu-seconds", f"{seconds:g}")
        taking = self._taking[row.id]
        taking.in_check = True
        try:
            ended = await run_module(CHECKER, self._contents.address(key), "--name", row.name, *limits)
        finally:
            taking.in_check = False
        if ended.code == 0:
            return CheckedContents(**json.loads(ended.said))
        words = ended.complained.decode(errors="replace").strip()[-500:]
        if ended.code < 0:  # by the kernel, most likely for its memory or its time
            why = "most likely for the memory or the time that it took; split the file"
            return CheckedContents(
                fault=f"{row.name}: the process that read it was ended by signal {-ended.code}, {why}"
            )
        raise StorageError(f"{row.id} can't be read through: {words}")


def memory_of_a_check(limits: Sequence[Path] = CONTAINER_LIMITS) -> int:
    """A share of the container's memory that leaves the API itself two: where one process takes too much, Kubernetes
    ends all of them, and the next API would read the same file."""
    for path in limits:
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or "max"
            return min(MEMORY_BYTES_MAX, int(path.read_text()) // (AT_ONCE + 2))
    return MEMORY_BYTES_MAX


@dataclass(frozen=True)
class FilePlaces:
    """Places of files: uploads in progress, and stored contents, which is None where no place for them is
    configured."""

    staging: UploadStaging
    contents: UploadedContents | None
    arrivals: FileArrivals | None


def open_files(
    database: Database, uploads: Path, place: StorageAddress | None, bytes_max: int | None = None
) -> FilePlaces:
    staging = UploadStaging(uploads, bytes_max)
    if place is None:
        return FilePlaces(staging, None, None)
    contents = UploadedContents(place)
    return FilePlaces(staging, contents, FileArrivals(database, staging, contents))


async def drop_expired(database: Database, files: FilePlaces) -> list[str]:
    """Delete the files whose time is over, but for those that a live job reads; returns their ids. To be repeated."""
    if files.contents is None:
        return []
    async with database.read() as session:
        query = select(FileRow.id).where(FileRow.expires_at < now_in(session)).limit(100)
        over = list((await session.scalars(query)).all())
    gone = []
    for file_id in over:
        async with database.write() as session:
            row = await repository.get(session, file_id)
            if row is None or await repository.live_jobs(session, file_id):
                continue
            await repository.lock_project(session, row.project)
            await repository.drop(session, row, files.contents)
            gone.append(file_id)
        files.staging.remove(file_id)
    await _drop_left(database, files.staging)
    return gone


async def _drop_left(database: Database, staging: UploadStaging) -> None:
    """Remove the bytes on this machine's disk that are of no file: what a request left whose process was killed."""
    names = await asyncio.to_thread(lambda: set(staging.older(time.time() - ELSEWHERE_SECONDS)))
    if not names:
        return
    async with database.read() as session:
        names -= set((await session.scalars(select(FileRow.id).where(FileRow.id.in_(names)))).all())
    for name in names:
        staging.remove(name)
