"""Cost of preempting gangs, and the cheapest set of gangs that makes enough room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from muster.operator.core.fleet import JobSummary
from muster.words.status import GoodputState

# From the start of an attempt to its first step, where the last one did not say.
RESTART_SECONDS = 120.0
# What a stopped gang loses besides: its place. It waits again, for nobody knows how long. So a smaller gang costs less;
# and as much again for each time that it had to make room before, so that it is not always the same one.
REQUEUE_SECONDS = 600.0
# A gang's first minutes on its nodes, over all its attempts: none of its own priority puts it out. Most short jobs end
# within them, so they are neither kept waiting by longer ones of their project nor stopped (benchmarks/fairness.py).
FIRST_SECONDS = 600.0
# Work that is not committed for longer protects nobody: else whoever never commits would never be put out.
UNCOMMITTED_SECONDS_MAX = 3600.0

# What does not count as a gang's time on its nodes.
_AWAY = (GoodputState.QUEUE, GoodputState.SUSPENDED)


@dataclass(frozen=True, slots=True)
class Eviction:
    """A gang that is stopped, or made smaller."""

    job: JobSummary
    freed: tuple[str, ...]
    """The nodes that it gives up."""
    kept: tuple[str, ...]
    """Nodes with which it continues; empty if it is stopped."""
    cost: float
    """GPU-seconds that this is expected to lose."""

    @property
    def gpus(self) -> int:
        return len(self.freed) * self.job.spec.gang.gpus_per_node


@dataclass(frozen=True, slots=True)
class PreemptionOption:
    """Gangs that can be preempted together, and the number of workers that then fit."""

    evictions: tuple[Eviction, ...]
    workers: int
    cost: float
    gpus: int


def restart_seconds(job: JobSummary) -> float:
    """Return the time from the start of an attempt to its first step, as the newest attempt that reached one took."""
    for attempt in reversed(job.status.attempts):
        if attempt.first_step_at is not None and attempt.first_step_at >= attempt.created_at:
            return attempt.first_step_at - attempt.created_at
    return RESTART_SECONDS


def cheapest_set(options: list[list[PreemptionOption]], missing: int, gpus_max: int) -> PreemptionOption | None:
    """One or no option of each unit, together for as many workers as are missing: the cheapest; where those would be
    too many GPUs, the fewest GPUs. None where even these are too many.
    """
    by_cost = _knapsack(options, missing, gpus_max, lambda option: option.cost)
    return by_cost or _knapsack(options, missing, gpus_max, lambda option: float(option.gpus))


def _knapsack(
    options: list[list[PreemptionOption]], missing: int, gpus_max: int, price: Callable[[PreemptionOption], float]
) -> PreemptionOption | None:
    """The least sum of prices for so many workers; within `gpus_max` GPUs as far as each step can see."""
    best: list[PreemptionOption | None] = [PreemptionOption((), 0, 0.0, 0), *[None] * missing]
    for unit in _worth_trying(options, missing, price):
        after = list(best)
        for so_far in best:
            if so_far is None:
                continue
            for option in unit:
                workers = min(missing, so_far.workers + option.workers)
                cheapest, gpus = after[workers], so_far.gpus + option.gpus
                if gpus > gpus_max or (cheapest is not None and price(cheapest) <= price(so_far) + price(option)):
                    continue
                evictions = (*so_far.evictions, *option.evictions)
                after[workers] = PreemptionOption(evictions, workers, so_far.cost + option.cost, gpus)
        best = after
    return best[missing]


def _worth_trying(
    options: list[list[PreemptionOption]], missing: int, price: Callable[[PreemptionOption], float]
) -> Iterator[list[PreemptionOption]]:
    """Yield, of units that differ only in their price, no more than could be needed: the cheapest."""
    alike: dict[tuple[tuple[int, int], ...], list[list[PreemptionOption]]] = {}
    for unit in options:
        useful = [option for option in unit if option.workers]
        if useful:
            alike.setdefault(tuple((option.workers, option.gpus) for option in useful), []).append(useful)
    for kind, units in alike.items():
        fewest = min(workers for workers, _ in kind)
        units.sort(key=lambda unit: sum(price(option) for option in unit))
        yield from units[: -(-missing // fewest)]


def cost(job: JobSummary, now: float, requeued: bool = True) -> float:
    """GPU-seconds that putting it out is expected to lose: its work since its last commit, should the one that it is
    asked for fail, its restart, and its place. In its first minutes it may be about to end, and counts as one that made
    room before.
    """
    work = min(UNCOMMITTED_SECONDS_MAX, uncommitted_seconds(job, now))
    gpus = len(job.status.gang.nodes) * job.spec.gang.gpus_per_node
    before = sum(attempt.outcome == "preempted" for attempt in job.status.attempts)
    before += served_seconds(job, now) < FIRST_SECONDS
    return gpus * (work + restart_seconds(job) + (REQUEUE_SECONDS * (1 + before) if requeued else 0.0))


def uncommitted_seconds(job: JobSummary, now: float) -> float:
    """Return the seconds since its last commit, or since it began if that is later."""
    commit = job.status.checkpoint
    return max(0.0, now - max(commit.committed_at if commit else 0.0, began(job)))


def served_seconds(job: JobSummary, now: float) -> float:
    """Total time that it has held nodes, which never decreases."""
    account = job.status.ledger
    before = sum(seconds for state, seconds in account.seconds.items() if state not in _AWAY)
    return before + (max(0.0, now - account.since) if job.status.gang.nodes else 0.0)


def began(job: JobSummary) -> float:
    status = job.status
    return status.attempts[-1].created_at if status.attempts else status.since
