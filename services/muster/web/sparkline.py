"""The course of a job's loss in a few numbers, read in little time however long its step log is.

A log of a million steps has 300 MB. A picture of 100 pixels shows a few dozen of them, and so only so many places of
the file are read, evenly spaced. A finished job's are remembered by the sizes of its files.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from muster.storage import numbered_folders
from muster.storage.small_files import open_regular
from muster.words.names import STEP_LOG
from muster.words.state_folder import StateFolder

POINTS = 48  # half the width of the picture in pixels
_LOOK_BYTES = 2_048  # a record has some 300 bytes, so at least one whole line is in it
_KEPT_MAX = 2_000
_ATTEMPTS_MAX = 8  # of a job that restarted more often the newest

Files = tuple[tuple[Path, int], ...]


class SparklineCache:
    """Thread-safe cache of losses by job, oldest first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Files, list[float]]] = OrderedDict()

    def of(self, layout: StateFolder, uids: Sequence[str]) -> dict[str, list[float]]:
        """Return the losses by uid; an empty list if nothing was trained yet."""
        return {uid: self._one(layout, uid) for uid in uids}

    def _one(self, layout: StateFolder, uid: str) -> list[float]:
        files = _files(layout, uid)
        cached = self._kept.get(uid)
        if cached is not None and cached[0] == files:
            return cached[1]
        points = sampled(files, POINTS)
        self._kept[uid] = (files, points)
        if len(self._kept) > _KEPT_MAX:
            self._kept.popitem(last=False)
        return points


def _files(layout: StateFolder, uid: str) -> Files:
    """The step logs of the newest attempts with their sizes, oldest first."""
    sized = []
    for number in numbered_folders.attempts(layout, uid)[-_ATTEMPTS_MAX:]:
        path = layout.worker(uid, number, 0) / STEP_LOG
        try:
            sized.append((path, path.stat().st_size))
        except OSError:
            continue
    return tuple(sized)


def sampled(files: Files, points: int) -> list[float]:
    """Return at most so many losses by step, evenly spaced over the bytes of the files, with the last one among
    them."""
    whole = sum(size for _, size in files)
    if not whole:
        return []
    losses: dict[int, float] = {}
    begin = 0
    for path, size in files:
        places = [
            place - begin for index in range(points) if begin <= (place := whole * index // points) < begin + size
        ]
        begin += size
        with contextlib.suppress(OSError), os.fdopen(open_regular(path), "rb") as handle:
            for place in places:
                handle.seek(place)
                losses.update(_first(handle.read(_LOOK_BYTES), begins=place == 0))
            handle.seek(max(0, size - _LOOK_BYTES))
            losses.update(_last(handle.read(_LOOK_BYTES)))
    return [losses[step] for step in sorted(losses)]


def _first(raw: bytes, begins: bool) -> dict[int, float]:
    """The loss of the first record by its step. A place in the middle of a line begins with a piece of one."""
    lines = raw.split(b"\n")[0 if begins else 1 : -1]
    return next((read for line in lines if (read := _record(line))), {})


def _last(raw: bytes) -> dict[int, float]:
    return next((read for line in reversed(raw.split(b"\n")[:-1]) if (read := _record(line))), {})


def _record(line: bytes) -> dict[int, float]:
    """Empty for half a line, an evaluation alone, and a loss that is not finite."""
    try:
        record = json.loads(line)
        step, loss = int(record["step"]), float(record["loss"])
    except (ValueError, KeyError, TypeError):
        return {}
    return {step: loss} if step > 0 and math.isfinite(loss) else {}
