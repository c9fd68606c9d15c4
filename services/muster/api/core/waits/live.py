"""Live jobs as the queue and the fleet see them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.words.gang import ranks_per_node
from muster.words.status import Phase
from muster.words.times import epoch_seconds, rfc3339


@dataclass(frozen=True, slots=True)
class LiveJob:
    """Columns of a live job's row that the views show."""

    seq: int
    id: str
    name: str
    project: str
    owner: str
    priority: int
    created_at: float
    phase: str
    spec: Mapping[str, Any]
    status: Mapping[str, Any]

    @property
    def nodes(self) -> list[str]:
        return list((self.status.get("gang") or {}).get("nodes") or ())

    @property
    def gpus_per_node(self) -> int:
        return int((self.spec.get("gang") or {}).get("gpusPerNode") or 0)

    @property
    def processes(self) -> int:
        """Return the number of its ranks on the nodes that it holds."""
        return len(self.nodes) * ranks_per_node(self.spec)

    @property
    def nodes_min(self) -> int:
        nodes = (self.spec.get("gang") or {}).get("nodes")
        return int(nodes.get("min") or 1) if isinstance(nodes, dict) else int(nodes or 1)

    def time(self, key: str) -> str:
        return time_or(self.status.get(key), self.created_at)

    def expected_end(self, now: float) -> float | None:
        """Return in how many seconds the job is expected to end. Only a job that runs, with a known number of steps,
        has such an end."""
        progress = self.status.get("progress") or {}
        left = progress.get("etaSeconds")
        if self.phase != Phase.RUNNING or not isinstance(left, int | float) or not math.isfinite(left):
            return None
        try:
            passed = now - epoch_seconds(progress.get("at"))
        except ValueError:
            passed = 0.0
        return max(0.0, left - max(0.0, passed))


def time_or(value: Any, otherwise: float) -> str:
    """Return the time of a status as REST gives it; `otherwise` where there is none, or a newer Muster wrote it in its
    own words."""
    try:
        return rfc3339(epoch_seconds(value))
    except ValueError:
        return rfc3339(otherwise)
