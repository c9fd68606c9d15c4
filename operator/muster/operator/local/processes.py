"""Workers as process trees: started at most once, found again after the operator's own death, never mixed up.

Three things make "is it alive?" safe to answer. The environment that a worker starts with names its folder, so a scan
of all processes finds every member of its tree, however deep and in whatever session. The launcher inherits a locked
file, so not even an operator that died between fork and record is followed by one that starts the worker again. And a
recorded pid counts only while the process behind it still carries the marks, so a reused pid deceives nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import ValidationError

from muster.storage.small_files import open_to_append, read_regular, write_whole
from muster.words.base import Many, Record, dump_json
from muster.words.names import EXIT_RECORD, FIRST_INCARNATION, HEARTBEAT, LOG, Env, WorkerId
from muster.words.state_folder import StateFolder

RECORD = "worker.json"  # WorkerRecord, by whoever started the worker
CLAIM = "claim"  # locked by the launcher as long as it lives
NODE = "MUSTER_NODE"  # in the worker's environment, for a record that must be made up for
REMOVED = "removed"  # there when the worker was taken out of sight

_CLAIMING = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a job writes in its worker's folder

MARKS_SECONDS_MAX = 5.0


@dataclass(frozen=True, order=True)
class WorkerKey:
    """Identity of a worker on this machine: its job, attempt, number and incarnation."""

    job_uid: str
    attempt: int
    worker: int
    incarnation: int = FIRST_INCARNATION

    @classmethod
    def of(cls, job_uid: str, id: WorkerId) -> WorkerKey:
        return cls(job_uid, id.attempt, id.worker, id.incarnation)

    def folder(self, state: StateFolder) -> Path:
        return state.worker(self.job_uid, self.attempt, self.worker, self.incarnation)


class WorkerRecord(Record):
    """Process that was started as a worker."""

    job_uid: str
    attempt: int
    worker: int
    node: str
    pid: int
    create_time: float  # of the worker's launcher, as the kernel told it when it was started
    started_at: float
    command: Many[str]
    gpus: Many[int] = ()  # their indices on this machine
    incarnation: int = FIRST_INCARNATION

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(self.job_uid, self.attempt, self.worker, self.incarnation)


def start(
    state: StateFolder,
    key: WorkerKey,
    node: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    gpus: Sequence[int] = (),
) -> WorkerRecord | None:
    """Start the worker unless it had its one life already; a live one is adopted, never doubled.

    `environment` is the whole one, `marks` included. Returns the record of what was started; None when the worker was
    there already. Raises OSError when the folder can't be written or the command can't be started; then nothing runs.
    """
    folder = key.folder(state)
    folder.mkdir(parents=True, exist_ok=True)
    claim = os.open(folder / CLAIM, os.O_CREAT | _CLAIMING, 0o600)
    try:
        mine = _lock(claim)
        if (folder / REMOVED).exists() and mine:
            _remove_old_records(folder)
        if read_record(state, key) is not None or (folder / EXIT_RECORD).exists():
            return None
        if running := top_of(members(scan(state), key)):
            record_found(state, key, running)
            return None
        if not mine:
            raise BlockingIOError(f"{folder / CLAIM} is locked, but nothing carries the marks of {key} yet: ask again")
        with os.fdopen(open_to_append(folder / LOG), "ab") as log:
            process = subprocess.Popen(
                list(command),
                cwd=folder,
                env=dict(environment) | {NODE: node},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(claim,),
            )
        try:
            _await_marks(state, process.pid)
            record = _record(key, node, psutil.Process(process.pid), command, gpus)
            write_whole(folder / RECORD, dump_json(record))
        except BaseException:
            # Without a record it would only be found by scan; better none than one that half exists.
            kill_all(members(scan(state), key))
            process.kill()
            raise
        _children[process.pid] = process
        return record
    finally:
        os.close(claim)  # the launcher keeps its copy, and with it the lock


def marks(state: StateFolder, key: WorkerKey) -> dict[str, str]:
    """The environment by which `scan` knows a worker's processes."""
    return {
        Env.JOB_UID: key.job_uid,
        Env.ATTEMPT: str(key.attempt),
        Env.WORKER: str(key.worker),
        Env.INCARNATION: str(key.incarnation),
        Env.WORKER_DIR: str(key.folder(state)),
    }


@dataclass(frozen=True)
class WorkerProcess:
    """One live process of a worker's tree."""

    key: WorkerKey
    process: psutil.Process


def scan(state: StateFolder) -> tuple[WorkerProcess, ...]:
    """Every live process on this machine that carries the marks of a worker of this state folder."""
    members = []
    for pid in psutil.pids():
        if (key := marked(state, pid)) is not None:
            try:
                members.append(WorkerProcess(key, psutil.Process(pid)))
            except psutil.Error:
                continue  # gone meanwhile
    return tuple(members)


def members(candidates: Sequence[WorkerProcess], key: WorkerKey) -> list[psutil.Process]:
    return [member.process for member in candidates if member.key == key]


def top_of(tree: Sequence[psutil.Process]) -> psutil.Process | None:
    """The launcher of a worker's tree: the oldest member whose parent is none of them."""
    pids = {process.pid for process in tree}
    tops = [process for process in tree if _parent(process) not in pids]
    # By the clock, for numbers of processes begin anew after pid_max; of one tick of it the lower number was first.
    return min(tops, key=lambda process: (_began(process), process.pid), default=None)


