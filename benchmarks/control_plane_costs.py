"""What a control plane and its clients have cost: requests as the API server counts them, and everybody's CPU."""

import re
import urllib.request
from collections import Counter
from typing import Any

import psutil

from muster.contract.kubernetes import Connection


def requests(connection: Connection) -> Counter[str]:
    """That the API server has answered so far, of everybody, by verb and resource. Watches are left out."""
    with urllib.request.urlopen(f"{connection.server}/metrics", context=connection.tls) as reply:
        text = reply.read().decode()
    found: Counter[str] = Counter()
    for labels, count in re.findall(r"^apiserver_request_total\{(.*)\} (\S+)$", text, re.MULTILINE):
        of = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if of["verb"] != "WATCH":
            found[f"{of['verb']} {of['resource']}{'/' * bool(of['subresource'])}{of['subresource']}"] += int(
                float(count)
            )
    return found


def cpu_seconds() -> dict[str, float]:
    """Of this process (clients and kubelet) and the parts of the control plane, so far."""
    here, parts = psutil.Process(), ("kube", "etcd")
    found = {"clients and kubelet": sum(here.cpu_times()[:2])}
    children = ((child.name(), child.cpu_times()) for child in here.children())
    return found | {name: sum(times[:2]) for name, times in children if name.startswith(parts)}


class Costs:
    """What everybody costs from here on."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._cpu, self._requests = connection, cpu_seconds(), requests(connection)

    def since(self, pods: int) -> dict[str, Any]:
        """Seconds of CPU, and requests per pod if there were any, the commonest first."""
        cpu, asked = cpu_seconds(), requests(self._connection)
        spent = {name: round(cpu[name] - self._cpu.get(name, 0.0), 1) for name in cpu}
        counts = (asked - self._requests).most_common(20)
        return {"cpu": spent, "requests_per_pod": {what: round(n / max(1, pods), 2) for what, n in counts}}
