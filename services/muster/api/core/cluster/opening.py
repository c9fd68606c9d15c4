"""The cluster that the settings name, opened and closed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from muster.api.core.cluster.cluster import JobCluster, LocalJobCluster
from muster.api.core.settings import ApiSettings
from muster.local.cluster import LocalCluster
from muster.secrets.box import SecretBox, SecretsLocked

log = structlog.get_logger("muster.api")


@contextlib.asynccontextmanager
async def open_cluster(
    settings: ApiSettings, cluster: JobCluster | None, live: Callable[[], Awaitable[set[str]]]
) -> AsyncIterator[JobCluster]:
    if cluster is not None or settings.cluster == "local":
        yield cluster or _local_cluster(settings)
        return
    from muster.api.core.cluster.kubernetes_cluster import KubernetesCluster
    from muster.kube.client import ApiClient
    from muster.kube.connection import connect

    # Any number of connections: each log that is followed holds one.
    async with ApiClient(connect(settings.kubeconfig), "muster-api", at_once=0) as client:
        there = KubernetesCluster(client, live, settings.layout, settings.watch_namespace)
        try:
            yield there
        finally:
            await there.close()


def _local_cluster(settings: ApiSettings) -> LocalJobCluster:
    box = SecretBox(settings.secret_key_file or settings.layout.secret_key, settings.secret_kms_key_id)
    local = LocalJobCluster(LocalCluster(settings.layout.cluster), box)
    try:
        if lost := local.renew_secrets():
            log.warning("no key opens these secrets: set them anew, or put their key back", secrets=", ".join(lost))
    except SecretsLocked as locked:  # jobs without secrets go on
        log.warning("secrets can't be used", cause=str(locked))
    return local