def marked(state: StateFolder, pid: int) -> WorkerKey | None:
    """The worker that a live process belongs to; None for strangers, zombies and the dead."""
    environment = _environment(pid)
    folder = environment.get(Env.WORKER_DIR)
    if not folder or not Path(folder).is_relative_to(state.root) or _is_zombie(pid):
        return None
    try:
        key = WorkerKey(
            environment[Env.JOB_UID],
            int(environment[Env.ATTEMPT]),
            int(environment[Env.WORKER]),
            int(environment.get(Env.INCARNATION, FIRST_INCARNATION)),  # that an earlier release does not set
        )
    except (KeyError, ValueError):
        return None
    return key if str(key.folder(state)) == folder else None


def alive(state: StateFolder, record: WorkerRecord) -> bool:
    """Return whether the recorded launcher still runs.

    The marks decide. A process that overwrote its environment (setproctitle does) is known by its start time instead.
    """
    reap()
    if _is_zombie(record.pid):
        return False
    if marked(state, record.pid) == record.key:
        return True
    try:
        same_start = abs(psutil.Process(record.pid).create_time() - record.create_time) < 0.05
        return same_start and not _environment(record.pid).get(Env.WORKER_DIR)
    except psutil.Error:
        return False


def record_found(state: StateFolder, key: WorkerKey, launcher: psutil.Process) -> WorkerRecord | None:
    """The record of a launcher whose operator died between fork and record; None if it is gone."""
    try:
        environment, command = _environment(launcher.pid), launcher.cmdline()
        gpus = [int(gpu) for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu.isdigit()]
        record = _record(key, environment.get(NODE, ""), launcher, command, gpus)
    except psutil.Error:
        return None
    write_whole(key.folder(state) / RECORD, dump_json(record))
    return record


def mark_removed(state: StateFolder, key: WorkerKey) -> None:
    """Mark the worker as removed for later operators, if the disk allows; else they sweep once more."""
    with contextlib.suppress(OSError):
        os.close(open_to_append(key.folder(state) / REMOVED))


def read_record(state: StateFolder, key: WorkerKey) -> WorkerRecord | None:
    try:
        return WorkerRecord.model_validate_json(read_regular(key.folder(state) / RECORD))
    except (OSError, ValidationError):
        return None


def exists(state: StateFolder, key: WorkerKey) -> bool:
    """Return whether the worker runs or ran and was not removed. This check is cheap, so it is no proof of absence."""
    folder = key.folder(state)
    return ((folder / RECORD).exists() or (folder / EXIT_RECORD).exists()) and not (folder / REMOVED).exists()


def is_claimed(state: StateFolder, key: WorkerKey) -> bool:
    """Return whether a launcher holds the worker's claim: true from the fork on, even before its marks can be read."""
    try:
        claim = os.open(key.folder(state) / CLAIM, _CLAIMING)
    except OSError:
        return False
    try:
        return not _lock(claim)
    finally:
        os.close(claim)


def reap() -> None:
    """Collect own children that have ended, so that they don't stay zombies; remembers how they ended."""
    for pid, child in list(_children.items()):
        if child.poll() is not None:
            _ended[pid] = child.returncode
            _children.pop(pid, None)


def exit_code_of(pid: int) -> int | None:
    """Return the exit code as a shell would show it (128 + signal); None for a process that another operator
    started."""
    reap()
    code = _ended.get(pid)
    return code if code is None or code >= 0 else 128 - code


def is_running(process: psutil.Process) -> bool:
    """Return whether that very process still runs; a zombie does not."""
    reap()
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Send SIGKILL to each that is still the process it was (psutil checks the start time first)."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


# Launchers that this process started and has not collected yet, and how the collected ones ended.
_children: dict[int, subprocess.Popen[bytes]] = {}
_ended: dict[int, int] = {}


def _record(
    key: WorkerKey, node: str, process: psutil.Process, command: Sequence[str], gpus: Sequence[int]
) -> WorkerRecord:
    return WorkerRecord(
        job_uid=key.job_uid,
        attempt=key.attempt,
        worker=key.worker,
        incarnation=key.incarnation,
        node=node,
        pid=process.pid,
        create_time=process.create_time(),
        started_at=time.time(),
        command=tuple(command),
        gpus=tuple(gpus),
    )


def _remove_old_records(folder: Path) -> None:
    """A worker that was removed may be made again in the same attempt; only its log is one."""
    for path in [folder / RECORD, folder / EXIT_RECORD, *folder.glob(HEARTBEAT.format(rank="*")), folder / REMOVED]:
        path.unlink(missing_ok=True)


def _await_marks(state: StateFolder, pid: int) -> None:
    """Return when the marks can be read, or the process has ended. Popen returns a moment before exec is through."""
    deadline = time.monotonic() + MARKS_SECONDS_MAX
    while marked(state, pid) is None and not _is_zombie(pid) and time.monotonic() < deadline:
        time.sleep(0.001)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _environment(pid: int) -> dict[str, str]:
    """Return the process's environment; empty where it may not be read. /proc directly: five times psutil's speed."""
    if sys.platform != "linux":
        try:
            return psutil.Process(pid).environ()
        except psutil.Error:
            return {}
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    if Env.WORKER_DIR.encode() not in raw:
        return {}
    return dict(_pairs(raw))


def _pairs(raw: bytes) -> Iterator[tuple[str, str]]:
    for entry in raw.decode(errors="surrogateescape").split("\0"):
        name, sign, value = entry.partition("=")
        if sign:
            yield name, value


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.Error:
        return None


def _began(process: psutil.Process) -> float:
    """Return when it began, in seconds since 1970; infinity for one that is gone."""
    try:
        return process.create_time()
    except psutil.Error:
        return float("inf")


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True
