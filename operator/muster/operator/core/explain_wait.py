"""Why a queued job got no nodes, in words that tell its user what to do: which limit was hit, who holds how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from muster.contract.text import plural
from muster.operator.core.fleet import Fleet, Node
from muster.operator.core.observed import Reservation
from muster.operator.core.placement import Shape

HOLDERS_NAMED_MAX = 3
OTHERS = "pods of others"  # a reservation of what Muster did not place has no job


@dataclass(frozen=True, slots=True)
class _Held:
    """What one job holds on the nodes in question, in all."""

    who: str
    nodes: int
    gpus: int
    cpus: float
    memory_bytes: int

    def __str__(self) -> str:
        amounts = _amounts(self.gpus, self.cpus, self.memory_bytes)
        return f"{self.who} {plural(self.nodes, 'node')}" + (f" ({amounts})" if amounts else "")


class Holders:
    """Who holds how much of the nodes that a shape fits; worked out once per shape and pool."""

    def __init__(self, fleet: Fleet, entries: list[Reservation]) -> None:
        """`entries` is the list to which admission adds while it goes through the queue."""
        self._nodes, self._entries, self._others = fleet.nodes, entries, fleet.others
        self._names = {job.uid: f"{job.namespace}/{job.name}" for job in fleet.jobs}
        self._known: dict[tuple[Shape, str], str] = {}

    def words(self, shape: Shape, pool: str = "") -> str:
        """`held by …`, the largest holders first, and how many nodes are not ready.

        If a `pool` is given, that is said of its nodes alone.
        """
        if (shape, pool) not in self._known:
            self._known[shape, pool] = self._work_out(shape, pool)
        return self._known[shape, pool]

    def _work_out(self, shape: Shape, pool: str) -> str:
        fitting = [node for node in self._nodes if shape.carried_by(node) and pool in ("", node.pool)]
        held = sorted(self._held({node.name for node in fitting}), key=_size, reverse=True)
        parts = [f"held by {', '.join(map(str, held[:HOLDERS_NAMED_MAX]))}"] if held else []
        if len(held) > HOLDERS_NAMED_MAX:
            parts[0] += f" and {len(held) - HOLDERS_NAMED_MAX} more"
        if away := sum(not node.ready for node in fitting):
            parts.append(f"{plural(away, 'node')} not ready")
        return "; ".join(parts)

    def _held(self, names: set[str]) -> Iterator[_Held]:
        found: dict[str, _Held] = {}
        for entry in (*self._entries, *self._others):
            count = len(names.intersection(entry.nodes))
            if count:
                who = self._names.get(entry.uid, OTHERS)
                known = found.get(who, _Held(who, 0, 0, 0.0, 0))
                found[who] = _Held(
                    who,
                    known.nodes + count,
                    known.gpus + count * entry.gpus,
                    known.cpus + count * entry.cpus,
                    known.memory_bytes + count * entry.memory_bytes,
                )
        yield from found.values()


def need(shape: Shape, size: int) -> str:
    """`gang needs 2 nodes with 8 GPUs and 900 GiB each`."""
    amounts = _amounts(shape.gpus, shape.cpus, shape.memory_bytes)
    return f"gang needs {plural(size, 'node')}" + (f" with {amounts} each" if amounts else "")


def limits_hit(shape: Shape, nodes: tuple[Node, ...]) -> str:
    """What a worker asks for that no node has, by the job's field that says so; empty if some node could carry it."""
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
    found = [
        f"{field} is {_number(want, form)} and the largest node has {_number(most, form)}"
        for field, want, most, form in asked
        if want > most
    ]
    return "; ".join(found) or "no node has all of that together"


def _number(value: float, form: str) -> str:
    return form.format(value) if form else _memory(int(value))


def _amounts(gpus: int, cpus: float, memory_bytes: int) -> str:
    parts = [plural(gpus, "GPU")] if gpus else []
    parts += [f"{cpus:g} CPU{'' if cpus == 1 else 's'}"] if cpus else []
    parts += [_memory(memory_bytes)] if memory_bytes else []
    return " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else "".join(parts)


def _memory(size: int) -> str:
    return f"{size / 2**30:.4g} GiB" if size >= 2**30 else f"{size / 2**20:.4g} MiB"


def _size(held: _Held) -> tuple[int, float, int, int, str]:
    return held.gpus, held.cpus, held.memory_bytes, held.nodes, held.who
