"""The step records of a job's attempts, read as they grow and laid end to end: later attempts replace earlier steps.

Only the bytes that were added since the last look are read, and what is kept of a record is its place and what it adds
to its block (tables.py). What was read of the jobs that were asked for last stays in memory.
"""

from __future__ import annotations

import bisect
import math
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic_core import from_json

from muster.api.core.metrics.tables import StepTable, column_of, finite
from muster.storage import numbered_folders
from muster.storage.small_files import open_regular
from muster.words.names import STEP_LOG
from muster.words.state_folder import StateFolder

Axis = Literal["step", "tokens", "seconds"]

# What one look reads at most: some 160,000 records in half a second. What is left is told, and read at the next look.
READ_BYTES_MAX = 64_000_000
_CHUNK_BYTES = 4_000_000
_LINE_BYTES_MAX = 1_000_000
_RECORDS_MAX = 4_000_000  # of all jobs in memory together, some 256 MB; the job that is asked for stays in any case
_JOBS_MAX = 256
_AXIS_MAX = 2**62
_NUMBERS = ("loss", "gradNorm", "lr", "tokensPerSecond", "stepSeconds", "dataWaitSeconds", "mfu", "memoryBytes")

Record = dict[str, Any]


@dataclass
class StepFile:
    """One attempt's records. `offset` bytes of them were read, up to the start of a line."""

    path: Path
    attempt: int
    offset: int = 0
    trained: StepTable = field(default_factory=StepTable)
    evaluated: StepTable = field(default_factory=StepTable)
    tokens: int = 0
    last_step: int = -1
    last_at: float = 0.0
    unread: int = 0  # bytes that the last look left

    @property
    def first_step(self) -> int | None:
        return min((table.steps[0] for table in (self.trained, self.evaluated) if len(table)), default=None)

    def refresh(self, bytes_max: int) -> int:
        """Read what was added, so many bytes at most; how many that were. `unread` says what that left."""
        begun, at_end = self.offset, False
        try:
            with os.fdopen(open_regular(self.path), "rb") as file:
                while (left := bytes_max - (self.offset - begun)) > 0:
                    file.seek(self.offset)
                    chunk = file.read(count := min(left, _CHUNK_BYTES))
                    complete = chunk[: chunk.rfind(b"\n") + 1]
                    if complete:
                        self._add(complete)
                    elif len(chunk) >= _LINE_BYTES_MAX:
                        complete = chunk  # a line of that length is no record; its end is none either
                    else:
                        at_end = len(chunk) < count  # half a line may follow, which is still being written
                        break
                    self.offset += len(complete)
                self.unread = 0 if at_end else max(0, os.fstat(file.fileno()).st_size - self.offset)
        except FileNotFoundError:
            self.unread = 0
        return self.offset - begun

    def _add(self, complete: bytes) -> None:
        lines = complete.split(b"\n")[:-1]
        kept = [_KeptRecord(place, record) for place, record in _placed(lines, self.offset) if self._is_next(record)]
        for kept_record in kept:
            self._note(kept_record)
        self._fold(self.trained, [each for each in kept if each.step > 0], training_columns)
        self._fold(self.evaluated, [each for each in kept if each.evaluated], evaluation_columns)

    def _is_next(self, record: Record) -> bool:
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not self.last_step < step < _AXIS_MAX:
            return False
        self.last_step = step
        return True

    def _note(self, kept: _KeptRecord) -> None:
        tokens = kept.record.get("tokens")
        if isinstance(tokens, int) and 0 <= tokens < _AXIS_MAX - self.tokens:
            self.tokens += tokens
        self.last_at = max(self.last_at, finite(kept.record.get("at")) or 0.0)
        kept.tokens, kept.at = self.tokens, self.last_at

    def _fold(self, table: StepTable, kept: Sequence[_KeptRecord], columns: Any) -> None:
        first = len(table)
        table.steps.extend(each.step for each in kept)
        table.tokens.extend(each.tokens for each in kept)
        table.at.extend(each.at for each in kept)
        table.places.extend(each.place for each in kept)
        table.add_values(first, columns([each.record for each in kept]))


