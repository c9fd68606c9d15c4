"""Quotas of projects: one ConfigMap, which the API writes and admission reads at each pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from muster.kube import paths
from muster.kube.client import ApiClient
from muster.kube.errors import ApiError
from muster.words.quotas import QUOTAS, ProjectQuota, read_quotas


class QuotaReader:
    """Reader of the ConfigMap in `namespace`, which is the operator's own. `on_error` is called once for each quota
    that can't be read."""

    def __init__(self, client: ApiClient, namespace: str, on_error: Callable[[str, Exception], None]) -> None:
        self._client, self._namespace, self._on_error = client, namespace, on_error
        self._quotas: Mapping[str, ProjectQuota] = {}
        self._version = ""

    async def read(self) -> Mapping[str, ProjectQuota]:
        """Return the quotas by project; empty if there is no ConfigMap. Raises ApiError."""
        try:
            item = await self._client.get(paths.core(self._namespace, "configmaps", QUOTAS))
        except ApiError as error:
            if error.status != 404:
                raise
            self._quotas, self._version = {}, ""
            return self._quotas
        version = item["metadata"]["resourceVersion"]
        if version != self._version:
            self._quotas, faults = read_quotas(item.get("data") or {}, self._quotas)
            self._version = version
            for fault in faults:
                self._on_error(f"ConfigMap {self._namespace}/{QUOTAS}", ValueError(fault))
        return self._quotas
