"""Kubernetes' own gang scheduling (KEP-4671). Its API moves every release, so the served version is asked for:

| 1.35 | v1alpha1 | the Workload holds the groups, pods name Workload and group            |
| 1.36 | v1alpha2 | a PodGroup of its own, made from a template of the Workload            |
| 1.37 | v1beta1  | the same, the PodGroup naming Workload and template in one reference   |
"""

from __future__ import annotations

from muster.kube.client import Object
from muster.operator.kubernetes.gangs.protocol import (
    GangObject,
    GangRef,
    UnservedApi,
    condition,
    describe_scheduler_wait,
    pod_group,
)
from muster.operator.kubernetes.pods import PodState
from muster.words.names import GROUP, KIND

API_GROUP = "scheduling.k8s.io"
VERSIONS = ("v1beta1", "v1alpha2", "v1alpha1")  # the newest first
TEMPLATE = "workers"
_NEEDS = "the Workload API"


class WorkloadGang:
    """Kubernetes' own Workload API. `version` is the one that the API server serves, or None."""

    kind = "workload"
    places = False
    gate: str | None = None

    def __init__(self, version: str | None) -> None:
        self.version = version

    def objects(self, gang: GangRef) -> tuple[GangObject, ...]:
        api, policy = self._api(), {"gang": {"minCount": gang.size}}
        owner = {"apiGroup": GROUP, "kind": KIND, "name": gang.job}
        if self.version == "v1alpha1":
            spec: Object = {"controllerRef": owner, "podGroups": [{"name": TEMPLATE, "policy": policy}]}
            return (pod_group(api, gang, spec, _NEEDS, "Workload"),)
        template = {"name": TEMPLATE, "schedulingPolicy": policy} | _topology(gang)
        workload = {"controllerRef": owner, "podGroupTemplates": [template]}
        group: Object = {"schedulingPolicy": policy} | _topology(gang)
        if self.version == "v1alpha2":
            reference = {"workloadName": gang.group, "podGroupTemplateName": TEMPLATE}
            group["podGroupTemplateRef"] = {"workload": reference}
        else:
            group["workloadRef"] = {"workloadName": gang.group, "templateName": TEMPLATE}
        return (pod_group(api, gang, workload, _NEEDS, "Workload"), pod_group(api, gang, group, _NEEDS))

    def decorate(self, pod: Object, gang: GangRef) -> None:
        if self.version == "v1alpha1":
            pod["spec"]["workloadRef"] = {"name": gang.group, "podGroup": TEMPLATE}
        else:
            pod["spec"]["schedulingGroup"] = {"podGroupName": gang.group}

    def refusal(self, pod: Object) -> str:
        """An API server without the feature drops the reference silently (kubernetes/enhancements#6076)."""
        if "schedulingGroup" in pod["spec"] or "workloadRef" in pod["spec"]:
            return ""
        return "the API server dropped the pod's reference to its group: switch on its feature gate GenericWorkload"

    def status_path(self, gang: GangRef) -> str | None:
        return None if self.version == "v1alpha1" else self.objects(gang)[-1].place

    def waiting(self, pods: tuple[PodState, ...], group: Object | None) -> str:
        verdict = condition(group, "PodGroupScheduled") or condition(group, "PodGroupInitiallyScheduled")
        return describe_scheduler_wait(
            "the scheduler", pods, verdict.get("message", "") if verdict.get("status") == "False" else ""
        )

    def lost(self, group: Object | None) -> str:
        return ""

    def remains(self, gang: GangRef) -> tuple[str, ...]:
        return tuple(item.place for item in reversed(self.objects(gang))) if self.version else ()

    def _api(self) -> str:
        if self.version is None:
            raise UnservedApi(
                f"the API server serves no Workload of {API_GROUP}; Kubernetes has it from 1.35 on, behind the feature "
                "gates GenericWorkload and GangScheduling, and its API is switched on by --runtime-config"
            )
        return f"{API_GROUP}/{self.version}"


def _topology(gang: GangRef) -> Object:
    required = gang.spec.gang.topology.required
    return {"schedulingConstraints": {"topology": [{"key": required}]}} if required else {}
