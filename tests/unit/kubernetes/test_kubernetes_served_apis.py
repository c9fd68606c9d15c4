"""Schedulers' APIs may be installed after the operator: it looks again, and says when something has changed."""

import asyncio
from typing import Any, cast

import pytest
from tests.polling import WAIT_SECONDS_MAX

from muster.kube.client import ApiClient
from muster.operator.kubernetes.gangs import choice
from muster.operator.kubernetes.gangs.choice import GangSchedulers
from muster.operator.kubernetes.gangs.kueue import KueueScheduler
from muster.operator.kubernetes.gangs.workload import WorkloadGang


class Served:
    """An API server that serves what it is told to, and may fail."""

    def __init__(self) -> None:
        self.groups: list[dict[str, Any]] = []
        self.down = False

    async def get(self, path: str) -> dict[str, Any]:
        if self.down:
            raise OSError("connection refused")
        if path == "/apis":
            return {"groups": self.groups}
        return {"resources": [{"name": "workloads"}]}


def test_what_is_installed_later_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "APIS_SECONDS", 0.01)
    server = Served()

    async def main() -> None:
        changed, failed = asyncio.Event(), asyncio.Event()
        gangs = GangSchedulers(cast(ApiClient, server), lambda uid: None, lambda what, error: failed.set())
        assert not await gangs.detect()
        follows = asyncio.create_task(gangs.follow_apis(changed.set))
        server.down = True
        await asyncio.wait_for(failed.wait(), WAIT_SECONDS_MAX)
        assert not changed.is_set()
        server.groups = [
            {"name": "kueue.x-k8s.io", "versions": [{"version": "v1beta2"}]},
            {"name": "scheduling.k8s.io", "versions": [{"version": "v1"}, {"version": "v1alpha2"}]},
            {"name": "resource.k8s.io", "versions": [{"version": "v1"}]},
        ]
        server.down = False
        await asyncio.wait_for(changed.wait(), WAIT_SECONDS_MAX)
        kueue, workload = gangs._gangs["kueue"], gangs._gangs["workload"]
        assert isinstance(kueue, KueueScheduler)
        assert isinstance(workload, WorkloadGang)
        assert (kueue.version, workload.version) == ("v1beta2", "v1alpha2")
        assert gangs.claims_served
        follows.cancel()

    asyncio.run(main())
