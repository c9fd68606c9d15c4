"""Plan of an emergency save: how it treats the upload in flight when a node is about to go, and whether a commit after
a crash is worth its time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from muster.plan.checkpoint_interval import PRIOR_SAVE_SECONDS
from muster.storage.checksum import PART_BYTES
from muster.worker.names import AFTER_CRASH_SECONDS_MAX

WORTHWHILE_SECONDS = 2.0  # a wait that nobody minds
WAITING_SHARE_MAX = 1 / 3  # of the time that is left: so long do the others let terminating ranks go first


@dataclass(frozen=True)
class EmergencyState:
    """State of one rank when an emergency save is due."""

    in_flight_seconds: float | None  # until its upload in flight is over; None where it has none
    new_seconds: float  # that a new save would take
    seconds_left: float | None = None  # until its node goes; None where it does not know
    terminating: bool = False  # whether its own node is one of those that go


@dataclass(frozen=True)
class EmergencyPlan:
    """Plan that all ranks follow: save at once; wait for the upload in flight, then save; keep the one in flight and
    save nothing new; or cancel it and save."""

    do: Literal["save", "wait", "keep", "supersede"]
    seconds_left: float | None  # until the first node goes; None where no rank knows of one
    first: tuple[int, ...] = ()  # the ranks whose shards go first; empty: all at once


def plan(standings: Sequence[EmergencyState]) -> EmergencyPlan:
    """Return the plan for every rank's standing, in order of rank. It is the same on all ranks."""
    left = min((s.seconds_left for s in standings if s.seconds_left is not None), default=None)
    first = _first(standings) if left is not None else ()
    in_flight = [s.in_flight_seconds for s in standings if s.in_flight_seconds is not None]
    if not in_flight:
        return EmergencyPlan("save", left, first)
    # Where one rank knows how the save ended, it ended for all: the others are about to hear it.
    rest = max(in_flight) if len(in_flight) == len(standings) else 0.0
    new = max(s.new_seconds for s in standings)
    if left is None or rest + new <= left:
        return EmergencyPlan("wait", left, first)
    return EmergencyPlan("keep" if rest <= new else "supersede", left, first)


def _first(standings: Sequence[EmergencyState]) -> tuple[int, ...]:
    """The terminating, where others can wait for them: rank 0 writes the COMMIT, so with it all are in a hurry."""
    terminating = tuple(rank for rank, standing in enumerate(standings) if standing.terminating)
    return () if 0 in terminating or len(terminating) == len(standings) else terminating


def new_seconds(size: int, rates: Sequence[float]) -> float:
    """Estimate the seconds that a save of `size` bytes takes, by the slowest of the recent rates (bytes per second)."""
    return size / min(rates) if rates else PRIOR_SAVE_SECONDS


def in_flight_seconds(size: int, sent: int, elapsed: float, rates: Sequence[float]) -> float:
    """Estimate the remaining seconds of an upload that has sent `sent` of its `size` bytes in `elapsed` seconds.

    It is no faster than the saves before, nor than it was so far; parts on their way count as sent for that.
    """
    so_far = min(sent + PART_BYTES, size) / max(elapsed, 1e-3)
    return max(size - sent, 0) / max(min(so_far, *rates) if rates else so_far, 1.0)


def worth_a_commit(lost_seconds: float, upload_seconds: float) -> bool:
    """Return whether to upload the state that the ranks of a crash left in memory, rather than to train it again.

    `lost_seconds` is the training time since the last commit. `upload_seconds` is what the last upload took; 0 means
    that there was none.
    """
    return upload_seconds <= min(max(lost_seconds, WORTHWHILE_SECONDS), AFTER_CRASH_SECONDS_MAX)
