"""Choice of the rank whose end explains a worker's end. The judgement is pure; only `read_end` and `log_tail` look at
files."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from muster.local.processes import is_stopped
from muster.words.hangs import LIMIT_SECONDS, STANDING_SHARE, WAITS_FOR_DATA
from muster.words.names import HEARTBEAT, LOG, RANK_FAILURE, ExitCode
from muster.words.signals import Heartbeat, RankFailure, TrainerPhase, WorkerExit
from muster.worker.ranks import signal_name

TAIL_BYTES = 16_384
TAIL_LINES = 40
FRESH_SECONDS = 5.0
_STOPPED = (ExitCode.PREEMPTED_COMMITTED, ExitCode.PREEMPTED_NO_COMMIT)


@dataclass(frozen=True)
class RankEnd:
    """End of one rank."""

    rank: int
    exit_code: int  # as the system reports it, negative for a signal
    at: float
    step: int | None = None
    message: str = ""  # what the rank said of itself, if it did


def worker_exit(ends: list[RankEnd], stop_wanted: bool, shutdown_seconds: float) -> WorkerExit:
    """The end of a worker whose ranks ended so (only those that did not end well)."""
    end = root(ends, stop_wanted, shutdown_seconds)
    killed_by = -end.exit_code if end.exit_code < 0 else None
    code = 128 + killed_by if killed_by else end.exit_code
    message = end.message
    if killed_by == signal.SIGTERM and stop_wanted:
        code, message = (
            int(ExitCode.PREEMPTED_NO_COMMIT),
            f"rank {end.rank} was asked to stop while it was still starting",
        )
    elif killed_by:
        message = f"rank {end.rank} was killed by {signal_name(killed_by)}"
    elif code in _STOPPED:
        message = message or f"all ranks stopped as requested{', with a checkpoint' if code == _STOPPED[0] else ''}"
    elif not message:
        message = f"rank {end.rank} ended with exit code {code}, and did not say why; see its log"
    return WorkerExit(exit_code=code, at=time.time(), rank=end.rank, signal=killed_by, step=end.step, message=message)


def oom_kills() -> int | None:
    """Return the number of processes that the kernel has killed for lack of memory; None where that is unknown."""
    try:
        with open("/proc/vmstat") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), None)
    except OSError:
        return None


def is_unexplained(end: WorkerExit, oom_kills_before: int | None, oom_kills_now: int | None) -> bool:
    """Return whether the worker was ended by a signal of unknown origin: on a shared machine another process of its
    user can send one, directly or by a limit of processor time. A worker that the launcher itself killed never comes
    here.
    """
    foreign = end.signal in (signal.SIGKILL, signal.SIGXCPU)
    return foreign and oom_kills_before is not None and oom_kills_before == oom_kills_now


def root(ends: list[RankEnd], stop_wanted: bool, shutdown_seconds: float) -> RankEnd:
    """The end that the others followed from: a reason of its own before a lost peer before the launcher's cleaning up;
    among equals the earliest."""
    first = min(end.at for end in ends)

    def order(end: RankEnd) -> tuple[int, float]:
        cleaned_up = end.exit_code == -signal.SIGKILL and end.at > first + shutdown_seconds - 1
        stopped = end.exit_code in (*_STOPPED, -signal.SIGTERM)
        if end.exit_code == ExitCode.PEER_LOST:
            return (4, end.at)
        if stopped and stop_wanted:
            # The COMMIT exists as soon as one rank knows of it.
            return (1 if end.exit_code == ExitCode.PREEMPTED_COMMITTED else 2, end.at)
        if stopped or cleaned_up:
            return (5, end.at)
        return (0, end.at)

    return min(ends, key=order)


def read_end(directory: Path, rank: int, exit_code: int, at: float, since: float) -> RankEnd:
    """Return the facts known about a rank that ended. Files older than `since` are another attempt's."""
    failure = _read(directory / RANK_FAILURE.format(rank=rank), RankFailure)
    if isinstance(failure, RankFailure) and failure.at >= since and failure.exit_code == exit_code:
        return RankEnd(rank, exit_code, failure.at, failure.step, failure.message)
    beat = _read(directory / HEARTBEAT.format(rank=rank), Heartbeat)
    step = beat.step if isinstance(beat, Heartbeat) and beat.at >= since else None
    return RankEnd(rank, exit_code, at, step)


@dataclass(frozen=True)
class HungRank:
    """A rank that does not come to its next step."""

    rank: int
    pid: int
    stopped: bool  # it is held by job control, so that it can't even tell where it stands
    words: str  # where it stands, for people


def hung_ranks(directory: Path, since: float) -> list[HungRank]:
    """All of this worker's ranks if one of them is held, or none has moved for long. Ranks of which only old heartbeats
    are there may well be moving: their disk may have paused.
    """
    hung, any_stopped, idle_ranks, moving = [], False, 0, False
    for path in sorted(directory.glob(HEARTBEAT.format(rank="*"))):
        beat = _read(path, Heartbeat) if path.name.count(".") == 1 else None
        if not isinstance(beat, Heartbeat) or beat.at < since:
            continue
        idle, fresh = beat.at - beat.progressed_at, time.time() - beat.at < FRESH_SECONDS
        stopped = is_stopped(beat.pid)
        any_stopped |= stopped
        too_long = idle > patience(beat)
        idle_ranks, moving = idle_ranks + (fresh and too_long), moving or not too_long
        place = f"in {beat.doing or beat.phase.value} after step {beat.step}"
        words = f"rank {beat.rank} {'is stopped ' if stopped else ''}{place}, {idle:.0f} s without progress"
        hung.append(HungRank(beat.rank, beat.pid, stopped, words + (f": {beat.stands}" if beat.stands else "")))
    return hung if any_stopped or (idle_ranks and not moving) else []


def any_rank_began(directory: Path, since: float) -> bool:
    """Return whether a rank of this attempt has written a heartbeat, which it does before it imports torch."""
    beats = (_read(path, Heartbeat) for path in directory.glob(HEARTBEAT.format(rank="*")) if path.name.count(".") == 1)
    return any(isinstance(beat, Heartbeat) and beat.at >= since for beat in beats)


def patience(beat: Heartbeat) -> float:
    """Seconds without progress after which a rank that is told to stop is not expected to come to its next step. Less
    than what makes a hang by itself: the operator may know which rank the others wait for, and has waited longer.
    """
    if beat.limit_seconds is None or beat.doing == WAITS_FOR_DATA:  # storage may well come back
        return unlearnt(beat.phase)
    return beat.limit_seconds * STANDING_SHARE


def unlearnt(phase: TrainerPhase) -> float:
    return LIMIT_SECONDS[phase]


def log_tail(directory: Path) -> str:
    """The last lines of the worker's log, step records left out; empty where there is no log."""
    try:
        with (directory / LOG).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line for line in text.splitlines() if not line.startswith("{")]
    return "\n".join(lines[-TAIL_LINES:])


def _read(path: Path, model: type[RankFailure] | type[Heartbeat]) -> RankFailure | Heartbeat | None:
    try:
        return model.model_validate_json(path.read_text())
    except (OSError, ValidationError):
        return None
