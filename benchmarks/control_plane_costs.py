"""What a control plane and its clients have cost: requests as the API server counts them, and everybody's CPU."""

import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil

from muster.kube.connection import ApiConnection


def requests(connection: ApiConnection) -> Counter[str]:
    """That the API server has answered so far, of everybody, by verb and resource. Watches are left out."""
    found: Counter[str] = Counter()
    for of, count in _samples(connection, "apiserver_request_total"):
        if of["verb"] != "WATCH":
            found[f"{of['verb']} {of['resource']}{'/' * bool(of['subresource'])}{of['subresource']}"] += count
    return found


def watches(connection: ApiConnection, resource: str) -> int:
    """That are open."""
    open_ones = _samples(connection, "apiserver_longrunning_requests")
    return sum(count for of, count in open_ones if (of["verb"], of["resource"]) == ("WATCH", resource))


def _samples(connection: ApiConnection, metric: str) -> Iterator[tuple[dict[str, str], int]]:
    """(labels, value) of each series that the API server has of a metric."""
    with urllib.request.urlopen(f"{connection.server}/metrics", context=connection.tls) as reply:
        text = reply.read().decode()
    for labels, count in re.findall(rf"^{metric}\{{(.*)\}} (\S+)$", text, re.MULTILINE):
        yield dict(re.findall(r'(\w+)="([^"]*)"', labels)), int(float(count))


def cpu_seconds() -> dict[str, float]:
    """Of this process (clients and kubelet) and the parts of the control plane, so far."""
    here, parts = psutil.Process(), ("kube", "etcd")
    found = {"clients and kubelet": sum(here.cpu_times()[:2])}
    children = ((child.name(), child.cpu_times()) for child in here.children())
    return found | {name: sum(times[:2]) for name, times in children if name.startswith(parts)}


class Costs:
    """What everybody costs from here on."""

    def __init__(self, connection: ApiConnection) -> None:
        self._connection, self._cpu, self._requests = connection, cpu_seconds(), requests(connection)

    def since(self, pods: int) -> dict[str, Any]:
        """Seconds of CPU, and requests per pod if there were any, the commonest first."""
        cpu, asked = cpu_seconds(), requests(self._connection)
        spent = {name: round(cpu[name] - self._cpu.get(name, 0.0), 1) for name in cpu}
        counts = (asked - self._requests).most_common(20)
        return {"cpu": spent, "requests_per_pod": {what: round(n / max(1, pods), 2) for what, n in counts}}
