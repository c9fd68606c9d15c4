"""ConfigMaps between the API and a cluster: limits for its admission policy, quotas for its operator, whose report of
the nodes is read."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping

from muster.api.core.admission_policy import LIMITS
from muster.kube import paths
from muster.kube.client import ApiClient, Object
from muster.kube.errors import ApiError
from muster.words.base import dump_json
from muster.words.fleet import NODES, NODES_KEY, FleetReport
from muster.words.quotas import QUOTAS, ProjectQuota


async def read_nodes(client: ApiClient, namespace: str) -> FleetReport | None:
    """Return the operator's report, or None if it has not made one yet. Raises ApiError, and ValueError for a report
    that can't be read."""
    try:
        item = await client.get(paths.core(namespace, "configmaps", NODES))
    except ApiError as error:
        if error.status != 404:
            raise
        return None
    packed = base64.b64decode((item.get("binaryData") or {}).get(NODES_KEY, ""))
    try:
        return FleetReport.model_validate_json(zlib.decompress(packed))
    except zlib.error as error:
        raise ValueError(f"ConfigMap {namespace}/{NODES} can't be understood: {error}") from error


async def write_quotas(client: ApiClient, namespace: str, quotas: Mapping[str, ProjectQuota | None]) -> None:
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


async def write_limits(client: ApiClient, namespace: str, entries: Mapping[str, str]) -> None:
    """Write all limits in place of the previous ones. Raises ApiError."""
    meta = {"name": LIMITS, "namespace": namespace, "labels": {"app.kubernetes.io/managed-by": "muster"}}
    body: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": dict(entries)}
    try:
        await client.put(paths.core(namespace, "configmaps", LIMITS), body)
    except ApiError as error:
        if error.status != 404:
            raise
        await client.create(paths.core(namespace, "configmaps"), body)
