"""Preview of a pass over the queue for a job that is not in it yet. Nothing is changed."""

from __future__ import annotations

from dataclasses import replace

from muster.operator.core.admit import admit
from muster.operator.core.evictions import Eviction, restart_seconds, uncommitted_seconds
from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.core.observed import NodeReservation
from muster.words.preview import Preview, PreviewedEviction


def preview(fleet: Fleet, reservations: tuple[NodeReservation, ...], job: JobSummary) -> Preview:
    """The very pass that admission makes, with this job in the queue as well."""
    others = tuple(other for other in fleet.jobs if other.uid != job.uid)
    plan = admit(replace(fleet, jobs=(*others, job)), reservations)
    nodes = tuple(node for entry in plan.reservations if entry.uid == job.uid for node in entry.nodes)
    wait = plan.waits.get(job.uid)
    evictions = tuple(
        _previewed(eviction, because, fleet.now)
        for made in plan.preemptions
        if made.job.uid == job.uid
        for eviction, because in zip(made.evictions, made.reasons, strict=True)
    )
    code, because = (str(wait.code), wait.because) if wait is not None else ("", "")
    return Preview(nodes=nodes, code=code, because=because, evictions=evictions)


def _previewed(eviction: Eviction, because: str, now: float) -> PreviewedEviction:
    job = eviction.job
    gpus = len(job.status.gang.nodes) * job.spec.gang.gpus_per_node
    return PreviewedEviction(
        namespace=job.namespace,
        name=job.name,
        gpus=eviction.gpus,
        nodes=eviction.freed,
        nodes_kept=len(eviction.kept),
        uncommitted_gpu_seconds=gpus * uncommitted_seconds(job, now),
        restart_gpu_seconds=gpus * restart_seconds(job),
        because=because,
    )
