"""The limits of projects, written into the ConfigMap that the chart's admission policy reads."""

from __future__ import annotations

from collections.abc import Mapping

from muster.contract.admission import LIMITS
from muster.kube import paths
from muster.kube.client import Client, Object
from muster.kube.errors import ApiError


async def write_limits(client: Client, namespace: str, entries: Mapping[str, str]) -> None:
    """Write all limits in place of the previous ones. Raises ApiError."""
    meta = {"name": LIMITS, "namespace": namespace, "labels": {"app.kubernetes.io/managed-by": "muster"}}
    body: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": dict(entries)}
    try:
        await client.put(paths.core(namespace, "configmaps", LIMITS), body)
    except ApiError as error:
        if error.status != 404:
            raise
        await client.create(paths.core(namespace, "configmaps"), body)
