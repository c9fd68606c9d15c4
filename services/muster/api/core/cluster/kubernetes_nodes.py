"""Report of the nodes by a cluster's operator, read from its ConfigMap."""

from __future__ import annotations

import base64
import zlib

from muster.contract.fleet import NODES, NODES_KEY, FleetReport
from muster.kube import paths
from muster.kube.client import Client
from muster.kube.errors import ApiError


async def read_nodes(client: Client, namespace: str) -> FleetReport | None:
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
