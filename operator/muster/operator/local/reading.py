"""Reader of workers' reports. Partial files, garbage and reports of other attempts are ignored."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from muster.local.processes import is_stopped
from muster.operator.local.processes import WorkerKey
from muster.operator.redaction import redact
from muster.storage.small_files import open_regular, open_to_append, read_regular, write_whole
from muster.words.base import dump_json
from muster.words.names import EXIT_RECORD, LOG, ExitCode, heartbeat_rank
from muster.words.signals import Heartbeat, WorkerExit
from muster.words.state_folder import StateFolder

LOG_TAIL_BYTES = 4_096
KILLED = 137  # 128 + SIGKILL
# What a process of the same user can bring about by kill(2) or prlimit(2), and a job's own code hardly does to itself.
FOREIGN_SIGNALS = (signal.SIGKILL, signal.SIGXCPU)
SILENCE_SECONDS = 2.0  # a heartbeat older than two of its periods makes us look at the process behind it
PORT_TAKEN = ("EADDRINUSE", "Address already in use")


@dataclass(frozen=True, slots=True)
class _HeartbeatFile:
    """One heartbeat file as it was last read."""

    stamp: tuple[int, int, int]
    """Differs once the file was replaced."""
    beat: Heartbeat | None
    progress: tuple[str, int]
    """The phase and step of the heartbeat."""
    age: float
    """Seconds since the last progress, at the monotonic moment `age_seen_at`."""
    age_seen_at: float
    silence: float
    """Seconds since the heartbeat was written, at the monotonic moment `silence_seen_at`."""
    silence_seen_at: float


class HeartbeatReader:
    """Reader of rank-*.json of any worker; a file is parsed again only when it was replaced.

    The ages of a heartbeat and of the progress in it are measured by this process's monotonic clock, so that a jump of
    the wall clock neither makes a stall nor hides one. `now` and `monotonic` are the two clocks, in seconds.
    """

    def __init__(
        self, state: StateFolder, now: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._state = state
        self._now, self._monotonic = now, monotonic
        self._beat_files: dict[WorkerKey, dict[str, _HeartbeatFile]] = {}

    def read(self, key: WorkerKey) -> tuple[Heartbeat, ...]:
        """The newest readable heartbeat of each rank, in rank order, its `at` and `progressed_at` as seen from here."""
        by_name = self._beat_files.setdefault(key, {})
        for name, stamp in _heartbeat_files(key.folder(self._state)):
            previous = by_name.get(name)
            if previous is None or previous.stamp != stamp:
                by_name[name] = self._parse(key, name, stamp, previous)
        beats = [self._aged(read) for read in list(by_name.values()) if read.beat]
        return tuple(sorted((beat for beat in beats if beat), key=lambda beat: beat.rank))

    def now(self) -> float:
        """Clock of the heartbeats' times."""
        return self._now()

    def forget(self, key: WorkerKey) -> None:
        self._beat_files.pop(key, None)

    def _parse(
        self, key: WorkerKey, name: str, stamp: tuple[int, int, int], previous: _HeartbeatFile | None
    ) -> _HeartbeatFile:
        try:
            beat = Heartbeat.model_validate_json(read_regular(key.folder(self._state) / name))
        except (OSError, ValidationError):
            beat = None
        theirs = (beat.attempt, beat.incarnation, beat.rank) if beat is not None else None
        if beat is None or theirs != (key.attempt, key.incarnation, heartbeat_rank(name)):
            nothing = _HeartbeatFile(stamp, None, ("", -1), 0.0, 0.0, 0.0, 0.0)
            return replace(previous, stamp=stamp) if previous else nothing
        progress, seen_at = (str(beat.phase), beat.step), self._monotonic()
        if previous and previous.progress == progress:
            return replace(previous, stamp=stamp, beat=beat, silence=0.0, silence_seen_at=seen_at)
        # At first sight the rank is believed, later it was written since the last look.
        silence = 0.0 if previous else max(0.0, self._now() - beat.at)
        age = max(0.0, beat.at - beat.progressed_at) + silence
        return _HeartbeatFile(stamp, beat, progress, age, seen_at, silence, seen_at)

    def _aged(self, read: _HeartbeatFile) -> Heartbeat | None:
        if read.beat is None:
            return None
        now, ticks = self._now(), self._monotonic()
        silence = read.silence + ticks - read.silence_seen_at
        at, progressed_at = now - silence, now - read.age - (ticks - read.age_seen_at)
        stopped = silence > SILENCE_SECONDS and is_stopped(read.beat.pid)
        return read.beat.model_copy(update={"at": at, "progressed_at": min(at, progressed_at), "stopped": stopped})


