"""The fleet as its page shows it: nodes by pool, what was recovered in the last day, where all the time went. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.words.status import Phase
from muster.words.times import epoch_seconds

DAY_SECONDS = 86_400.0
RECOVERIES_MAX = 30
_ENDED = frozenset(phase for phase in Phase if phase.terminal)
_ENDED_BY_FAULT = ("failed", "preempted", "rejected")


@dataclass(frozen=True)
class NodeTile:
    """A node: `state` is free, part, held, others or unfit."""

    node: Mapping[str, Any]
    state: str
    words: str


@dataclass(frozen=True)
class NodePool:
    """Nodes of one pool with what of their GPUs is free."""

    name: str
    tiles: tuple[NodeTile, ...]
    gpus: int
    free: int


@dataclass(frozen=True)
class FaultRecovery:
    """An attempt that ended by a fault; `seconds` until the next one trained, None while none does."""

    job_id: str
    job: str
    attempt: int
    at: float
    cause: str
    message: str
    lost_steps: int
    seconds: float | None


def pools(nodes: Iterable[Mapping[str, Any]]) -> list[NodePool]:
    by_name: dict[str, list[NodeTile]] = {}
    for node in nodes:
        by_name.setdefault(str(node["pool"]), []).append(tile(node))
    return [
        NodePool(name, tuple(tiles), sum(t.node["gpus"] for t in tiles), sum(t.node["freeGpus"] for t in tiles))
        for name, tiles in sorted(by_name.items())
    ]


def tile(node: Mapping[str, Any]) -> NodeTile:
    holders = [f"{each['project']}/{each['job']}" if each["job"] else each["project"] for each in node["heldBy"]]
    gpus, free = node["gpus"], node["freeGpus"]
    if node["unfit"]:
        return NodeTile(node, "unfit", node["unfit"])
    if holders:
        state = "part" if free else "held"
        return NodeTile(
            node, state, f"held by {', '.join(holders)}" + (f", {free} of {gpus} GPUs free" if free else "")
        )
    if node["othersGpus"]:
        return NodeTile(node, "others", f"{node['othersGpus']} of {gpus} GPUs used by pods of others")
    return NodeTile(node, "free", f"free, {gpus} GPUs" if gpus else "free")


def recoveries(jobs: Iterable[tuple[str, str, Mapping[str, Any]]], now: float) -> list[FaultRecovery]:
    """Return the recoveries of the last day, newest first. `jobs` are ids, names and statuses."""
    rows = []
    for job_id, name, status in jobs:
        attempts: Sequence[Mapping[str, Any]] = status.get("attempts") or ()
        for index, attempt in enumerate(attempts):
            ended = _time(attempt.get("endedAt"))
            if ended is None or ended < now - DAY_SECONDS or attempt.get("outcome") not in _ENDED_BY_FAULT:
                continue
            if index == len(attempts) - 1 and status.get("phase") in _ENDED:
                continue  # nothing follows: it is the job's end, and no recovery
            trained = [_time(later.get("firstStepAt")) for later in attempts[index + 1 :]]
            again = next((at for at in trained if at is not None), None)
            rows.append(
                FaultRecovery(
                    job_id,
                    name,
                    int(attempt.get("number") or 0),
                    ended,
                    str(attempt.get("cause") or attempt.get("outcome")),
                    str(attempt.get("message") or ""),
                    int(attempt.get("lostSteps") or 0),
                    None if again is None else max(0.0, again - ended),
                )
            )
    return sorted(rows, key=lambda each: -each.at)[:RECOVERIES_MAX]


def time_spent(statuses: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by state, of all these jobs together."""
    whole: dict[str, float] = {}
    for status in statuses:
        for state, seconds in ((status.get("ledger") or {}).get("seconds") or {}).items():
            whole[state] = whole.get(state, 0.0) + seconds
    return whole


def _time(value: Any) -> float | None:
    try:
        return epoch_seconds(value)
    except ValueError:  # there is none
        return None
