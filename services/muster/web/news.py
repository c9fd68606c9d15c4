"""Detection of changed jobs: one query of the database serves all open pages."""

from __future__ import annotations

import asyncio

from muster.web import api
from muster.web.api import Services

Version = tuple[int, ...]
# For what another API process wrote; this one's own news come at once. All pages ask at the same moment.
POLL_SECONDS = 1.0
# From news to the pages: whoever made them is answered first, and what comes at nearly the same time is told once.
SETTLE_SECONDS = 0.05


class NewsBoard:
    """One per process. What was answered holds until this process hears of news, or the time to ask again has come.
    While one question is on its way, those that come gather for the next: pages that wake together cost one question.
    """

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        self._gathering: tuple[set[str], asyncio.Task[dict[str, Version]]] | None = None
        self._waiting: dict[str, asyncio.Task[None]] = {}
        self._moment = (-1, -1)
        self._versions: dict[str, Version] = {}

    async def version(self, services: Services, job_id: str) -> Version:
        """Return `newest`, but as it was when somebody asked since this process last announced news, or within
        POLL_SECONDS: for those who wait, and ask again."""
        versions = self._of_this_moment(services)
        return versions[job_id] if job_id in versions else await self.newest(services, job_id)

    async def newest(self, services: Services, job_id: str) -> Version:
        """Numbers of which one changes whenever the job, or any job for ANY_JOB, has news; none where there is no such
        job. Nothing that was committed before the call is missed. Raises ApiError where the database is away."""
        if self._gathering is None:
            job_ids: set[str] = set()
            self._gathering = job_ids, asyncio.create_task(self._ask(services, job_ids))
        job_ids, answer = self._gathering
        job_ids.add(job_id)
        return (await asyncio.shield(answer))[job_id]

    async def wait(self, services: Services, job_id: str) -> None:
        """Return at the job's next news that this process announces, at closing, or when it is time to ask again."""
        waiting = self._waiting.get(job_id)
        if waiting is None:
            waiting = self._waiting[job_id] = asyncio.create_task(self._settled(services, job_id))
            waiting.add_done_callback(lambda _: self._waiting.pop(job_id))
        await asyncio.shield(waiting)

    async def _settled(self, services: Services, job_id: str) -> None:
        """Wait for the job's next change for all its readers, so that it wakes one task instead of every stream."""
        await services.hub.wait(job_id, POLL_SECONDS - _now() % POLL_SECONDS)
        await asyncio.sleep(SETTLE_SECONDS)

    async def _ask(self, services: Services, job_ids: set[str]) -> dict[str, Version]:
        async with self._asking:
            self._gathering = None
            by_job = self._of_this_moment(services)  # news that come meanwhile begin another
            versions = await api.versions_of(services, job_ids)
            answer = {job_id: versions.get(job_id, ()) for job_id in job_ids}
            by_job |= answer
            return answer

    def _of_this_moment(self, services: Services) -> dict[str, Version]:
        moment = services.hub.wakes, int(_now() / POLL_SECONDS)
        if moment != self._moment:
            self._moment, self._versions = moment, {}
        return self._versions


def _now() -> float:
    return asyncio.get_running_loop().time()
