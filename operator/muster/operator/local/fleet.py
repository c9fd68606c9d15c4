"""Jobs and nodes of this machine in short, as admission sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from pydantic import ValidationError

from muster.local.cluster import LocalCluster, NotFound
from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.local.nodes import VirtualNodes
from muster.operator.local.notices import NoticeFiles
from muster.words.fleet import NodeNotice, NodeReport
from muster.words.job import TrainingJob
from muster.words.names import DEFAULT_PROJECT, Label
from muster.words.prices import Prices
from muster.words.quotas import ProjectQuota, read_quotas


class LocalFleet:
    def __init__(
        self,
        cluster: LocalCluster,
        nodes: VirtualNodes,
        notices: NoticeFiles,
        prices: Prices,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._nodes, self._notices, self._prices = nodes, notices, prices
        self.jobs = JobCache(cluster)
        self._quotas = QuotaReader(cluster, on_error)
        self._turn = threading.Lock()

    def read(self, now: float, fresh: bool) -> Fleet:
        """Read the fleet, from any thread: admission calls it, and so does the preview of its decisions."""
        with self._turn:
            jobs = self.jobs.refresh()
            nodes = self._nodes.all(self._notices.unfit(self._nodes.names()))
            return Fleet(now=now, fresh=fresh, nodes=nodes, jobs=jobs, quotas=self._quotas.read(), prices=self._prices)

    def reports(self) -> tuple[NodeReport, ...]:
        """The virtual nodes, each with what its notices say."""
        by_node = {node: self._notices.of(node) for node in self._nodes.names()}
        return tuple(
            NodeReport(
                name=node.name,
                pool=node.pool,
                capacity=node.capacity,
                gpus=node.gpus,
                cpus=node.cpus,
                memory_bytes=node.memory_bytes,
                unfit=next((each.message for each in by_node[node.name] if each.keeps_out), ""),
                notices=tuple(
                    NodeNotice(kind=str(each.kind), at=each.at, message=each.message, source=each.source)
                    for each in by_node[node.name]
                ),
            )
            for node in self._nodes.all()
        )

    def unfit(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the nodes that must not be used, or do not exist."""
        unfit = self._notices.unfit(nodes)
        return tuple(name for name in nodes if name in unfit or name not in self._nodes.names())


class QuotaReader:
    """Quotas of projects, from the local cluster's file, where the API writes them. `on_error` is called once for each
    quota that can't be read."""

    def __init__(self, cluster: LocalCluster, on_error: Callable[[Exception], None]) -> None:
        self._cluster, self._on_error = cluster, on_error
        self._quotas: Mapping[str, ProjectQuota] = {}
        self._written: Mapping[str, str] = {}

    def read(self) -> Mapping[str, ProjectQuota]:
        """Return the quotas by project."""
        written = self._cluster.quotas()
        if written != self._written:
            self._quotas, faults = read_quotas(written, self._quotas)
            self._written = written
            for fault in faults:
                self._on_error(ValueError(fault))
        return self._quotas


class JobCache:
    """Every job in short, kept up by reading only what was written since the last look."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._version = 0
        self._jobs: dict[str, JobSummary] = {}

    def refresh(self) -> tuple[JobSummary, ...]:
        """Return the jobs as of now. A job that can't be read stays as it was last understood."""
        version = self._cluster.version()
        if version != self._version:
            for uid in self._cluster.written_after(self._version):
                self._look(uid)
            self._version = version
        return self.job_summaries()

    def job_summaries(self) -> tuple[JobSummary, ...]:
        """Return the jobs as of the last read."""
        return tuple(self._jobs.values())

    def _look(self, uid: str) -> None:
        try:
            self._jobs[uid] = _summary(self._cluster.get(uid))
        except NotFound:
            self._jobs.pop(uid, None)
        except ValidationError:
            pass  # observing it says so


def _summary(job: TrainingJob) -> JobSummary:
    meta = job.metadata
    return JobSummary(
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        created_at=meta.creation_timestamp,
        deleting=meta.deletion_timestamp is not None,
        spec=job.spec,
        status=job.status,
        project=meta.labels.get(Label.PROJECT) or DEFAULT_PROJECT,
        owner=meta.labels.get(Label.OWNER, ""),
    )
