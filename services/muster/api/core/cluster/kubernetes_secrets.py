"""Secrets of projects as Kubernetes Secrets, written without the right to read any.

RBAC knows no labels, so the API sees to it itself that it changes no Secret of others: a change holds only where the
Secret's labels say that it is the project's (a `test` of JSON Patch, judged by the API server).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from muster.api.core.cluster.cluster import SecretName, SecretRefused
from muster.kube import paths
from muster.kube.client import JSON_PATCH, METADATA, ApiClient, Object
from muster.kube.errors import ApiError
from muster.words.names import Label

_MANAGER = "app.kubernetes.io/managed-by"


async def write(client: ApiClient, secret: SecretName, data: Mapping[str, str]) -> None:
    """Make the Secret, or replace its entries. Raises SecretRefused, OSError."""
    meta = {"name": secret.name, "namespace": secret.namespace, "labels": _labels(secret)}
    body: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": dict(data)}
    try:
        await client.create(paths.core(secret.namespace, "secrets"), body, accept=METADATA)
        return
    except ApiError as error:
        if error.reason != "AlreadyExists":
            raise _refused(error, secret, patched=False) from None
    try:
        # `add` replaces all that is there; entries that are not in `data` any more go with it.
        encoded = {"op": "add", "path": "/data", "value": {key: _base64(value) for key, value in data.items()}}
        await _patch(client, secret, encoded)
    except ApiError as error:
        raise _refused(error, secret) from None


async def delete(client: ApiClient, secret: SecretName) -> None:
    """Raises SecretRefused, OSError."""
    try:
        meta = (await _patch(client, secret))["metadata"]
        same = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        await client.remove(_path(secret), {"preconditions": same})
    except ApiError as error:
        if error.status != 404:
            raise _refused(error, secret) from None


async def _patch(client: ApiClient, secret: SecretName, *changes: Object) -> Object:
    """Change the Secret if it is the project's, and return its metadata."""
    tests = [
        {"op": "test", "path": f"/metadata/labels/{label.replace('/', '~1')}", "value": value}
        for label, value in _labels(secret).items()
    ]
    return await client.patch(_path(secret), [*tests, *changes], kind=JSON_PATCH, accept=METADATA)


def _refused(error: ApiError, secret: SecretName, patched: bool = True) -> SecretRefused:
    where = f"namespace {secret.namespace!r}"
    if error.status == 403:
        return SecretRefused(
            f"Muster's API may not write Secrets in {where}; whoever runs it names the namespace in the chart's "
            "api.secrets.namespaces"
        )
    if patched and error.status in (409, 422):  # a `test` failed; or the Secret changed between two calls
        return SecretRefused(
            f"there is a Secret {secret.name!r} in {where} that Muster did not make for project {secret.project!r}: "
            "it stays as it is; choose another name, or delete it by kubectl"
        )
    if error.status == 404:
        return SecretRefused(f"there is no {where}; whoever runs the cluster makes it")
    return SecretRefused(f"the cluster does not keep the Secret (status {error.status}, {error.reason or 'no reason'})")


def _labels(secret: SecretName) -> dict[str, str]:
    return {_MANAGER: "muster", Label.PROJECT: secret.project}


def _path(secret: SecretName) -> str:
    return paths.core(secret.namespace, "secrets", secret.name)


def _base64(value: str) -> str:
    return base64.b64encode(value.encode()).decode()
