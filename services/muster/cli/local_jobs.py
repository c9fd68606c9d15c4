"""The jobs of a state folder that have workers: they outlive the platform."""

from __future__ import annotations

from muster.local.cluster import LocalCluster
from muster.words.names import Phase
from muster.words.state_folder import StateFolder

_WITH_WORKERS = (Phase.STARTING, Phase.RUNNING, Phase.RESTARTING, Phase.STOPPING)


def with_workers(state: StateFolder) -> list[str]:
    """Return the names of the jobs that have, or are about to have, workers on this machine."""
    if not state.cluster.exists():
        return []
    return LocalCluster(state.cluster).names_in(_WITH_WORKERS)
