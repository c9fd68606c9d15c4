"""Time account of a job, as shares that add up to the whole. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from muster.words.status import GoodputState

# One word for one thing: those of the job's phase, where a state of the account is one.
WORDS: Mapping[str, str] = {
    GoodputState.PRODUCTIVE: "Running",
    GoodputState.EVALUATION: "Evaluating",
    GoodputState.CHECKPOINT: "Saving checkpoints",
    GoodputState.LOADING: "Loading",
    GoodputState.STARTING: "Starting",
    GoodputState.DATA_WAIT: "Waiting for data",
    GoodputState.QUEUE: "Queued",
    GoodputState.SUSPENDED: "Suspended",
    GoodputState.DRAINING: "Stopping",
    GoodputState.STALLED: "Stalled",
    GoodputState.LOST: "Lost and trained again",
}


@dataclass(frozen=True)
class GoodputPart:
    """A state's share: `tenths` are tenths of a percent, and those of all parts add up to 1,000."""

    state: str
    words: str
    seconds: float
    x: float
    width: float
    tenths: int

    @property
    def percent(self) -> str:
        return f"{self.tenths / 10:.1f}%"


def parts(seconds: Mapping[str, float]) -> tuple[GoodputPart, ...]:
    """The states that took any time, in the order of WORDS; one that a newer version wrote comes last."""
    whole = sum(seconds.values())
    if whole <= 0:
        return ()
    names = [name for name in (*WORDS, *sorted(set(seconds) - set(WORDS))) if seconds.get(name, 0.0) > 0]
    tenths = _rounded([1_000 * seconds[name] / whole for name in names])
    bars, x = [], 0.0
    for name, share in zip(names, tenths, strict=True):
        width = 100 * seconds[name] / whole
        words = WORDS.get(name, name.replace("_", " ").capitalize())
        bars.append(GoodputPart(str(name), words, seconds[name], round(x, 3), round(width, 3), share))
        x += width
    return tuple(bars)


def _rounded(shares: list[float]) -> list[int]:
    """Return whole numbers with the same sum: the largest remainders are rounded up (Hare and Niemeyer)."""
    floors = [int(share) for share in shares]
    missing = round(sum(shares)) - sum(floors)
    largest = sorted(range(len(shares)), key=lambda index: floors[index] - shares[index])
    for index in largest[:missing]:
        floors[index] += 1
    return floors
