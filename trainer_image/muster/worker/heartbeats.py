"""Heartbeats of a program's ranks, written once a second by the launcher from what is seen of them.

A program tells nothing by itself. What is known comes from its progress files (the hook, which counts optimizer steps,
or `muster.run`), from the reports of Hugging Face's Trainer, and from when it last wrote something.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.worker.files import read_document, write_document
from muster.worker.names import HEARTBEAT, KEEPER_STATE, PROGRESS
from muster.worker.output import RankOutput
from muster.worker.pace import StepPace
from muster.worker.process_tree import is_alive, is_stopped

SECONDS_BETWEEN_BEATS = 1.0


@dataclass(frozen=True)
class HangPolicy:
    """Bounds of silence that the job states (spec.program.hang)."""

    silent_seconds: float | None = None
    step_seconds: float | None = None
    off: bool = False


@dataclass(frozen=True)
class LastStep:
    """The last step that a rank reported, as a StepRecord, and the tokens until then."""

    record: dict[str, Any]
    tokens: float


class HeartbeatWriter:
    """Writer of the heartbeats of all ranks of this worker."""

    def __init__(
        self,
        directory: str,
        attempt: int,
        incarnation: int,
        pids: Mapping[int, int],
        output: RankOutput,
        hang: HangPolicy,
        steps: int | None,
        resume_step: int,
        metrics_port: int | None = None,
    ) -> None:
        """`steps` is how many the program will take, where the job says so."""
        self._directory, self._life = directory, {"attempt": attempt, "incarnation": incarnation}
        self._output, self._steps = output, steps
        self._resume_step, self._metrics_port = resume_step, metrics_port
        self.started_at = time.time()
        self._pids = dict(pids)
        self._paces = {
            rank: StepPace(self.started_at, hang.step_seconds, hang.silent_seconds, hang.off, steps) for rank in pids
        }
        self._last_steps: dict[int, LastStep] = {}
        self._status: dict[str, Any] = {}
        self._done: set[int] = set()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Write heartbeats from now on, in a thread of our own."""
        self._thread.start()

    def finish(self) -> None:
        """Write the last heartbeats."""
        self._ending.set()
        self._thread.join()

    def done(self, rank: int) -> None:
        """Note that a rank ended well."""
        self._done.add(rank)

    def trainer_reported(self, status: dict[str, Any]) -> None:
        """Note a report of Hugging Face's Trainer: step, steps, loss and values, as far as it has them."""
        with self._lock:
            self._status = {**self._status, **status}

    def step(self, rank: int) -> int:
        """Return the last step that is known of a rank."""
        step = self._progress(rank).get("step")
        return step if isinstance(step, int) else self._resume_step

    @property
    def moved_at(self) -> float:
        """Return when a rank of this worker last made a step or wrote, in seconds since the epoch."""
        now = time.time()
        return max(pace.watch(now).progressed_at for pace in self._paces.values())

    def _run(self) -> None:
        while not self._ending.wait(SECONDS_BETWEEN_BEATS):
            self.write()
        self.write()

    def write(self) -> None:
        """Write the heartbeats of all ranks now."""
        keeper = read_document(os.path.join(self._directory, KEEPER_STATE)) or {}
        for rank in self._pids:
            with contextlib.suppress(OSError):  # a full disk must not end the program; that beats are missing is seen
                path = os.path.join(self._directory, HEARTBEAT.format(rank=rank))
                write_document(path, self.heartbeat(rank, keeper))

    def heartbeat(self, rank: int, keeper: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is known of a rank now. `keeper` is the state of the keeper of checkpoints."""
        now, pace, progress = time.time(), self._paces[rank], self._progress(rank)
        step = progress.get("step")
        if isinstance(step, int):
            self._note_step(rank, step, progress)
        pace.wrote(self._output.wrote_at(rank))
        watch = pace.watch(now, self._is_counted(rank, progress))
        phase = "done" if rank in self._done else "init" if pace.first_step_at is None else "step"
        first = rank == min(self._pids)
        return {
            **self._life,
            "rank": rank,
            "pid": progress.get("pid") or self._pids[rank],
            "phase": phase,
            "step": step if isinstance(step, int) else self._resume_step,
            "at": now,
            "progressedAt": watch.progressed_at,
            "startedAt": self.started_at,
            "limitSeconds": watch.limit_seconds,
            "watched": watch.watched and rank not in self._done,
            "doing": str(progress.get("doing") or "")[:200],
            "firstStepAt": pace.first_step_at,
            # Of a program only the clock is known: whether its time went into steps or into loading, it alone knows.
            # What has passed since its last step counts once the next one shows that it was no hang.
            "seconds": {"productive": (watch.progressed_at if watch.watched else now) - self.started_at},
            "lastCommitStep": keeper.get("committedStep"),
            "lastCommitAt": keeper.get("committedAt"),
            "lastStep": self._last_steps[rank].record if rank in self._last_steps else None,
            "metricsPort": self._metrics_port if first else None,
        }

    def all(self) -> list[dict[str, Any]]:
        """Return the heartbeats as they lie in the worker's folder, for whoever asks from outside."""
        return heartbeats_in(self._directory)

    def _is_counted(self, rank: int, progress: Mapping[str, Any]) -> bool:
        """Return whether whoever counted this rank's steps may still count: a rank (a shell, say) may live on, and do
        something else, when its process that trained has ended."""
        counter = progress.get("pid")
        return not isinstance(counter, int) or counter == self._pids[rank] or is_alive(counter)

    def _progress(self, rank: int) -> dict[str, Any]:
        """Return what is reported of a rank; of the first, with what Hugging Face's Trainer adds."""
        report = read_document(os.path.join(self._directory, PROGRESS.format(rank=rank))) or {}
        if rank != min(self._pids):
            return report
        with self._lock:
            status = dict(self._status)
        if not status:
            return report
        values = {**status.pop("values", {}), **(_values(report.get("values")))}
        # The Trainer reports every five seconds, the hook each second; where both count, the newer is further.
        both = [one["step"] for one in (report, status) if isinstance(one.get("step"), int)]
        merged = {**status, **{name: value for name, value in report.items() if value is not None}, "values": values}
        return {**merged, "step": max(both)} if both else merged

    def _note_step(self, rank: int, step: int, progress: Mapping[str, Any]) -> None:
        """Take over a step, and what is reported of it; its duration is the mean since the report before."""
        at = _number(progress.get("progressedAt")) or time.time()
        self._paces[rank].stepped(step, at)
        reported = self._last_steps.get(rank)
        last = reported.record if reported is not None else None
        loss, values = _number(progress.get("loss")), _values(progress.get("values"))
        if loss is None or (last is not None and last["step"] == step and last["loss"] == loss):
            return
        steps = self._steps or progress.get("steps")
        seconds = (at - last["at"]) / (step - last["step"]) if last is not None and step > last["step"] else 0.0
        tokens = _number(progress.get("tokens")) or 0.0
        before = reported.tokens if reported is not None else tokens
        per_second = (tokens - before) / (at - last["at"]) if last is not None and at > last["at"] else 0.0
        record = {
            "type": "step",
            "attempt": self._life["attempt"],
            "step": step,
            "steps": steps if isinstance(steps, int) else None,
            "at": at,
            "loss": loss,
            "gradNorm": values.pop("grad_norm", 0.0),
            "lr": values.pop("learning_rate", values.pop("lr", 0.0)),
            "tokens": max(0, int(tokens - before)),
            "tokensPerSecond": max(0.0, per_second),
            "stepSeconds": max(0.0, seconds),
            "dataWaitSeconds": 0.0,
            "memoryBytes": 0,
            "evaluationLoss": values.pop("evaluation_loss", None),
            "values": values,
        }
        self._last_steps[rank] = LastStep(record, tokens)


def heartbeats_in(directory: str) -> list[dict[str, Any]]:
    """Return the heartbeats that lie in a worker's folder, by rank."""
    beats = []
    for name in os.listdir(directory) if os.path.isdir(directory) else ():
        rank = name[len("rank-") : -len(".json")]
        if rank.isdecimal() and name == HEARTBEAT.format(rank=rank):
            beat = read_document(os.path.join(directory, name))
            if beat is not None and isinstance(beat.get("rank"), int):
                stopped = {"stopped": True} if is_stopped(int(beat.get("pid") or 0)) else {}
                beats.append({**beat, **stopped})
    return sorted(beats, key=lambda beat: int(beat["rank"]))


def _number(value: object) -> float | None:
    """Return the number; None for anything else, also for one that is not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < float("inf") else None


def _values(value: object) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    numbers = {str(name): _number(each) for name, each in list(value.items())[:100]}
    return {name: each for name, each in numbers.items() if each is not None}
