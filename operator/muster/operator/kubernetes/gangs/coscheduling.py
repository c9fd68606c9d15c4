"""The coscheduling plugin of kubernetes-sigs/scheduler-plugins: a PodGroup, and a label that names it."""

from __future__ import annotations

from muster.kube.client import Object
from muster.operator.kubernetes.gangs.protocol import (
    GangObject,
    GangRef,
    describe_scheduler_wait,
    minimal_resources,
    pod_group,
)
from muster.operator.kubernetes.pods import PodState

API = "scheduling.x-k8s.io/v1alpha1"
LABEL = "scheduling.x-k8s.io/pod-group"
SCHEDULER = "scheduler-plugins-scheduler"
# How long the plugin keeps the nodes of those that came first while the others are looked for.
TIMEOUT_SECONDS = 60


class CoschedulingPlugin:
    """The coscheduling plugin. `scheduler` is the name under which the cluster runs the scheduler that has it."""

    kind = "coscheduling"
    places = False
    gate: str | None = None

    def __init__(self, scheduler: str = SCHEDULER) -> None:
        self._scheduler = scheduler

    def objects(self, gang: GangRef) -> tuple[GangObject, ...]:
        spec = {
            "minMember": gang.size,
            "minResources": minimal_resources(gang),
            "scheduleTimeoutSeconds": TIMEOUT_SECONDS,
        }
        return (pod_group(API, gang, spec, "the coscheduling plugin's PodGroup (scheduler-plugins)"),)

    def decorate(self, pod: Object, gang: GangRef) -> None:
        pod["metadata"]["labels"][LABEL] = gang.group
        pod["spec"]["schedulerName"] = self._scheduler

    def refusal(self, pod: Object) -> str:
        return ""

    def status_path(self, gang: GangRef) -> str | None:
        return None  # its PodGroup counts, and says no reasons

    def waiting(self, pods: tuple[PodState, ...], group: Object | None) -> str:
        return describe_scheduler_wait("coscheduling", pods)

    def lost(self, group: Object | None) -> str:
        return ""

    def remains(self, gang: GangRef) -> tuple[str, ...]:
        return tuple(item.place for item in self.objects(gang))