class _KeptRecord:
    """A record on its way into the tables."""

    __slots__ = ("at", "place", "record", "tokens")

    def __init__(self, place: int, record: Record) -> None:
        self.place, self.record = place, record
        self.tokens, self.at = 0, 0.0

    @property
    def step(self) -> int:
        step: int = self.record["step"]
        return step

    @property
    def evaluated(self) -> bool:
        return finite(self.record.get("evaluationLoss")) is not None


def _placed(lines: Sequence[bytes], begin: int) -> Iterator[tuple[int, Record]]:
    """The lines that are objects, each with its place; `begin` is that of the first line."""
    place = begin
    for line, record in zip(lines, _parsed(lines), strict=True):
        if isinstance(record, dict):
            yield place, record
        place += len(line) + 1


def _parsed(lines: Sequence[bytes]) -> list[Any]:
    """Parse all lines at once, which takes a third of the time; one by one if one of them is not JSON."""
    try:
        records = from_json(b"[" + b",".join(lines) + b"]")
    except ValueError:
        records = []
    return records if len(records) == len(lines) else [parse_line(line) for line in lines]


def parse_line(line: bytes) -> Any:
    """Parse a line, or return None if it is not JSON: half a line from a crash, or something else that was printed."""
    try:
        return from_json(line)
    except ValueError:
        return None


def training_columns(records: Sequence[Record], only: str = "") -> dict[str, list[float | None]]:
    """Return the columns of the records; `only` may name the one that is asked for, where that is cheaper."""
    if only in _NUMBERS:
        return {only: column_of(records, only)}
    columns = {name: column_of(records, name) for name in _NUMBERS}
    filled = {name: column for name, column in columns.items() if any(value is not None for value in column)}
    return filled | _named(records, "values") | _named(records, "rankSeconds") | _named(records, "hardware")


def evaluation_columns(records: Sequence[Record]) -> dict[str, list[float | None]]:
    return {"loss": column_of(records, "evaluationLoss"), **_named(records, "evaluationValues", "values")}


def _named(records: Sequence[Record], key: str, prefix: str = "") -> dict[str, list[float | None]]:
    """Return the columns of values that have names of their own, such as an objective's. The prefix, by default the
    key, keeps them apart from a record's columns."""
    mappings = [record.get(key) for record in records]
    named = [values if isinstance(values, dict) else {} for values in mappings]
    names = dict.fromkeys(name for values in named for name in values)
    return {f"{prefix or key}.{name}": column_of(named, name) for name in names}


@dataclass(frozen=True)
class AttemptSpan:
    """Records of one attempt that still count: those from `begin` up to `end` of its table.

    `tokens` were trained in the attempts before, `started` is the time of the job's first record.
    """

    attempt: int
    path: Path
    table: StepTable
    begin: int
    end: int
    tokens: int = 0
    started: float = 0.0

    def __len__(self) -> int:
        return self.end - self.begin

    def value(self, axis: Axis, index: int) -> float:
        if axis == "step":
            return self.table.steps[index]
        if axis == "tokens":
            return self.tokens + self.table.tokens[index]
        return self.table.at[index] - self.started

    def between(self, axis: Axis, low: float, high: float) -> AttemptSpan:
        """The part whose records lie there, both ends included."""
        column: Mapping[Axis, tuple[array[Any], float]] = {
            "step": (self.table.steps, 0),
            "tokens": (self.table.tokens, self.tokens),
            "seconds": (self.table.at, -self.started),
        }
        values, base = column[axis]
        begin = bisect.bisect_left(values, low - base, self.begin, self.end)
        end = bisect.bisect_right(values, high - base, begin, self.end)
        return AttemptSpan(self.attempt, self.path, self.table, begin, end, self.tokens, self.started)

    def records(self, indices: Iterable[int]) -> Iterator[Record]:
        """The records themselves; an empty one for a line that has changed since, or is gone."""
        try:
            with os.fdopen(open_regular(self.path), "rb", 1 << 18) as file:
                for index in indices:
                    file.seek(self.table.places[index])
                    record = parse_line(file.readline(_LINE_BYTES_MAX))
                    yield record if isinstance(record, dict) else {}
        except FileNotFoundError:  # the job was deleted
            yield from ({} for _ in indices)


@dataclass(frozen=True)
class StepHistory:
    """The steps of all attempts, each step once, as the newest attempt that trained it recorded it.

    `started` is the time of the first record, None before there is one; `unread` bytes of records are still to be read.
    """

    trained: tuple[AttemptSpan, ...]
    evaluated: tuple[AttemptSpan, ...]
    started: float | None
    unread: int


