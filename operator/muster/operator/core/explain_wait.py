"""Explanation of a queued job's wait for its user: the limit that was hit, and who holds how much."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from muster.operator.core.fleet import Fleet, FleetNode, JobSummary
from muster.operator.core.observed import NodeReservation
from muster.operator.core.placement import WorkerShape
from muster.operator.core.visibility import describe_hidden_gangs
from muster.words.text import plural

HOLDERS_NAMED_MAX = 3
OTHERS = "pods of others"  # a reservation of what Muster did not place has no job


@dataclass(frozen=True, slots=True)
class _HeldAmount:
    """Total that a holder has on the nodes in question."""

    nodes: int = 0
    gpus: int = 0
    cpus: float = 0.0
    memory_bytes: int = 0

    def plus(self, nodes: int, gpus: int, cpus: float, memory_bytes: int) -> _HeldAmount:
        return _HeldAmount(self.nodes + nodes, self.gpus + gpus, self.cpus + cpus, self.memory_bytes + memory_bytes)

    def __str__(self) -> str:
        amounts = _amounts(self.gpus, self.cpus, self.memory_bytes)
        return plural(self.nodes, "node") + (f" ({amounts})" if amounts else "")


@dataclass(slots=True)
class _NodeHolders:
    """Holders of the nodes that one shape fits."""

    by_project: dict[str, dict[str, _HeldAmount]] = field(default_factory=dict)
    """Holdings of each project's jobs, by their names."""
    of_projects: dict[str, _HeldAmount] = field(default_factory=dict)
    """Holdings of all jobs of each project together."""
    others: _HeldAmount = _HeldAmount()
    """Holdings of pods that Muster did not place."""
    away: dict[str, int] = field(default_factory=dict)
    """Number of nodes that take no workers, by reason (cordoned, not ready)."""


class HolderIndex:
    """Return the holders of the nodes that a shape fits and their amounts, computed once per shape and pool."""

    def __init__(self, fleet: Fleet, entries: list[NodeReservation]) -> None:
        """`entries` is the list to which admission adds while it goes through the queue."""
        self._nodes, self._entries, self._others = fleet.nodes, entries, fleet.others
        self._jobs = {job.uid: job for job in fleet.jobs}
        self._holders_by_shape: dict[tuple[WorkerShape, str], _NodeHolders] = {}
        self._said: dict[tuple[WorkerShape, str, str], str] = {}

    def words(self, reader: JobSummary, shape: WorkerShape, pool: str = "") -> str:
        """Describe `held by …`, the largest holders first, and how many nodes take no workers and why, as `reader` may
        see it.

        If a `pool` is given, that is said of its nodes alone.
        """
        key = (shape, pool, reader.project)
        if key not in self._said:
            if (shape, pool) not in self._holders_by_shape:
                self._holders_by_shape[shape, pool] = self._work_out(shape, pool)
            self._said[key] = _describe_holding(self._holders_by_shape[shape, pool], reader.project)
        return self._said[key]

    def _work_out(self, shape: WorkerShape, pool: str) -> _NodeHolders:
        fitting = [node for node in self._nodes if shape.carried_by(node) and pool in ("", node.pool)]
        away = Counter(node.away for node in fitting if not node.ready)
        names, holding = {node.name for node in fitting}, _NodeHolders(away=dict(sorted(away.items())))
        for entry in (*self._entries, *self._others):
            if not (count := len(names.intersection(entry.nodes))):
                continue
            amounts = (count, count * entry.gpus, count * entry.cpus, count * entry.memory_bytes)
            job = self._jobs.get(entry.uid)
            if job is None:
                holding.others = holding.others.plus(*amounts)
                continue
            jobs = holding.by_project.setdefault(job.project, {})
            jobs[job.full_name] = jobs.get(job.full_name, _HeldAmount()).plus(*amounts)
            holding.of_projects[job.project] = holding.of_projects.get(job.project, _HeldAmount()).plus(*amounts)
        return holding


def _describe_holding(holding: _NodeHolders, project: str) -> str:
    amounts = dict(holding.by_project.get(project, {}))
    hidden = [name for name in holding.by_project if name != project]
    if hidden:
        others = _HeldAmount()
        for name in hidden:
            each = holding.of_projects[name]
            others = others.plus(each.nodes, each.gpus, each.cpus, each.memory_bytes)
        amounts[describe_hidden_gangs(sum(len(holding.by_project[name]) for name in hidden))] = others
    if holding.others.nodes:
        amounts[OTHERS] = holding.others
    ranked = sorted(amounts.items(), key=_size, reverse=True)
    named = ", ".join(f"{who} {what}" for who, what in ranked[:HOLDERS_NAMED_MAX])
    parts = [f"held by {named}"] if ranked else []
    if len(ranked) > HOLDERS_NAMED_MAX:
        parts[0] += f" and {len(ranked) - HOLDERS_NAMED_MAX} more"
    parts += [f"{plural(count, 'node')} {why}" for why, count in holding.away.items()]
    return "; ".join(parts)


def need(shape: WorkerShape, size: int) -> str:
    """Describe the need, as in `gang needs 2 nodes with 8 GPUs and 900 GiB each`."""
    amounts = _amounts(shape.gpus, shape.cpus, shape.memory_bytes)
    return f"gang needs {plural(size, 'node')}" + (f" with {amounts} each" if amounts else "")


def limits_hit(shape: WorkerShape, nodes: tuple[FleetNode, ...]) -> str:
    """Return the requests of a worker that no node can satisfy, by the job's field; empty if some node can."""
    if not nodes or any(shape.carried_by(node) for node in nodes):
        return ""
    open_to_it = [node for node in nodes if shape.allows(node)]
    if not open_to_it:
        return "no node is open to it by gang.instanceTypes, its node selector, affinity and tolerations"
    asked = (
        ("gang.gpusPerNode", shape.gpus, max(node.gpus for node in open_to_it), "{:g}"),
        ("gang.resources.cpu", shape.cpus, max(node.cpus for node in open_to_it), "{:g}"),
        ("gang.resources.memory", shape.memory_bytes, max(node.memory_bytes for node in open_to_it), ""),
    )
    limits = [
        f"{field} is {_number(want, form)} and the largest node has {_number(most, form)}"
        for field, want, most, form in asked
        if want > most
    ]
    return "; ".join(limits) or "no node has all of that together"


def _number(value: float, form: str) -> str:
    return form.format(value) if form else _memory(int(value))


def _amounts(gpus: int, cpus: float, memory_bytes: int) -> str:
    parts = [plural(gpus, "GPU")] if gpus else []
    parts += [f"{cpus:g} CPU{'' if cpus == 1 else 's'}"] if cpus else []
    parts += [_memory(memory_bytes)] if memory_bytes else []
    return " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else "".join(parts)


def _memory(size: int) -> str:
    return f"{size / 2**30:.4g} GiB" if size >= 2**30 else f"{size / 2**20:.4g} MiB"


def _size(item: tuple[str, _HeldAmount]) -> tuple[int, float, int, int, str]:
    who, amount = item
    return amount.gpus, amount.cpus, amount.memory_bytes, amount.nodes, who
