"""Which commits a folder holds, and the one way to add one."""

from __future__ import annotations

from typing import Literal

from muster.contract.checkpoint import COMMITS, Commit, commit_key, parse_commit, sealed, step_of_commit_key
from muster.storage.errors import NotFound
from muster.storage.store import Store, open_store
from muster.trainer.checkpoint.failures import CheckpointError, DamagedCommit, GoneCommit
from muster.trainer.errors import StaleAttempt


def list_commits(folder: str) -> tuple[int, ...]:
    """Steps of the commits in a job's checkpoint folder, ascending. Raises StoreError where it can't be listed."""
    return steps_in(open_store(folder))


def steps_in(store: Store) -> tuple[int, ...]:
    found = (step_of_commit_key(entry.key) for entry in store.objects(f"{COMMITS}/"))
    return tuple(sorted(step for step in found if step is not None))


def read_commit(folder: str, step: int | Literal["best", "last"]) -> Commit:
    """One COMMIT. `best`: the newest that was best when it was made, the newest of all where none was.

    Raises CheckpointError where there is none, or it can't be read.
    """
    return commit_in(open_store(folder), step)


def commit_in(store: Store, step: int | Literal["best", "last"]) -> Commit:
    if isinstance(step, int):
        return parse(_read(store, step), f"{store.uri}/{commit_key(step)}")
    steps = steps_in(store)
    if not steps:
        raise CheckpointError(
            f"{store.uri}: holds no commit; give the folder <checkpoint.uri>/<job uid> of a job that saved one"
        )
    if step == "best":
        for candidate in reversed(steps):
            commit = commit_in(store, candidate)
            if commit.best:
                return commit
    return commit_in(store, steps[-1])


def parse(data: bytes, where: str) -> Commit:
    """Raises DamagedCommit for anything but a COMMIT as it was sealed, of a version that is known here."""
    try:
        return parse_commit(data)
    except ValueError as error:
        raise DamagedCommit(f"{where}: can't be read as a COMMIT: {str(error).splitlines()[0]}") from error


def publish(store: Store, commit: Commit) -> None:
    """Write the COMMIT, exclusively. The caller has verified every file and confirmed the attempt.

    An older attempt's commit of this step (this attempt resumed from before it) gives way; a newer attempt's means that
    this attempt is stale: raises StaleAttempt.
    """
    key, data = commit_key(commit.step), sealed(commit)
    for _ in range(3):
        if store.create(key, data):
            return
        try:
            there = parse(store.read(key), f"{store.uri}/{key}")
        except NotFound:
            continue
        except CheckpointError:
            there = None
        if there is not None and there.job_uid == commit.job_uid and there.attempt > commit.attempt:
            raise StaleAttempt(
                f"step {commit.step} was already committed by attempt {there.attempt}, newer than {commit.attempt}"
            )
        if there is not None and (there.attempt, there.files) == (commit.attempt, commit.files):
            return  # a retry of our own write
        return store.replace(key, data)
    raise CheckpointError(
        f"{store.uri}/{key}: somebody else keeps writing it; two jobs must not share a checkpoint folder"
    )


def _read(store: Store, step: int) -> bytes:
    try:
        return store.read(commit_key(step))
    except NotFound as error:
        raise GoneCommit(f"{store.uri}/{commit_key(step)}: step {step} is not committed") from error
