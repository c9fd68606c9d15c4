"""Saving: stage, return to training, and have the rest done elsewhere. The story of one save is `Saver.save`.

Between saves, `Saver.snapshot` only stages. Should this rank die, its upload process finds the newest copy in memory.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch
from torch import nn

from muster.trainer.checkpoint.control_group import ControlGroup
from muster.trainer.checkpoint.emergency_save import (
    WAITING_SHARE_MAX,
    EmergencyPlan,
    EmergencyState,
    in_flight_seconds,
    new_seconds,
    plan,
)
from muster.trainer.checkpoint.entries import Entries
from muster.trainer.checkpoint.failures import CheckpointError
from muster.trainer.checkpoint.frozen import frozen_in
from muster.trainer.checkpoint.messages import NewLayout, SaveOrder, UploadInit, encode
from muster.trainer.checkpoint.optimizer_state import settings_of
from muster.trainer.checkpoint.staging import StagingMemory, reserve_bytes
from muster.trainer.checkpoint.tensors import is_frozen, model_tensors
from muster.trainer.checkpoint.upload_process import UploadProcess
from muster.trainer.errors import StaleAttempt
from muster.words.address import parse_address
from muster.words.base import dump
from muster.words.checkpoint import PROGRAM_VERSION, Commit, DataCursor
from muster.words.job import Keep
from muster.words.names import FIRST_INCARNATION

UPLOAD_SECONDS_MAX = 900.0
RATES_KEPT = 10


@dataclass(frozen=True)
class TrainState:
    """State of training after `step`, as a commit holds it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int
    tokens: int  # trained on so far
    cursor: DataCursor  # where the data stands
    state: dict[str, Any]  # what else training goes on from (loss scale, spike guard, early stopping), as JSON types
    rng: dict[str, Any]  # of this rank, as JSON types
    metrics: dict[str, float]
    best: bool  # whether the evaluation just made is the best so far
    records: tuple[str, ...] = ()  # lines of the step log that may not be written yet
    attached: bytes = b""  # of this rank, by a program: Muster stores them as they are


@dataclass(frozen=True)
class SaverIdentity:
    """Identity of the job and the attempt that the commits belong to."""

    job: str
    job_uid: str
    attempt: int
    fence: str | None  # where the current attempt is written (trainer.fence); None checks nothing
    folder: str  # `<checkpoint.uri>/<job uid>`
    config: dict[str, Any] = field(default_factory=dict)  # the resolved TrainingConfig
    architecture: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    trainer: Literal["muster", "program"] = "muster"  # a program has none of the three, and no data cursor
    worker: int = 0  # this rank's, whose life the fence is asked about
    incarnation: int = FIRST_INCARNATION


@dataclass(frozen=True)
class SaveOutcome:
    """Outcome of a save."""

    step: int
    committed: bool  # True only when the COMMIT is published
    seconds: float  # from `save` to the outcome
    bytes: int  # written by this rank
    error: str | None  # why there is no commit, `skipped: …` where none was tried; else None
    best: bool
    refused: bool = False  # whether the store will take no save before a person changes something


@dataclass(frozen=True)
class _InFlight:
    seq: int
    step: int
    started: float
    best: bool
    slot: int | None  # of the memory that the upload reads


