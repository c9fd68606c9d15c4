"""Removing what the policy no longer keeps: the COMMIT first, so that nobody finds a commit with missing files.

A listing can be wrong: a cache or a gateway answers with yesterday's, or with nothing. Only what is removed here would
be lost by that, so no listing is believed alone. A commit is looked for by its own name too, what retention removes is
read first, and any other file goes when two saves in a row found that no COMMIT names it.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from muster.storage.errors import StoreError
from muster.storage.listing import steps_in
from muster.storage.pins import is_pinned, pinned
from muster.storage.readers import being_read
from muster.storage.store import Store
from muster.trainer.checkpoint.commits import commit_in
from muster.trainer.checkpoint.failures import CheckpointError, GoneCommit
from muster.trainer.checkpoint.policy import RetainedCommit, retained
from muster.trainer.checkpoint.quarantine import quarantined
from muster.words.checkpoint import QUARANTINE, Commit, attempt_prefix, commit_key, is_frozen_key, step_name
from muster.words.job import Keep

_ATTEMPT_FILE = re.compile(r"step-(\d{8,})/attempt-(\d+)/.+")


@dataclass
class CollectionState:
    """Findings of the earlier collections of one process."""

    commits: frozenset[int] = frozenset()  # the steps that were committed after the last one
    doomed: frozenset[str] = frozenset()  # keys that could have gone by its listings


def collect(store: Store, attempt: int, newest_step: int, keep: Keep, seen: CollectionState | None = None) -> list[int]:
    """Delete what retention does not keep and what failed saves left; return the steps that went.

    `attempt` and `newest_step` are those of the commit just made; nothing newer than these is touched. `seen` is what
    the collections before found, and is brought up to date. A failure here costs space, not a commit, so it is left to
    the next time.
    """
    seen = CollectionState() if seen is None else seen
    seen.commits |= {newest_step}
    try:
        listed = frozenset(steps_in(store))
        commits = _commits(store, listed, newest_step, seen.commits)
        spared = being_read(store, time.time()) | {newest_step}
        gone = [step for step in retained(as_kept(commits), keep, pinned(store), spared) if not is_pinned(store, step)]
        for step in gone:
            store.delete(commit_key(step))
            _delete_own_files(store, step, commits)
            del commits[step]
        seen.commits = frozenset(commits)
        if commits.keys() <= listed:
            doomed = _superfluous(store, attempt, newest_step, commits)
            for key in sorted(doomed & seen.doomed):
                store.delete(key)
            seen.doomed = frozenset(doomed)
        else:  # it does not show what is there
            seen.doomed = frozenset()
    except StoreError:
        return []
    return gone


def _commits(store: Store, listed: frozenset[int], newest_step: int, seen: frozenset[int]) -> dict[int, Commit | None]:
    """Every COMMIT by its step, also those that a listing fails to show; None for one that can't be read, of which
    nothing is known."""
    commits: dict[int, Commit | None] = {}
    for step in sorted(listed | seen):
        try:
            commits[step] = commit_in(store, step)
        except GoneCommit:
            if step in listed or step == newest_step:
                commits[step] = None
        except CheckpointError:
            commits[step] = None
    return commits


def _delete_own_files(store: Store, step: int, commits: dict[int, Commit | None]) -> None:
    """The files that were written for the commit of `step` and that no other names. Frozen weights are left to later
    collections: a commit that no listing shows yet would name them."""
    if (commit := commits[step]) is None:
        return
    folder = attempt_prefix(commit.step, commit.attempt) + "/"
    others = {file.key for each in commits.values() if each and each.step != step for file in each.files}
    for file in commit.files:
        if file.key.startswith(folder) and file.key not in others and not is_frozen_key(file.key):
            store.delete(file.key)


def as_kept(commits: dict[int, Commit | None]) -> list[RetainedCommit]:
    """The commits as retention sees them, scored by the metric that the newest one is judged by."""
    newest = next((commits[step] for step in sorted(commits, reverse=True) if commits[step]), None)
    judged = newest.state.get("best", {}) if newest else {}
    name, sign = f"evaluation_{judged.get('metric', 'loss')}", -1.0 if judged.get("better") == "higher" else 1.0

    def score(commit: Commit) -> float | None:
        value = commit.metrics.get(name)
        return None if value is None else sign * value

    return [
        RetainedCommit(step, commit.best, score(commit)) if commit else RetainedCommit(step, verified=False)
        for step, commit in commits.items()
    ]


def _superfluous(store: Store, attempt: int, newest_step: int, commits: dict[int, Commit | None]) -> set[str]:
    """Keys that may go, by what the listings show: files that no COMMIT names, of saves that are over (earlier steps of
    this attempt, any of earlier attempts), and quarantined COMMITs older than all others. Uploads that were broken off
    are given up at once.

    What a COMMIT names that can't be read lies in its own step's folder, or is frozen weights of whatever step.
    """
    oldest, aside = min(commits, default=0), quarantined(store)
    named = {file.key for commit in commits.values() if commit for file in commit.files}
    unknown = {step for step in aside if step >= oldest} | {step for step, commit in commits.items() if commit is None}

    def is_over(key: str) -> bool:
        match = _ATTEMPT_FILE.fullmatch(key)
        if match is None or key in named or int(match[1]) in unknown or (unknown and is_frozen_key(key)):
            return False
        step, of_attempt = int(match[1]), int(match[2])
        return of_attempt < attempt or (of_attempt == attempt and step <= newest_step)

    doomed = {f"{QUARANTINE}/{step_name(step)}.json" for step in aside if step < oldest}
    doomed |= {entry.key for entry in store.objects("step-") if is_over(entry.key)}
    store.drop_unfinished(is_over)
    return doomed
