"""Quotas of projects, written into the ConfigMap that a cluster's operator reads."""

from __future__ import annotations

from collections.abc import Mapping

from muster.contract.base import dump_json
from muster.contract.quotas import QUOTAS, ProjectQuota
from muster.kube import paths
from muster.kube.client import Client, Object
from muster.kube.errors import ApiError


async def write_quotas(client: Client, namespace: str, quotas: Mapping[str, ProjectQuota | None]) -> None:
    """Say what these projects may hold; None for no limit. What is written there of others stays. Raises ApiError."""
    data = {project: dump_json(quota) if quota else None for project, quota in quotas.items()}
    try:
        await client.patch(paths.core(namespace, "configmaps", QUOTAS), {"data": data})
    except ApiError as error:
        if error.status != 404:
            raise
        meta = {"name": QUOTAS, "namespace": namespace, "labels": {"app.kubernetes.io/managed-by": "muster"}}
        given = {project: text for project, text in data.items() if text}
        body: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": given}
        if given:
            await client.create(paths.core(namespace, "configmaps"), body)
