"""Plays coscheduling, Volcano and KAI, as far as their contract with us goes: pods that name one of their groups are
bound together once as many are there as the group says, and not before `open` is set.
"""

import asyncio
import contextlib
import itertools

from muster.kube import paths
from muster.kube.client import ApiClient, Object

# schedulerName → (API of its PodGroup, where a pod names its group)
KINDS = {
    "scheduler-plugins-scheduler": ("scheduling.x-k8s.io/v1alpha1", ("labels", "scheduling.x-k8s.io/pod-group")),
    "volcano": ("scheduling.volcano.sh/v1beta1", ("annotations", "scheduling.k8s.io/group-name")),
    "kai-scheduler": ("scheduling.run.ai/v2alpha2", ("annotations", "pod-group-name")),
}


class StandInScheduler:
    def __init__(self, client: ApiClient, nodes: list[str]) -> None:
        self.open = asyncio.Event()
        self._client, self._nodes = client, itertools.cycle(nodes)

    async def run(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                await self._look()
            await asyncio.sleep(0.1)  # not a wait: a scheduler looks again

    async def _look(self) -> None:
        waiting: dict[tuple[str, str], list[Object]] = {}
        for pod in (await self._client.get(paths.core("team", "pods")))["items"]:
            kind = KINDS.get(pod["spec"].get("schedulerName", ""))
            if kind and "nodeName" not in pod["spec"] and "deletionTimestamp" not in pod["metadata"]:
                place, key = kind[1]
                waiting.setdefault((kind[0], pod["metadata"][place][key]), []).append(pod)
        for (api, name), pods in waiting.items():
            group = await self._client.get(paths.group(api, "team", "podgroups", name))
            if self.open.is_set() and len(pods) >= group["spec"]["minMember"]:
                for pod in pods:
                    await self._bind(pod["metadata"]["name"])

    async def _bind(self, pod: str) -> None:
        target = {"apiVersion": "v1", "kind": "Node", "name": next(self._nodes)}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
        await self._client.create(f"{paths.core('team', 'pods', pod)}/binding", body)
