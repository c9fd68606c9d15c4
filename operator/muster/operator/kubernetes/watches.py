"""The watches of a cluster: jobs, nodes, pods, and what is served only by some clusters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from muster.kube import paths
from muster.kube.client import ApiClient
from muster.kube.watch import ObjectCache, Reflector
from muster.operator.kubernetes.change_queue import ChangeQueue
from muster.operator.kubernetes.fleet import FleetView
from muster.operator.kubernetes.gangs.choice import GangSchedulers
from muster.operator.kubernetes.jobs import JobStore
from muster.operator.kubernetes.nodes import NodeCache
from muster.operator.kubernetes.pods import FIELDS, PodCache
from muster.operator.kubernetes.render import SCHEDULER_LABEL
from muster.words.names import Label

# Pods that somebody else placed and that still use their node.
_OTHERS_FIELDS = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"


class ApiWatches:
    """Watches of the API server, which keep the caches up to date.

    `only` is the namespace that is served, or empty for all. `on_error` is called with what fails, which is tried
    again. A watch that is silent for `silence_seconds` is believed dead.
    """

    def __init__(
        self,
        client: ApiClient,
        only: str,
        jobs: JobStore,
        pods: PodCache,
        nodes: NodeCache,
        fleet: FleetView,
        on_error: Callable[[str, Exception], None],
        silence_seconds: float,
    ) -> None:
        self._client, self._jobs, self._fleet = client, jobs, fleet
        self._on_error, self._silence_seconds = on_error, silence_seconds
        jobs_path = paths.jobs(only) if only else paths.JOBS
        pods_path = paths.core(only, "pods") if only else paths.PODS
        others = f"{SCHEDULER_LABEL}!=builtin"
        self._reflectors = [
            self._reflector(jobs_path, jobs),
            self._reflector(paths.NODES, nodes),
            Reflector(client, pods_path, pods, on_error, silence_seconds, FIELDS, labelSelector=Label.JOB_UID),
            Reflector(
                client, pods_path, fleet.others, on_error, silence_seconds,
                labelSelector=others, fieldSelector=_OTHERS_FIELDS,
            ),
        ]  # fmt: skip

    async def listed(self) -> None:
        """Return once everything was listed that a look at a job rests on."""
        for reflector in self._reflectors:
            await reflector.listed.wait()

    async def start(self, group: asyncio.TaskGroup, gangs: GangSchedulers, changes: ChangeQueue) -> None:
        """Follow everything within `group`. Priority classes and slices are not waited for: they may be forbidden."""
        group.create_task(self._reflector(paths.PRIORITIES, self._fleet.priorities).run())
        for reflector in self._reflectors:
            group.create_task(reflector.run())
        await gangs.detect()
        followed: set[str] = set()

        def follow_slices() -> None:
            if gangs.claims_served and paths.SLICES not in followed:
                followed.add(paths.SLICES)
                group.create_task(self._reflector(paths.SLICES, self._fleet.slices).run())

        def look_again() -> None:
            follow_slices()
            for job in self._jobs.all():
                if job.spec.gang.scheduler.kind != "builtin" and not job.status.phase.terminal:
                    changes.enqueue(job.uid)

        follow_slices()
        group.create_task(gangs.follow_apis(look_again))

    def _reflector(self, path: str, cache: ObjectCache) -> Reflector:
        return Reflector(self._client, path, cache, self._on_error, self._silence_seconds)
