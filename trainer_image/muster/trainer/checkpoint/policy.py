"""Policy of saving and retention: when a checkpoint is due, and which ones are kept. Pure: no clock, no store."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from muster.plan.checkpoint_interval import (
    INTERVAL_SECONDS_MAX,
    INTERVAL_SECONDS_MIN,
    PRIOR_FAILURES_PER_NODE_SECOND,
    PRIOR_SAVE_SECONDS,
    auto_interval_seconds,
)
from muster.words.job import Keep, duration_seconds


@dataclass(frozen=True)
class SaveHistory:
    """History of an attempt's saves, which the policy decides by. All times are seconds on one clock."""

    started_at: float  # when this attempt began
    started_step: int = 0  # the step that this attempt began after
    saved_at: float | None = None  # when the last save was started; None before the first
    blocked_seconds: tuple[float, ...] = ()  # how long the last saves kept training waiting
    upload_seconds: tuple[float, ...] = ()  # how long their uploads took
    failures: int = 0  # of the whole gang, for the estimate of the failure rate
    observed_seconds: float = 0.0  # in which those failures happened
    nodes: int = 1  # of the gang


@dataclass(frozen=True)
class SavePolicy:
    """Schedule of the saves."""

    every: int | str = "auto"  # `auto`, a number of steps, or a time (`10m`), as in CheckpointSpec
    interval_seconds_min: float = field(default=INTERVAL_SECONDS_MIN)
    interval_seconds_max: float = field(default=INTERVAL_SECONDS_MAX)

    def due(self, step: int, now: float, history: SaveHistory) -> bool:
        """Return whether to save after `step`, at `now`.

        Steps are counted in multiples, so a resumed run saves at the same steps as an uninterrupted one.
        """
        if isinstance(self.every, int):
            return step > history.started_step and step % self.every == 0
        last = history.started_at if history.saved_at is None else history.saved_at
        return step > history.started_step and now - last >= self.interval_seconds(history)

    def interval_seconds(self, history: SaveHistory) -> float:
        """Seconds from one save to the next, under `auto` or a time."""
        if isinstance(self.every, int):
            raise ValueError("an interval in steps has no seconds")
        if self.every != "auto":
            return float(duration_seconds(self.every))
        upload = _median(history.upload_seconds, PRIOR_SAVE_SECONDS)
        return auto_interval_seconds(
            _median(history.blocked_seconds, upload),
            upload,
            seconds_between_failures(history),
            self.interval_seconds_min,
            self.interval_seconds_max,
        )


def seconds_between_failures(history: SaveHistory) -> float:
    """The posterior mean of a Gamma prior worth one failure, sharpened by what was seen.

    A job that fails far more often than the prior says would need a thousand failures to outweigh it. So the prior's
    one failure is never believed to have taken longer than the job's own did on average.
    """
    prior_seconds = 1 / (PRIOR_FAILURES_PER_NODE_SECOND * history.nodes)
    if history.failures:
        prior_seconds = min(prior_seconds, history.observed_seconds / history.failures)
    return max((prior_seconds + history.observed_seconds) / (1 + history.failures), 1.0)


@dataclass(frozen=True)
class RetainedCommit:
    """One commit, as retention sees it."""

    step: int
    best: bool = False  # whether it was the best when it was made
    score: float | None = None  # of the evaluation, lower is better; None where none is known
    verified: bool = True  # whether its bytes are believed good; False where it can't be read


def retained(
    commits: Iterable[RetainedCommit], keep: Keep, pins: Collection[int], in_use: Collection[int]
) -> tuple[int, ...]:
    """The steps of the commits that are to be deleted, oldest first.

    Kept are: the newest verified commit, whatever else happens; the last `keep.last` verified ones; the `keep.best`
    with the best score (the newest marked best, where none is known); each `keep.every`-th; what is pinned; and what
    somebody reads just now.
    """
    ordered = sorted(commits, key=lambda commit: commit.step)
    verified = [commit for commit in ordered if commit.verified]
    kept = {commit.step for commit in verified[-max(keep.last, 1) :]}
    kept |= _best(verified, keep.best)
    if keep.every:
        kept |= {commit.step for commit in verified if commit.step % keep.every == 0}
    kept |= set(pins) | set(in_use)
    verified_kept = [commit.step for commit in verified if commit.step in kept]
    # What can't be read may be damaged, or be written by a newer Muster: it goes when all that is known is newer.
    oldest = min(verified_kept, default=-1)
    return tuple(c.step for c in ordered if c.step not in kept and (c.verified or c.step < oldest))


def _best(commits: list[RetainedCommit], count: int) -> set[int]:
    scored = sorted((c for c in commits if c.score is not None), key=lambda c: (c.score, -c.step))
    marked = [c for c in reversed(commits) if c.best]
    # The newest commit that was best when it was made is the best of all; scores only rank those behind it.
    ranked = dict.fromkeys([c.step for c in marked[:1]] + [c.step for c in scored] + [c.step for c in marked])
    return set(list(ranked)[:count])


def _median(values: tuple[float, ...], otherwise: float) -> float:
    return sorted(values)[len(values) // 2] if values else otherwise
