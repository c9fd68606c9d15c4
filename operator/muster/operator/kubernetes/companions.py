"""Objects alongside a gang's pods: names, network access, permissions and device claims. Pure."""

from __future__ import annotations

import hashlib

from muster.kube.client import Object
from muster.operator.kubernetes.jobs import CachedJob
from muster.operator.kubernetes.render import (
    CLAIMS_API,
    OURS,
    RENDEZVOUS_PORT,
    REPORT_PORT,
    WORKERS,
    SiteSettings,
    claimed_by,
    claims_name,
    labels_of,
    owner_reference,
)
from muster.words.names import Label

RBAC = "rbac.authorization.k8s.io"
WORKER_ROLE = "muster-worker"  # a role of the chart: get TrainingJobs, nothing else
NAME_LENGTH_MAX = 253


def service(namespace: str) -> Object:
    """Host names for all workers of a namespace, those that are not ready yet included: they meet before they are."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": WORKERS, "namespace": namespace, "labels": OURS},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": OURS,
            "ports": [
                {"name": "rendezvous", "protocol": "TCP", "port": RENDEZVOUS_PORT, "targetPort": RENDEZVOUS_PORT}
            ],
        },
    }


def network_policy(job: CachedJob, site: SiteSettings) -> Object | None:
    """The policy that lets a job's workers reach each other on every port, and who watches them reach the report port.

    None if everybody may reach them.
    """
    if not site.report_from:
        return None
    members = {"matchLabels": {Label.JOB_UID: job.uid}}
    watching: Object = {"from": list(site.report_from), "ports": [{"protocol": "TCP", "port": REPORT_PORT}]}
    meeting = [{"from": [{"podSelector": members}]}] if job.spec.gang.nodes.max > 1 else []
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": f"{job.name}-{WORKERS}",
            "namespace": job.namespace,
            "labels": labels_of(job),
            "ownerReferences": [owner_reference(job)],
        },
        "spec": {"podSelector": members, "policyTypes": ["Ingress"], "ingress": [*meeting, watching]},
    }


def fence_binding(namespace: str, account: str, namespaced: bool) -> Object:
    """Pods of that account may read the namespace's TrainingJobs: their fence (docs/decisions/0011)."""
    name = f"{WORKER_ROLE}-{account}"
    if len(name) > NAME_LENGTH_MAX:
        name = f"{WORKER_ROLE}-{hashlib.sha256(account.encode()).hexdigest()[:32]}"
    kind = "Role" if namespaced else "ClusterRole"
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/managed-by": "muster"}},
        "roleRef": {"apiGroup": RBAC, "kind": kind, "name": WORKER_ROLE},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
    }


def claim_template(job: CachedJob) -> Object | None:
    """The template of each worker's claim; None where device plugins are asked instead."""
    if not (claimed := claimed_by(job)):
        return None
    counts: dict[str, Object] = {
        "gpus": {"allocationMode": "ExactCount", "count": job.spec.gang.gpus_per_node},
        "efa": {"allocationMode": "All"},  # however many the node was launched with
    }
    requests = [{"name": what, "exactly": {"deviceClassName": name} | counts[what]} for what, name in claimed.items()]
    return {
        "apiVersion": CLAIMS_API,
        "kind": "ResourceClaimTemplate",
        "metadata": {
            "name": claims_name(job.name),
            "namespace": job.namespace,
            "labels": labels_of(job),
            "ownerReferences": [owner_reference(job)],
        },
        "spec": {"spec": {"devices": {"requests": requests}}},
    }
