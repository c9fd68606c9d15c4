"""The step records of a job's attempts, read as they grow and laid end to end: later attempts replace earlier steps.

Only the bytes that were added since the last look are read; a line is kept as it came until somebody wants to see it.
"""

from __future__ import annotations

import bisect
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.contract.layout import State
from muster.contract.names import STEP_LOG

_ATTEMPT = re.compile(r"attempt-(\d{1,9})")
_READ_BYTES_MAX = 64_000_000
_JOBS_MAX = 32


@dataclass(frozen=True, slots=True)
class Step:
    """`line` is the StepRecord as JSON; `evaluation_loss` is None unless an evaluation followed this step."""

    step: int
    attempt: int
    evaluation_loss: float | None
    line: bytes

    def document(self) -> dict[str, Any]:
        """The record with null where a number is not finite: JSON has no NaN."""
        record = json.loads(self.line)
        return {key: _finite(value) for key, value in record.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class _File:
    """One attempt's records. `offset` bytes of them were read, up to the start of a line."""

    path: Path
    attempt: int
    offset: int = 0
    steps: list[Step] = field(default_factory=list)

    def refresh(self) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                added = file.read(_READ_BYTES_MAX)
        except FileNotFoundError:
            return
        complete = added[: added.rfind(b"\n") + 1]
        self.offset += len(complete)
        self.steps += [step for line in complete.splitlines() if (step := _step(line, self.attempt)) is not None]


def _step(line: bytes, attempt: int) -> Step | None:
    """None for a line that is not a step record: half a line from a crash, or something else that was printed."""
    try:
        record = json.loads(line)
        loss = record.get("evaluationLoss")
        return Step(int(record["step"]), attempt, None if loss is None else float(loss), line)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


@dataclass
class _Job:
    lock: threading.Lock = field(default_factory=threading.Lock)
    files: dict[int, _File] = field(default_factory=dict)


class StepLogs:
    """For threads. Keeps what it read of the jobs that were asked for last."""

    def __init__(self, layout: State) -> None:
        self._layout = layout
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._lock = threading.Lock()

    def history(self, uid: str) -> list[Step]:
        """Every step once, ascending, as the newest attempt that trained it recorded it."""
        job = self._job(uid)
        with job.lock:
            for attempt in _attempts(self._layout, uid):
                path = self._layout.worker(uid, attempt, 0) / STEP_LOG
                job.files.setdefault(attempt, _File(path, attempt)).refresh()
            return merged([job.files[attempt].steps for attempt in sorted(job.files)])

    def _job(self, uid: str) -> _Job:
        with self._lock:
            job = self._jobs.setdefault(uid, _Job())
            self._jobs.move_to_end(uid)
            while len(self._jobs) > _JOBS_MAX:
                self._jobs.popitem(last=False)
            return job


def _attempts(layout: State, uid: str) -> list[int]:
    try:
        names = [entry.name for entry in layout.attempt(uid, 1).parent.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1]) for name in names if (match := _ATTEMPT.fullmatch(name)))


def merged(attempts: Sequence[Sequence[Step]]) -> list[Step]:
    """Attempts in order; where one begins, what earlier ones recorded from there on is gone: those steps were lost."""
    whole: list[Step] = []
    for steps in attempts:
        if steps:
            del whole[bisect.bisect_left(whole, steps[0].step, key=lambda step: step.step) :]
            whole += steps
    return whole


def thinned(steps: Sequence[Step], points: int) -> list[Step]:
    """At most `points` of them, evenly spaced, the first and the last among them."""
    if len(steps) <= points:
        return list(steps)
    if points == 1:
        return [steps[-1]]
    last = len(steps) - 1
    return [steps[round(index * last / (points - 1))] for index in range(points)]
