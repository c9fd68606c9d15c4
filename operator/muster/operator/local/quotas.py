"""Quotas of projects, read from the local cluster's file, where the API writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from muster.local.cluster import LocalCluster
from muster.words.quotas import ProjectQuota, read_quotas


class QuotaReader:
    """`on_error` is called once for each quota that can't be read."""

    def __init__(self, cluster: LocalCluster, on_error: Callable[[Exception], None]) -> None:
        self._cluster, self._on_error = cluster, on_error
        self._quotas: Mapping[str, ProjectQuota] = {}
        self._written: Mapping[str, str] = {}

    def read(self) -> Mapping[str, ProjectQuota]:
        """Return the quotas by project."""
        written = self._cluster.quotas()
        if written != self._written:
            self._quotas, faults = read_quotas(written, self._quotas)
            self._written = written
            for fault in faults:
                self._on_error(ValueError(fault))
        return self._quotas
