"""Reads a commit's files again, to say that they are what was committed."""

from __future__ import annotations

import time

from muster.api.auth import Principal
from muster.api.checkpoints.routes import commit_folder, explained
from muster.api.errors import ApiError
from muster.api.jobs import service
from muster.api.services import Services
from muster.api.tables import JobRow
from muster.contract.text import size
from muster.storage.errors import StoreError
from muster.storage.listing import CommitListing, read_commit

# Of one request: ten seconds of a disk. Half of it would refuse a commit of a 1B model with its optimizer's state; a
# request that reads twice as much outlasts the time that proxies give it.
VERIFY_BYTES_MAX = 16 << 30
VERIFY_SECONDS_MAX = 300.0  # at a slow disk's 60 MB/s


async def verify_commit(services: Services, caller: Principal, job_id: str, step: int) -> tuple[int, float]:
    """Bytes and seconds of what was read. Raises ApiError checkpoint_unusable, naming the file that has changed."""
    row = await service.find(services, caller, job_id, act=True)
    began = time.monotonic()
    folder = commit_folder(row)
    with explained(folder):
        whole = await services.folders.run(folder, _verify, services.commits, row, step, seconds=VERIFY_SECONDS_MAX)
    return whole, time.monotonic() - began


def _verify(commits: CommitListing, row: JobRow, step: int) -> int:
    folder = commit_folder(row)
    store = commits.store(folder)
    with explained(folder):
        commit = read_commit(store, step)
        whole = sum(file.bytes for file in commit.files)
        if whole > VERIFY_BYTES_MAX:
            detail = (
                f"The commit of step {step} has {size(whole)}, more than the {size(VERIFY_BYTES_MAX)} that are read "
                f"here: `muster checkpoints verify {row.name} {step}` reads it where the commits lie."
            )
            raise ApiError("checkpoint_unusable", detail)
        for file in commit.files:
            try:
                store.verify(file)
            except StoreError as error:
                raise ApiError("checkpoint_unusable", f"The commit of step {step} is damaged: {error}") from error
    return whole
