"""A cluster by the official `kubernetes` client, which every kind of kubeconfig works with, exec plugins included.

Imported only where `--context` or `muster doctor` ask for it, for it takes long to load. Why the operator has a client
of its own: docs/decisions/0010.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.cli.errors import CliError, ExitStatus, usage
from muster.kube.tls import api_server_context
from muster.words.names import GROUP, VERSION
from muster.words.text import nearest

PLURAL = "trainingjobs"
# (to connect, to read): a server that accepts and never answers is not waited for without end.
TIMEOUT_SECONDS = (5.0, 20.0)


@dataclass(frozen=True)
class NamedCluster:
    """A cluster by the name of its context. `namespace` is the context's, unless another was asked for."""

    context: str
    namespace: str
    api: Any  # kubernetes.client.ApiClient

    def core(self) -> Any:
        from kubernetes import client

        return client.CoreV1Api(self.api)

    def custom(self) -> Any:
        from kubernetes import client

        return client.CustomObjectsApi(self.api)

    def close(self) -> None:
        self.api.close()


def connect_cluster(context: str | None, namespace: str | None = None) -> NamedCluster:
    """The context of that name, or the current one for None. Raises CliError (exit 2) for a kubeconfig without it."""
    try:
        from kubernetes import client, config
        from kubernetes.config import kube_config
    except ImportError:
        raise usage(
            "the official kubernetes client is not installed", "pip install 'muster-train[cli]'", "no-kubernetes-client"
        ) from None
    try:
        merged = kube_config.KubeConfigMerger(kube_config.KUBE_CONFIG_DEFAULT_LOCATION).config
    except config.ConfigException as error:
        raise usage(f"there is no usable kubeconfig: {error}", "set KUBECONFIG", "no-kubeconfig") from None
    if merged is None:
        where = kube_config.KUBE_CONFIG_DEFAULT_LOCATION
        raise usage(f"there is no kubeconfig at {where}", "set KUBECONFIG", "no-kubeconfig")
    contents = _plain(merged)
    named = {each["name"]: _plain(each).get("context") or {} for each in contents.get("contexts") or ()}
    name = context or contents.get("current-context") or ""
    if name not in named:
        near = nearest(name, named)
        hint = f"did you mean {near!r}?" if near else f"the contexts are: {', '.join(sorted(named)) or 'none'}"
        raise usage(f"the kubeconfig has no context {name!r}", hint, "no-context")
    settings = client.Configuration()
    settings.retries = 1
    try:
        config.load_kube_config(context=name, client_configuration=settings)
    except config.ConfigException as error:
        raise usage(f"context {name!r} can't be used: {error}", code="bad-context") from None
    api = client.ApiClient(settings)
    api.user_agent = "muster-cli"
    tls = api_server_context(Path(settings.ssl_ca_cert).read_text() if settings.ssl_ca_cert else None)
    if not settings.verify_ssl:
        tls.check_hostname = False
    api.rest_client.pool_manager.connection_pool_kw["ssl_context"] = tls
    return NamedCluster(name, namespace or _plain(named[name]).get("namespace") or "default", api)


def _plain(node: Any) -> dict[str, Any]:
    """The mapping inside of the client's ConfigNode, which only serves its error messages."""
    return dict(getattr(node, "value", node))


@contextlib.contextmanager
def cluster_errors(cluster: NamedCluster, doing: str) -> Iterator[None]:
    """Raise refusals and silence of the API server as a CliError that says what was being done."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ApiException as error:
        raise _refused(cluster, doing, error) from None
    except (HTTPError, OSError) as error:
        reason = str(getattr(error, "reason", "") or error) or type(error).__name__
        raise CliError(
            f"the cluster of context {cluster.context!r} does not answer: {reason}",
            ExitStatus.UNREACHABLE,
            "unreachable",
            next_step=f"`kubectl --context {cluster.context} get --raw /readyz` says whether it is there",
        ) from None


def _refused(cluster: NamedCluster, doing: str, error: Any) -> CliError:
    message = message_of(error)
    next_step, exit_code = "", ExitStatus.FAILED
    if error.status == 401:
        next_step = "log in again: the kubeconfig's credentials are not accepted"
    elif error.status == 403:
        next_step = f"`muster doctor --context {cluster.context}` lists the rights that are missing"
    elif error.status == 404 and "page not found" in str(error.body):  # no such kind, so no Status object either
        message = "the cluster knows no TrainingJobs"
        next_step = (
            f"install Muster there (docs/install.md); `muster doctor --context {cluster.context}` says what lacks"
        )
    elif error.status in (400, 422):
        exit_code = ExitStatus.USAGE
    return CliError(f"can't {doing}: {message}", exit_code, f"kubernetes-{error.status}", next_step=next_step)


def message_of(error: Any) -> str:
    """The Status object's message, or the reason of the HTTP answer."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason or f"status {error.status}")


def jobs_arguments(cluster: NamedCluster) -> tuple[str, str, str, str]:
    """group, version, namespace and plural, as CustomObjectsApi wants them."""
    return GROUP, VERSION, cluster.namespace, PLURAL
