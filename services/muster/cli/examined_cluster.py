"""The cluster that `muster doctor` examines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from muster.cli.cluster_connection import TIMEOUT_SECONDS, NamedCluster

STORE_SECONDS_MAX = 90.0


@dataclass
class ExaminedCluster:
    """The cluster that is examined. `store` and `image` are the person's, or else those of the installation. `env_from`
    are Secrets whose variables the store's pod gets, as a job's workers do by runtime.envFrom.
    """

    cluster: NamedCluster
    system: str
    store: str | None = None
    image: str | None = None
    env_from: tuple[str, ...] = ()
    tolerance: float = STORE_SECONDS_MAX  # seconds that the store's pod may take

    def api(self, name: str) -> Any:
        """An API of the official client, such as AppsV1Api."""
        from kubernetes import client

        return getattr(client, name)(self.cluster.api)

    def ask(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        return call(*arguments, _request_timeout=TIMEOUT_SECONDS, **more)

    def find(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The object, or None where there is none."""
        from kubernetes.client.exceptions import ApiException

        try:
            return self.ask(call, *arguments)
        except ApiException as error:
            if error.status != 404:
                raise
            return None

    @cached_property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The API groups that are served, each with its versions."""
        served = self.ask(self.api("ApisApi").get_api_versions).groups
        return {group.name: tuple(version.version for version in group.versions) for group in served}

    @cached_property
    def nodes(self) -> list[Any]:
        return list(self.ask(self.api("CoreV1Api").list_node).items)

    @cached_property
    def operator(self) -> Any:
        """The operator's Deployment, or None."""
        return self.find(self.api("AppsV1Api").read_namespaced_deployment, "muster-operator", self.system)

    @cached_property
    def settings(self) -> dict[str, str]:
        """The variables of the operator's container, as far as the Deployment itself says them."""
        containers = self.operator.spec.template.spec.containers if self.operator is not None else ()
        return {each.name: each.value for container in containers for each in container.env or () if each.value}

    @cached_property
    def keeps_no_volume(self) -> bool:
        """Return whether an API is installed that needs no volume of its own, because it has a database."""
        api = self.find(self.api("AppsV1Api").read_namespaced_deployment, "muster-api", self.system)
        containers = api.spec.template.spec.containers if api is not None else ()
        return any(each.name == "MUSTER_API_DATABASE_URL" for container in containers for each in container.env or ())

    @property
    def served_namespace(self) -> str:
        """The only namespace whose jobs the operator serves; empty if it serves all."""
        return self.settings.get("MUSTER_OPERATOR_WATCH_NAMESPACE", "")
