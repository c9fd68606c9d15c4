"""TensorBoard's event files beside the commits, by TensorBoard's own writer of records.

A file is an object `tensorboard/events.out.tfevents.<seconds>.<attempt>.<part>`, replaced whole while it grows, and
followed by another once it is large: so it is the same in a folder and in a bucket, and what was written survives its
writer. An attempt's first record says from which step on what earlier attempts wrote no longer counts.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from typing import Any

from muster.storage.opening import open_store
from muster.trainer.config import WorkerRun
from muster.trainer.tracking.tracker import scalars
from muster.words.signals import StepRecord

FOLDER = "tensorboard"
PART_BYTES = 4 << 20  # replaced whole twice a minute: at ten times as much that is noticed on a network
KEEP_SECONDS = 30.0


class TensorBoard:
    """Its library is loaded with the first of them: only jobs that ask for it need it."""

    def __init__(self, run: WorkerRun, clock: Callable[[], float] = time.monotonic) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._store, self._clock = open_store(run.folder), clock
        self._name = f"{FOLDER}/events.out.tfevents.{int(time.time()):010d}.{run.attempt:06d}"
        self._part, self._kept_at, self._news = 0, clock(), False
        self._begin()
        start = SessionLog(status=SessionLog.SessionStatus.START)
        self._add(Event(wall_time=time.time(), step=run.resume_step + 1, session_log=start))

    def write(self, records: Sequence[StepRecord]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for record in records:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(record).items()]
            self._add(Event(wall_time=record.at, step=record.step, summary=Summary(value=values)))
        if self._buffer.tell() >= PART_BYTES:
            self._keep()
            self._part += 1
            self._begin()
        elif self._clock() - self._kept_at >= KEEP_SECONDS:
            self._keep()

    def close(self) -> None:
        if self._news:
            self._keep()

    def _begin(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._buffer = io.BytesIO()
        self._records = RecordWriter(self._buffer)
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._news = False

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._news = True

    def _keep(self) -> None:
        self._store.replace(f"{self._name}.{self._part:06d}", self._buffer.getvalue())
        self._kept_at, self._news = self._clock(), False
