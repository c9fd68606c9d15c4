"""Commits of a folder: listing, reading and publishing them."""

from __future__ import annotations

from typing import Literal

from muster.storage.commits import COMMIT_BYTES_MAX, InvalidCommit, NewerCommit, parse_commit, refuse_program
from muster.storage.errors import NotFound, UnfitObject
from muster.storage.listing import steps_in
from muster.storage.opening import open_store
from muster.storage.store import Store
from muster.trainer.checkpoint.failures import CheckpointError, DamagedCommit, GoneCommit, UnknownFormat
from muster.trainer.errors import StaleAttempt
from muster.words.address import parse_address
from muster.words.checkpoint import Commit, commit_key, sealed

# What is wrong once or twice may have been damaged on its way; wrong three times, it is damaged where it lies.
READS_OF_THE_STORE = 3


def list_commits(folder: str) -> tuple[int, ...]:
    """Steps of the commits in a job's checkpoint folder, ascending. Raises StoreError where it can't be listed."""
    return steps_in(open_store(folder))


def read_commit(folder: str, step: int | Literal["best", "last"]) -> Commit:
    """Read the COMMIT of a model. `best` is the newest commit that was best when it was made, or the newest of all
    where none was.

    Raises CheckpointError where there is none, or it can't be read, UserError where it is a folder of a program's.
    """
    commit = commit_in(open_store(folder, links=False), step)
    refuse_program(commit, folder)
    return commit


def commit_in(store: Store, step: int | Literal["best", "last"], own: bool = False) -> Commit:
    """Read a commit as `read_commit` does, in a store that is open. `own` means what it does for `parse`."""
    if isinstance(step, int):
        return read_and_parse(store, step, own)[0]
    steps = steps_in(store)
    if not steps:
        raise GoneCommit(
            f"{store.uri}: holds no checkpoint; give the folder <checkpoint.uri>/<job uid> of a job that saved one"
        )
    if step == "best":
        for candidate in reversed(steps):
            commit = commit_in(store, candidate)
            if commit.best:
                return commit
    return commit_in(store, steps[-1])


def read_and_parse(store: Store, step: int, own: bool = False) -> tuple[Commit, bytes]:
    """A COMMIT and its bytes as they are stored. What is not there or does not parse is asked for again: one answer may
    be wrong.

    Raises GoneCommit, StoreError, and what `parse` raises.
    """
    for reads_left in reversed(range(READS_OF_THE_STORE)):
        try:
            data = _read(store, step)
            return parse(data, store, step, own), data
        except (DamagedCommit, UnknownFormat, GoneCommit):
            if not reads_left:
                raise
    raise AssertionError("a COMMIT is read at least once")


def _read(store: Store, step: int) -> bytes:
    try:
        return store.read(commit_key(step), COMMIT_BYTES_MAX)
    except NotFound as error:
        raise GoneCommit(f"{store.uri}/{commit_key(step)}: step {step} is not committed") from error
    except UnfitObject as error:
        raise DamagedCommit(str(error)) from error


def parse(data: bytes, store: Store, step: int, own: bool = False) -> Commit:
    """Make a Commit of the bytes of a COMMIT.

    `own` tells that this is the folder of the job itself, so the COMMIT must have been made in it. What others read may
    be a copy that was given another name. Raises UnknownFormat for a newer Muster's COMMIT, DamagedCommit for what is
    no sound COMMIT of this step.
    """
    where = f"{store.uri}/{commit_key(step)}"
    try:
        return parse_commit(data, step=step, folder=parse_address(store.uri).name if own else None)
    except NewerCommit as error:
        raise UnknownFormat(f"{where}: {error}") from None
    except InvalidCommit as error:
        raise DamagedCommit(f"{where}: can't be read as a COMMIT: {error}") from None


def publish(store: Store, commit: Commit) -> None:
    """Write the COMMIT, exclusively. The caller has verified every file and confirmed the attempt.

    An older attempt's commit of this step (this attempt resumed from before it) gives way; a newer attempt's means that
    this attempt is stale: raises StaleAttempt. Raises CheckpointError rather than publish what nobody would read, or
    replace a newer Muster's commit.
    """
    key, data = commit_key(commit.step), sealed(commit)
    parse(data, store, commit.step, own=True)
    for _ in range(3):
        if store.create(key, data):
            return
        try:
            there = commit_in(store, commit.step, own=True)
        except GoneCommit:
            continue
        except DamagedCommit:
            return store.replace(key, data)
        if there.attempt > commit.attempt:
            raise StaleAttempt(
                f"step {commit.step} was already committed by attempt {there.attempt}, newer than {commit.attempt}"
            )
        if (there.attempt, there.files) == (commit.attempt, commit.files):
            return  # a retry of our own write
        return store.replace(key, data)
    raise CheckpointError(
        f"{store.uri}/{key}: somebody else keeps writing it; two jobs must not share a checkpoint folder"
    )