def read_exit(state: StateFolder, key: WorkerKey) -> WorkerExit | None:
    """Return the launcher's exit record, if it is readable."""
    try:
        ended = WorkerExit.model_validate_json(read_regular(key.folder(state) / EXIT_RECORD))
    except (OSError, ValidationError):
        return None
    return ended


def exit_without_record(state: StateFolder, key: WorkerKey, exit_code: int | None, write: bool) -> WorkerExit:
    """Return the exit of a worker whose launcher is gone and left no record: it was killed, or its machine went down.

    Its exit code is known only where this process was its parent. With `write` the record is put down, so that every
    later reader sees the same.
    """
    tail = log_tail(key.folder(state) / LOG)
    end = f"exit code {exit_code}" if exit_code is not None else "its end was not seen; most likely it was killed"
    message = f"its processes are gone and left no exit record ({end})"
    if exit_code is not None and any(words in tail for words in PORT_TAKEN):
        exit_code = int(ExitCode.PREFLIGHT_FAILED)
        message = "another process took the port on which the workers were to meet; the next attempt gets another"
    number = exit_code - 128 if exit_code is not None and exit_code > 128 else None
    ended = WorkerExit(
        exit_code=KILLED if exit_code is None else exit_code,
        signal=number,
        # The kernel's memory killer takes the largest process, which a launcher never is.
        unexplained=number in FOREIGN_SIGNALS,
        at=time.time(),
        message=message,
        log_tail=tail,
    )
    if write:
        with contextlib.suppress(OSError):  # a full disk must not hide a death
            write_whole(key.folder(state) / EXIT_RECORD, dump_json(ended))
    return ended


def redacted_exit(ended: WorkerExit, environment: Mapping[str, str]) -> WorkerExit:
    """The exit as it may enter a status: no secret of the job's environment in it."""
    return ended.model_copy(
        update={
            "message": redact(ended.message, environment),
            "log_tail": redact(ended.log_tail, environment),
            "results": {redact(name, environment): value for name, value in ended.results.items()},
            "results_fault": redact(ended.results_fault, environment),
        }
    )


def note(state: StateFolder, key: WorkerKey, line: str) -> None:
    """Say something in the worker's own log, where its user looks."""
    folder = key.folder(state)
    folder.mkdir(parents=True, exist_ok=True)
    with os.fdopen(open_to_append(folder / LOG), "a") as log:
        log.write(f"{line}\n")


def log_tail(path: Path, size: int = LOG_TAIL_BYTES) -> str:
    """The last lines of a log, whole ones, at most `size` bytes."""
    try:
        with os.fdopen(open_regular(path), "rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(0, end - size))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if end > size and "\n" in text else text


def _heartbeat_files(folder: Path) -> list[tuple[str, tuple[int, int, int]]]:
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, _stamp(entry)) for entry in entries if _is_heartbeat(entry.name)]
    except OSError:
        return []


def _is_heartbeat(name: str) -> bool:
    return heartbeat_rank(name) is not None


def _stamp(entry: os.DirEntry[str]) -> tuple[int, int, int]:
    stat = entry.stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
