"""The API server's paths of what Muster reads and writes."""

from __future__ import annotations

from muster.words.names import GROUP, VERSION

PODS = "/api/v1/pods"
NODES = "/api/v1/nodes"
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
JOBS = f"/apis/{GROUP}/{VERSION}/trainingjobs"


def node(name: str) -> str:
    return f"{NODES}/{name}"


def jobs(namespace: str) -> str:
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/trainingjobs"


def job(namespace: str, name: str) -> str:
    return f"{jobs(namespace)}/{name}"


def core(namespace: str, kind: str, name: str = "") -> str:
    """The path of an object of the core API; without a name, of all of its kind.

    `kind` is the plural (pods, services, configmaps, events).
    """
    return f"/api/v1/namespaces/{namespace}/{kind}" + (f"/{name}" if name else "")


def group(api: str, namespace: str, kind: str, name: str = "") -> str:
    """The path of an object of another API; without a name, of all of its kind. `api` is `group/version`."""
    return f"/apis/{api}/namespaces/{namespace}/{kind}" + (f"/{name}" if name else "")