@dataclass
class _JobSteps:
    lock: threading.Lock = field(default_factory=threading.Lock)
    files: dict[int, StepFile] = field(default_factory=dict)

    @property
    def records(self) -> int:
        return sum(len(file.trained) + len(file.evaluated) for file in list(self.files.values()))


class StepLogs:
    """Thread-safe reader of step logs. It caches what it read of the jobs that were requested last."""

    def __init__(self, layout: StateFolder) -> None:
        self._layout = layout
        self._jobs: OrderedDict[str, _JobSteps] = OrderedDict()
        self._lock = threading.Lock()

    def history(self, uid: str) -> StepHistory:
        job = self._job(uid)
        with job.lock:
            left = READ_BYTES_MAX
            for attempt in numbered_folders.attempts(self._layout, uid):
                path = self._layout.worker(uid, attempt, 0) / STEP_LOG
                left -= job.files.setdefault(attempt, StepFile(path, attempt)).refresh(left)
            files = [job.files[attempt] for attempt in sorted(job.files)]
            merged_history = merged(files)
        self._forget_others()
        return merged_history

    def _job(self, uid: str) -> _JobSteps:
        with self._lock:
            job = self._jobs.setdefault(uid, _JobSteps())
            self._jobs.move_to_end(uid)
            return job

    def _forget_others(self) -> None:
        with self._lock:
            records = sum(job.records for job in self._jobs.values())
            while len(self._jobs) > 1 and (records > _RECORDS_MAX or len(self._jobs) > _JOBS_MAX):
                _, forgotten = self._jobs.popitem(last=False)
                records -= forgotten.records


def merged(files: Sequence[StepFile]) -> StepHistory:
    """Attempts in order; where one begins, what earlier ones recorded from there on is gone: those steps were lost."""
    begun = [file for file in files if file.first_step is not None]
    tables = [table for file in begun for table in (file.trained, file.evaluated) if len(table)]
    started = min((table.at[0] for table in tables), default=None)
    trained, evaluated, tokens = [], [], 0
    for index, file in enumerate(begun):
        limit = min((later.first_step or 0 for later in begun[index + 1 :]), default=_AXIS_MAX)
        trained.append(_span(file, file.trained, limit, tokens, started or 0.0))
        evaluated.append(_span(file, file.evaluated, limit, tokens, started or 0.0))
        if end := trained[-1].end:
            tokens += file.trained.tokens[end - 1]
    unread = sum(file.unread for file in files)
    return StepHistory(_spans_with_nodes(trained), _spans_with_nodes(evaluated), started, unread)


def _span(file: StepFile, table: StepTable, limit: int, tokens: int, started: float) -> AttemptSpan:
    """The table's records before the step from which on later attempts replace them."""
    end = bisect.bisect_left(table.steps, limit)
    return AttemptSpan(file.attempt, file.path, table, 0, end, tokens, started)


def _spans_with_nodes(spans: Iterable[AttemptSpan]) -> tuple[AttemptSpan, ...]:
    return tuple(span for span in spans if len(span))


def thinned(spans: Sequence[AttemptSpan], points: int) -> list[tuple[int, Record]]:
    """Return at most `points` records with their attempts, evenly spaced, with the first and the last among them."""
    total = sum(len(span) for span in spans)
    places = chosen(total, points)
    records: list[tuple[int, Record]] = []
    ends = [0]
    for span in spans:
        ends.append(ends[-1] + len(span))
    for span, (begin, end) in zip(spans, pairwise(ends), strict=True):
        indices = [index - begin + span.begin for index in places if begin <= index < end]
        records += [(span.attempt, record) for record in span.records(indices) if record]
    return records


def chosen(total: int, points: int) -> list[int]:
    """Return the indices of at most `points` of the `total` records: evenly spaced, with the first and the last among
    them (a single point is the last record)."""
    if total <= points:
        return list(range(total))
    if points == 1:
        return [total - 1]
    return [round(index * (total - 1) / (points - 1)) for index in range(points)]


def finite_only(value: Any) -> Any:
    """The record with null where a number is not finite: JSON has no NaN."""
    if isinstance(value, dict):
        return {key: finite_only(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite_only(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
