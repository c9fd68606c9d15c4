"""Removing what the policy no longer keeps: the COMMIT first, so that nobody finds a commit with missing files."""

from __future__ import annotations

import re
import time

from muster.contract.checkpoint import QUARANTINE, Commit, commit_key, is_frozen_key, step_name
from muster.contract.spec import Keep
from muster.storage.errors import StoreError
from muster.storage.listing import steps_in
from muster.storage.pins import pinned
from muster.storage.store import Store
from muster.trainer.checkpoint.commits import commit_in
from muster.trainer.checkpoint.failures import CheckpointError
from muster.trainer.checkpoint.policy import Kept, retained
from muster.trainer.checkpoint.quarantine import quarantined
from muster.trainer.checkpoint.readers import being_read

_ATTEMPT_FILE = re.compile(r"step-(\d{8,})/attempt-(\d+)/[^/]+")


def collect(store: Store, attempt: int, newest_step: int, keep: Keep) -> list[int]:
    """Delete what retention does not keep and what failed saves left; return the steps that went.

    `attempt` and `newest_step` are those of the commit just made; nothing newer than these is touched. A failure here
    costs space, not a commit, so it is left to the next time.
    """
    try:
        commits = _commits(store)
        gone = retained(as_kept(commits), keep, pinned(store), being_read(store, time.time()))
        for step in gone:
            store.delete(commit_key(step))
            del commits[step]
        aside = _still_aside(store, commits)
        _sweep(store, attempt, newest_step, commits, aside)
    except StoreError:
        return []
    return list(gone)


def _commits(store: Store) -> dict[int, Commit | None]:
    """Every COMMIT by its step; None for one that can't be read, of which nothing is known."""
    found: dict[int, Commit | None] = {}
    for step in steps_in(store):
        try:
            found[step] = commit_in(store, step)
        except CheckpointError:
            found[step] = None
    return found


def as_kept(commits: dict[int, Commit | None]) -> list[Kept]:
    """The commits as retention sees them, scored by the metric that the newest one is judged by."""
    newest = next((commits[step] for step in sorted(commits, reverse=True) if commits[step]), None)
    judged = newest.state.get("best", {}) if newest else {}
    name, sign = f"evaluation_{judged.get('metric', 'loss')}", -1.0 if judged.get("better") == "higher" else 1.0

    def score(commit: Commit) -> float | None:
        value = commit.metrics.get(name)
        return None if value is None else sign * value

    return [
        Kept(step, commit.best, score(commit)) if commit else Kept(step, verified=False)
        for step, commit in commits.items()
    ]


def _still_aside(store: Store, commits: dict[int, Commit | None]) -> set[int]:
    """Quarantined steps that are worth a look; older than all commits, they go with their files."""
    oldest = min(commits, default=0)
    aside = quarantined(store)
    for step in aside:
        if step < oldest:
            store.delete(f"{QUARANTINE}/{step_name(step)}.json")
    return {step for step in aside if step >= oldest}


def _sweep(store: Store, attempt: int, newest_step: int, commits: dict[int, Commit | None], aside: set[int]) -> None:
    """Files that no COMMIT names, of saves that are over: earlier steps of this attempt, any of earlier attempts.

    What a COMMIT names that can't be read lies in its own step's folder, or is frozen weights of whatever step.
    """
    named = {file.key for commit in commits.values() if commit for file in commit.files}
    unknown = aside | {step for step, commit in commits.items() if commit is None}

    def is_over(key: str) -> bool:
        match = _ATTEMPT_FILE.fullmatch(key)
        if match is None or key in named or int(match[1]) in unknown or (unknown and is_frozen_key(key)):
            return False
        step, of_attempt = int(match[1]), int(match[2])
        return of_attempt < attempt or (of_attempt == attempt and step <= newest_step)

    for entry in store.objects("step-"):
        if is_over(entry.key):
            store.delete(entry.key)
    store.drop_unfinished(is_over)
