"""An API whose mirror has yet to read the cluster is not ready, and locks nobody out while it does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import select
from tests.integration.api.platform import document, platform, until
from tests.polling import WAIT_SECONDS_MAX

from muster.api.core.cluster.cluster import FoundJob, LocalJobCluster
from muster.api.core.database.tables import MirrorRow
from muster.api.core.mirror import TOGETHER, ClusterMirror
from muster.api.core.observability import ApiMetrics
from muster.api.tenants.usage.repository import UsageRecorder
from muster.local.cluster import LocalCluster, RawChange
from muster.recipe.document import parse_job
from muster.words.state_folder import StateFolder

JOBS = 2 * TOGETHER + 10


class Relisted(LocalJobCluster):
    """A cluster that was listed anew: what changed meanwhile has one version, as with Kubernetes. Before the last of it
    is read it waits to be `released`."""

    def __init__(self, cluster: LocalCluster, last: str) -> None:
        super().__init__(cluster)
        self._last = last
        self.reached, self.released = asyncio.Event(), asyncio.Event()

    async def changes(self, after_version: int, limit: int) -> list[RawChange]:
        version = await self.version()
        found = await super().changes(0, 10 * JOBS)
        return [
            RawChange(version, each.uid, each.at, each.gone, each.status) for each in found if after_version < version
        ]

    async def find(self, uid: str) -> FoundJob | None:
        if uid == self._last:
            self.reached.set()
            await self.released.wait()
        return await super().find(uid)


class Busy(LocalJobCluster):
    """A cluster in which a job is made whenever somebody looks."""

    name = "busy"

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(cluster)
        self.looks = 0

    async def version(self) -> int:
        self.looks += 1
        self._cluster.create(f"job-{self.looks}", "default", parse_job(document()).spec, {})
        return await super().version()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def options(request: pytest.FixtureRequest) -> dict[str, str]:
    if request.param == "sqlite":
        return {}
    server = request.getfixturevalue("postgres")
    return {"database_url": server.url(server.new_database(request.getfixturevalue("migrated")))}


async def test_a_cancel_goes_through_while_the_mirror_catches_up(tmp_path: Path, options: dict[str, str]) -> None:
    (tmp_path / "cluster").mkdir()
    there = LocalCluster(StateFolder(tmp_path).cluster)
    spec = parse_job(document()).spec
    uids = [there.create(f"job-{number}", "default", spec, {}).metadata.uid for number in range(JOBS)]
    cluster = Relisted(there, uids[-1])
    async with platform(tmp_path, cluster, **options) as here:
        await asyncio.wait_for(cluster.reached.wait(), WAIT_SECONDS_MAX)
        ready = await here.client.get("/readyz")
        assert ready.status_code == 503
        found = ready.json()["checks"]["mirror"]
        assert found == {"ok": False, "detail": f"catching up, {2 * TOGETHER} of {JOBS}"}
        cancelled = await here.client.post(f"/api/v1/jobs/{uids[0]}:cancel")
        assert cancelled.status_code == 200, cancelled.text
        async with here.services.database.read() as session:
            cursor = (await session.scalars(select(MirrorRow.version))).one()
        assert cursor == 0, "what is half read is read again after a crash"
        cluster.released.set()

        async def is_ready() -> bool:
            return (await here.client.get("/readyz")).status_code == 200

        await until(is_ready, "the mirror to catch up")
        assert {job["id"] for job in (await here.get("/jobs", limit=JOBS))["items"]} == set(uids)


async def test_a_cluster_that_always_has_news_is_caught_up_with(tmp_path: Path) -> None:
    """All that was there at the start is read, though no look ever finds nothing new."""
    state = tmp_path / "busy"
    (state / "cluster").mkdir(parents=True)
    busy = Busy(LocalCluster(StateFolder(state).cluster))
    async with platform(tmp_path / "idle") as here:
        mirror = ClusterMirror(here.services.database, busy, here.services.hub, ApiMetrics(), UsageRecorder())
        assert mirror.behind()
        await mirror.step()
        assert mirror.caught_up
        assert busy.looks == 1
