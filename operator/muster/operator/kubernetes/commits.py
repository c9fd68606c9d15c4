"""Checkpoints of jobs, listed only when something indicates new ones."""

from __future__ import annotations

import time

from muster.operator.commit_lookup import CommitLookup, KnownCommits
from muster.operator.kubernetes import observe
from muster.operator.kubernetes.heartbeats import HeartbeatCache
from muster.operator.kubernetes.jobs import CachedJob
from muster.operator.kubernetes.pods import PodState
from muster.operator.pacing import COMMITS_SECONDS
from muster.storage.errors import StoreError
from muster.storage.listing import CommitListing, CommitSummary
from muster.words.address import parse_address


class JobCommits:
    """The newest commits of each job, as last listed. Heartbeats announce a newer one to list."""

    def __init__(self, heartbeats: HeartbeatCache) -> None:
        self._heartbeats = heartbeats
        self._listing = CommitListing()
        self._lookup = CommitLookup(self._list)
        self._by_uid: dict[str, tuple[float, KnownCommits]] = {}  # job uid → when listed, newest

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self._by_uid.pop(uid, None)
        self._lookup.forget(uid)

    async def of(self, job: CachedJob, folder: str, pods: tuple[PodState, ...], fresh: bool) -> KnownCommits:
        """Listing costs a request to the store, so it waits for a sign that there is something new."""
        listed_at, previous = self._by_uid.get(job.uid, (-1e9, KnownCommits()))
        beats = (beat for pod in pods for beat in observe.last_heartbeat(pod) or self._heartbeats.of(pod))
        reported_step = max((beat.last_commit_step or 0 for beat in beats), default=0)
        if not job.status.attempt:
            return previous
        is_news = reported_step > (previous.committed.step if previous.committed else 0)
        if not fresh and not is_news and time.monotonic() - listed_at < COMMITS_SECONDS:
            return previous
        commits = await self._lookup.look(job.uid, folder)
        self._by_uid[job.uid] = (time.monotonic(), commits)
        return commits

    def _list(self, folder: str) -> tuple[CommitSummary, ...]:
        address = parse_address(folder)
        if address.scheme == "file" and not address.local.parent.is_dir():
            raise StoreError(
                f"the checkpoint folder {address.local.parent} can't be seen by the operator, so no checkpoint of the "
                "job can be found; mount its volume into the operator too, or use an s3:// address"
            )
        return self._listing.read(address)