class CheckpointSaver:
    """One per rank. At most one upload is in flight: a regular save that comes earlier is skipped, one of the best
    weights waits for it, an emergency save does what `emergency_save.plan` says. A failed save is an outcome, never an
    exception; only a stale attempt raises (StaleAttempt, from `finished` and `drain`), for such a rank must end."""

    def __init__(
        self, identity: SaverIdentity, keep: Keep, mesh: dict[str, Any], entries: Entries | None = None
    ) -> None:
        """Collective. `mesh` describes the parallelism, for the COMMIT's readers. With `entries` each checkpoint is
        also a folder of its own; the store may then be of each node."""
        self._control = ControlGroup()
        meeting = self._control.meeting_point()
        init = UploadInit(
            uri=identity.folder,
            rank=self._control.rank,
            world_size=self._control.world_size,
            job_uid=identity.job_uid,
            attempt=identity.attempt,
            worker=identity.worker,
            incarnation=identity.incarnation,
            fence=identity.fence,
            token=meeting.token,
            host=meeting.host,
            port=meeting.port,
            keep=keep,
            identity=_fixed_fields(identity, mesh) if self._control.speaks else {},
            entries=entries,
        )
        self._trainer = identity.trainer
        self._process = UploadProcess(init, meeting.listener)
        self._staging = StagingMemory(self._process.use_memory)
        self._in_flight: _InFlight | None = None
        self._outcomes: list[SaveOutcome] = []
        self._stale: str | None = None
        self._seq = 0
        self._frozen_settled = False  # a COMMIT names the frozen weights, or a copy is staged, or there are none
        self._rates: list[float] = []  # bytes per second of the last saves, from staged to committed

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, snapshot_bytes_max: int = 0) -> bool:
        """Collective. Take the staging memory now, so that the first save blocks no longer than the others. Optional.

        Returns whether snapshots can be taken: whether on every rank a second copy takes at most snapshot_bytes_max.
        """
        can = not self._control.any(reserve_bytes(model, optimizer) > snapshot_bytes_max)
        self._staging.reserve(model, optimizer, 2 if can else 1)
        return can

    def resumed(self, commit: Commit, model: nn.Module) -> None:
        """This job's own `commit` was loaded: frozen weights in files of their own are not written again."""
        there = frozen_in(commit)
        names = {name for name, tensor in model_tensors(model) if is_frozen(tensor) and tensor.numel()}
        if there is not None and there.tensors.keys() == names:
            self._process.frozen_is_named(commit.step, tell=True)
            self._frozen_settled = True

    def snapshot(self, state: TrainState) -> float:
        """Keep the state in this node's memory, to be committed should this rank die before the next save. Of the same
        steps on every rank. Returns the seconds that training was blocked."""
        began = time.monotonic()
        self._seq += 1
        self._stage(self._order(state), state, lambda _: None)
        return time.monotonic() - began

    def save(
        self,
        state: TrainState,
        *,
        emergency: bool = False,
        seconds_left: float | None = None,
        terminating: bool = False,
    ) -> float:
        """Collective. Stage the state and return the seconds that training was blocked; the outcome comes by
        `finished`.

        `emergency` tells that this save must happen (the last step, a preemption). `seconds_left` is the time until
        this rank's node goes, None where that is not known. `terminating` tells that it is this rank's node that goes.
        Each rank says what it knows; the least time counts.
        """
        began = time.monotonic()
        self._poll()
        chosen = self._plan(began, seconds_left, terminating) if emergency else self._regular(state.best)
        if chosen.do == "keep":
            self._skip(state, began, "the upload of an earlier checkpoint is still under way")
            return time.monotonic() - began
        if chosen.do == "supersede":
            self._give_up(f"the emergency checkpoint of step {state.step} took its place")
        if chosen.do == "wait" and not self._over_everywhere(chosen.seconds_left):
            self._skip(state, began, f"an earlier checkpoint was not uploaded within {time.monotonic() - began:.0f} s")
            return time.monotonic() - began
        self._seq += 1
        started, order = time.monotonic(), self._order(state)
        if chosen.first and chosen.seconds_left is not None:
            order = replace(order, first=chosen.first, first_seconds=chosen.seconds_left * WAITING_SHARE_MAX)
        slot = self._stage(order, state, self._process.send_save)
        self._in_flight = _InFlight(self._seq, state.step, started, state.best, slot)
        return time.monotonic() - began

    def refused(self) -> str | None:
        """Return why the store will take no save at all before a person changes something; None as far as is known."""
        if not self._process.ready:
            self._poll()
        return self._process.refused

    def finished(self) -> tuple[SaveOutcome, ...]:
        """Outcomes since the last call, as this rank knows them. Never blocks. Raises StaleAttempt."""
        self._poll()
        return self._take_outcomes()

    def drain(self, deadline_seconds: float) -> tuple[SaveOutcome, ...]:
        """Wait at most so long for the save in flight. One that is not over by then counts as not committed."""
        self._wait(time.monotonic() + deadline_seconds)
        self._give_up(f"not uploaded within the {deadline_seconds:g} s that were left")
        return self._take_outcomes()

    def close(self) -> None:
        """End the upload process. An upload in flight is given up; `drain` first."""
        self._process.close()
        self._staging.close()

    def _regular(self, wait: bool) -> EmergencyPlan:
        if not self._control.any(self._in_flight is not None):
            return EmergencyPlan("save", None)
        return EmergencyPlan("wait" if wait else "keep", None)

    def _plan(self, now: float, seconds_left: float | None, terminating: bool) -> EmergencyPlan:
        """Collective. What all ranks do, by what each of them has still to upload."""
        size, rest = self._staging.size, None
        if self._in_flight is not None:
            rest = in_flight_seconds(size, self._process.sent, now - self._in_flight.started, self._rates)
        mine = EmergencyState(rest, new_seconds(size, self._rates), seconds_left, terminating)
        return plan([EmergencyState(**standing) for standing in self._control.gather(asdict(mine))])

    def _over_everywhere(self, seconds_left: float | None) -> bool:
        """Collective. Wait for the upload in flight."""
        self._wait(time.monotonic() + (UPLOAD_SECONDS_MAX if seconds_left is None else seconds_left))
        return not self._control.any(self._in_flight is not None)

    def _order(self, state: TrainState) -> SaveOrder:
        order = SaveOrder(
            seq=self._seq,
            step=state.step,
            at=time.monotonic(),
            rng=state.rng,
            deadline_seconds=UPLOAD_SECONDS_MAX,
        )
        if not self._control.speaks:
            return order
        commit = {
            **({"cursor": dump(state.cursor)} if self._trainer == "muster" else {}),
            "tokens": state.tokens,
            "state": state.state,
            # JSON has no NaN; a metric without a value says nothing.
            "metrics": {name: value for name, value in state.metrics.items() if math.isfinite(value)},
            "best": state.best,
        }
        return replace(order, records=state.records, commit=commit, settings=settings_of(state.optimizer))

    def _stage(self, order: SaveOrder, state: TrainState, staged: Callable[[SaveOrder], None]) -> int | None:
        """Copy the state; `staged` is told the order once it is there, or with why it can't be. The slot it is in."""
        try:
            self._staging.wait()
            if not self._frozen_settled:
                if (copy := self._staging.copy_frozen(state.model)) is not None:
                    memory, frozen = copy
                    self._process.use_frozen(memory, frozen.layout.size, frozen.slices)
                self._frozen_settled = True
            if self._staging.lay_out(state.model, state.optimizer, state.attached):
                share = self._staging.share
                layout = NewLayout(
                    number=self._staging.layout,
                    bytes=share.layout.size,
                    slices=share.slices,
                    stateless=share.stateless,
                    groups=share.groups if self._control.speaks else [],
                )
                self._process.use_layout(layout)
            laid_out = replace(order, layout=self._staging.layout)
            uploading = self._in_flight.slot if self._in_flight is not None else None
            return self._staging.copy(
                state.optimizer, _as_json(laid_out), uploading, lambda slot: staged(replace(laid_out, slot=slot))
            )
        except CheckpointError as error:
            why = str(error)
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            why = f"can't stage the checkpoint in shared memory: {error}"
        # The other ranks learn it through rank 0, so that nobody waits.
        staged(SaveOrder(seq=order.seq, step=order.step, deadline_seconds=order.deadline_seconds, failed=why))
        return None

    def _poll(self, timeout_seconds: float = 0.0) -> None:
        result = self._process.poll(timeout_seconds)
        if result is None or self._in_flight is None or result.seq != self._in_flight.seq:
            return
        if result.stale:
            self._stale = result.error
        if result.frozen_missing:
            self._frozen_settled = False
        if result.committed:
            self._staging.drop_frozen()
            self._process.frozen_is_named(result.step, tell=False)
        if result.committed and result.bytes:
            self._rates = [*self._rates[1 - RATES_KEPT :], result.bytes / max(result.seconds, 1e-3)]
        self._end(result.committed, result.bytes, result.error, result.refused)

    def _wait(self, deadline: float) -> None:
        while self._in_flight is not None and (left := deadline - time.monotonic()) > 0:
            self._poll(min(left, 0.1))

    def _give_up(self, error: str) -> None:
        """End the upload in flight for good."""
        if self._in_flight is not None:
            self._process.abandon()
            self._end(committed=False, size=0, error=error)

    def _end(self, committed: bool, size: int, error: str | None, refused: bool = False) -> None:
        assert self._in_flight is not None
        save, self._in_flight = self._in_flight, None
        seconds = time.monotonic() - save.started
        self._outcomes.append(SaveOutcome(save.step, committed, seconds, size, error, save.best, refused))

    def _skip(self, state: TrainState, began: float, why: str) -> None:
        seconds = time.monotonic() - began
        self._outcomes.append(SaveOutcome(state.step, False, seconds, 0, f"skipped: {why}", state.best))

    def _take_outcomes(self) -> tuple[SaveOutcome, ...]:
        if self._stale is not None:
            raise StaleAttempt(self._stale)
        outcomes, self._outcomes = tuple(self._outcomes), []
        return outcomes


def _as_json(order: SaveOrder) -> bytes:
    """Raises CheckpointError where what training keeps is not of JSON's types."""
    try:
        return encode(order)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"TrainState.state or .rng holds what JSON can't: {error}") from error


def _fixed_fields(identity: SaverIdentity, mesh: dict[str, Any]) -> dict[str, Any]:
    of_trainer = {"config": identity.config, "architecture": identity.architecture, "tokenizer": identity.tokenizer}
    own = of_trainer if identity.trainer == "muster" else {"version": PROGRAM_VERSION}
    return own | {
        "trainer": identity.trainer,
        "job": identity.job,
        "job_uid": identity.job_uid,
        "folder": parse_address(identity.folder).name or None,
        "attempt": identity.attempt,
        "mesh": mesh,
        "versions": {"muster": _own_version(), "torch": torch.__version__, "python": platform.python_version()},
    }


def _own_version() -> str:
    try:
        return version("muster-train")
    except PackageNotFoundError:
        return "unknown"
