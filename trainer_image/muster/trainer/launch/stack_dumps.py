"""Stack dumps of a rank that does not move: its Python stacks, and NCCL's record of its collectives.

A rank reports its own main thread's place as long as its interpreter responds. When it doesn't (a call in C holds it),
the launcher sends a signal, which faulthandler answers from C, whatever the main thread is doing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import FrameType

DUMP_SIGNAL = signal.SIGUSR1
STACKS = "rank-{rank}.stacks"  # all threads of a rank, innermost frame first
FLIGHT_RECORDER = "nccl-"  # and the rank: the recorder's dump; and `.pipe`: where it is asked for one
FRAMES_MAX = 8
DUMP_SECONDS_MAX = 1.5
_HERE = "muster/trainer/"


def answer_dumps(directory: Path, rank: int) -> None:
    """Make DUMP_SIGNAL write the stacks of all threads into a file, from now on. Main thread only, once."""
    with contextlib.suppress(OSError):  # a full disk: no evidence, but training
        file = (directory / STACKS.format(rank=rank)).open("w")
        faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
        _kept.append(file)


_kept: list[object] = []  # faulthandler holds only the file's number


def main_thread_stands() -> str:
    """The main thread's innermost frames in one line, innermost first; the trainer's own are always among them."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames: list[tuple[bool, str]] = []
    while frame is not None:
        frames.append(_describe_frame(frame))
        frame = frame.f_back
    own = next((index for index, (is_own, _) in enumerate(frames) if is_own), 0)
    lines = [words for _, words in frames]
    lines = lines[:FRAMES_MAX] if own < FRAMES_MAX else [*lines[: FRAMES_MAX - 2], "…", lines[own]]
    return " < ".join(lines)


def _describe_frame(frame: FrameType) -> tuple[bool, str]:
    """Return whether the frame is the trainer's, and its place."""
    path = frame.f_code.co_filename
    _, own, short = path.rpartition(_HERE)
    short = short if own else "/".join(Path(path).parts[-2:])
    return bool(own), f"{short}:{frame.f_lineno} {frame.f_code.co_name}"


def record_flights(directory: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have NCCL's flight recorder (on by default, 2,000 entries) dump into the worker's folder, also when asked."""
    environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(directory / FLIGHT_RECORDER))
    environ.setdefault("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(directory / FLIGHT_RECORDER))
    environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")


def dump(directory: Path, pids: Mapping[int, int]) -> None:
    """Ask ranks (rank → pid) for their stacks and flight recorders; returns when the stacks are there, or soon."""
    before = {rank: _size(directory / STACKS.format(rank=rank)) for rank in pids}
    for rank, pid in pids.items():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, DUMP_SIGNAL)
        ask_flight_recorder(directory, rank)
    deadline = time.monotonic() + DUMP_SECONDS_MAX
    waiting = set(pids)
    while waiting and time.monotonic() < deadline:
        time.sleep(0.05)
        waiting = {rank for rank in waiting if _size(directory / STACKS.format(rank=rank)) <= before[rank]}


def ask_flight_recorder(directory: Path, rank: int) -> None:
    """torch reads this pipe in a thread of its own; it is there only where NCCL is."""
    with contextlib.suppress(OSError):
        pipe = os.open(directory / f"{FLIGHT_RECORDER}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, b"1\n")
        finally:
            os.close(pipe)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
