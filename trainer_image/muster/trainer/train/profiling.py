"""Traces the next steps of a running job when somebody asks for it (`muster profile`).

Rank 0 looks for a request in the job's folder, in a thread of its own. It tells the others in a step's reduction, as
it does for a save, so that all begin and end at the same steps. What goes wrong with a trace is written down, and costs
the trace alone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import ValidationError

from muster.storage.opening import open_store
from muster.storage.store import Store
from muster.trainer.config import RankPosition, WorkerRun
from muster.trainer.errors import StorageError
from muster.trainer.parallel.groups import groups
from muster.trainer.train.activity import RankActivity
from muster.trainer.train.records import say
from muster.trainer.train.tracing import StepTrace, keep_begun, keep_trace
from muster.words.profiles import RANKS_MAX, REQUEST_KEY, STEPS_MAX, Profile, ProfileRequest, RankProfile
from muster.words.signals import TrainerPhase

# Between two looks for a request. Of S3 that is 17,280 requests a day, for less than a cent; whoever asks waits for at
# most so long, beside the steps themselves.
LOOK_SECONDS = 5.0
REQUEST_BYTES_MAX = 10_000
WRITE_SECONDS_MAX = 60.0  # that the end of a job waits for its last trace


class RequestWatch:
    """The newest request of this attempt that is not taken up yet."""

    def __init__(self, folder: str, attempt: int) -> None:
        self.waiting: ProfileRequest | None = None
        self._folder, self._attempt, self._seen = folder, attempt, ""
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="profile-requests", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        store = open_store(self._folder)
        while not self._closed.is_set():
            # A store that fails now, or a document that nobody can read, is no reason to disturb anybody.
            with contextlib.suppress(StorageError, ValidationError):
                self._look(store)
            self._closed.wait(LOOK_SECONDS)

    def _look(self, store: Store) -> None:
        data = store.read(REQUEST_KEY, REQUEST_BYTES_MAX)
        request = ProfileRequest.model_validate_json(data)
        if request.attempt == self._attempt and request.id != self._seen:
            self._seen, self.waiting = request.id, request


class StepProfiler:
    """Begins and ends the traces of this rank, at steps at which every rank does."""

    def __init__(self, run: WorkerRun, ranks: RankPosition, device: torch.device, activity: RankActivity) -> None:
        self._run, self._ranks, self._device, self._activity = run, ranks, device, activity
        self._watch = RequestWatch(run.folder, run.attempt) if ranks.speaks else None
        self._profile: Profile | None = None  # the one that is under way, on every rank
        self._trace: StepTrace | None = None  # of this rank, where it is asked for
        self._fault = ""
        self._writing: list[threading.Thread] = []

    @property
    def asked(self) -> bool:
        """Return whether rank 0 knows of a request for a trace that is to begin."""
        return self._profile is None and self._watch is not None and self._watch.waiting is not None

    @property
    def active(self) -> bool:
        return self._profile is not None

    def stepped(self, step: int, asked: bool) -> None:
        """Step `step` is over, and `asked` is what the reduction said of it. Collective where a trace begins or ends,
        which all ranks know alike."""
        if self._profile is not None and step + 1 >= self._profile.step + self._profile.steps:
            self._end(step)
        elif self._profile is not None:
            self._at_boundary(step + 1)
        elif asked:
            self._begin(step + 1)

    def finish(self, step: int) -> None:
        """The run is done after `step`: what is traced so far is all there will be. Collective."""
        if self._profile is not None:
            self._end(step)

    def close(self, wait: bool) -> None:
        """Stop looking for requests. `wait`: for a while, for traces that are not written yet."""
        if self._watch is not None:
            self._watch.close()
        deadline = time.monotonic() + (WRITE_SECONDS_MAX if wait else 0.0)
        for thread in self._writing:
            thread.join(max(0.0, deadline - time.monotonic()))

    # --- at the same step of every rank ---

    def _begin(self, first: int) -> None:
        with self._activity.during(TrainerPhase.CHECKPOINT):
            self._profile = self._agreed(first)
            self._fault, self._trace = "", None
            if self._ranks.speaks:
                self._write(keep_begun, self._run.folder, self._profile)
                say(f"profile: tracing {self._profile.steps} steps from {first} on, of ranks {self._profile.ranks}")
            if self._ranks.rank in self._profile.ranks:
                self._trying(self._start)
                self._at_boundary(first)
            self._wait_for_tracers()

    def _end(self, last: int) -> None:
        profile, self._profile = self._profile, None
        assert profile is not None, "there is one under way"
        with self._activity.during(TrainerPhase.CHECKPOINT):
            trace, self._trace = self._trace, None
            files: list[Path] = []
            if trace is not None:
                self._trying(lambda: files.extend(trace.stop()))
            if self._ranks.rank in profile.ranks:
                done = RankProfile(rank=self._ranks.rank, steps=last + 1 - profile.step, fault=self._fault)
                self._write(keep_trace, self._run.folder, profile, done, tuple(files), trace)
            self._wait_for_tracers()

    def _agreed(self, first: int) -> Profile:
        """Rank 0's request, by one broadcast. Its ranks that do not exist are not traced."""
        request, message = None, torch.full((1 + RANKS_MAX,), -1, dtype=torch.int64)
        if self._watch is not None:
            request, self._watch.waiting = self._watch.waiting, None
            assert request is not None, "rank 0 asked"
            ranks = [rank for rank in request.ranks if 0 <= rank < self._ranks.world][:RANKS_MAX]
            message[: 1 + len(ranks)] = torch.tensor([min(max(1, request.steps), STEPS_MAX), *ranks])
        steps, *chosen = groups().all.broadcast(message.to(self._device)).tolist()
        return Profile(
            id=request.id if request is not None else "",
            attempt=self._run.attempt,
            step=first,
            steps=steps,
            ranks=tuple(rank for rank in chosen if rank >= 0),
            at=time.time(),
        )

    def _wait_for_tracers(self) -> None:
        """Wait for the ranks that trace: in a step they would be taken for slow, or for hung."""
        groups().all.sum(torch.zeros(1, device=self._device)).item()

    def _start(self) -> None:
        folder = self._run.worker_dir / f"profile-rank-{self._ranks.rank}"
        self._trace = StepTrace(folder, self._ranks.rank, self._device)
        self._trace.start()

    def _at_boundary(self, step: int) -> None:
        trace = self._trace
        if trace is not None:
            self._trying(lambda: trace.at_boundary(step))

    def _trying(self, action: Callable[[], None]) -> None:
        """A profiler that fails, for want of a library, of memory or of disk, is no reason for a run to end."""
        try:
            action()
        except Exception as error:
            self._fault = self._fault or f"{type(error).__name__}: {error}"[:500]

    def _write(self, action: Callable[..., None], *arguments: object) -> None:
        """Run `action` in a thread of its own, so that a slow store does not hold up the training."""
        self._writing = [thread for thread in self._writing if thread.is_alive()]
        self._writing.append(threading.Thread(target=action, args=arguments, name="profile", daemon=True))
        self._writing[-1].start()
