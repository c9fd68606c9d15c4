"""Placement of a gang: all of its nodes or none, from one pool, close together, and the tightest fit first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat

from muster.operator.core.fleet import FleetNode
from muster.operator.core.observed import NodeReservation
from muster.words.job import JobSpec
from muster.words.pods import NodeTerm, Toleration, tolerated
from muster.words.quantities import quantity

_ROUNDING = 1e-9  # of cores: three of 0.1 are less than 0.3


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """Needs of one worker."""

    gpus: int
    cpus: float
    memory_bytes: int
    instance_types: tuple[str, ...] = ()
    """The types that will do; empty for any."""
    selector: tuple[tuple[str, str], ...] = ()
    """Labels that the node must have, with their values."""
    terms: tuple[NodeTerm, ...] = ()
    """Terms of its node affinity, any of which must hold; empty for none."""
    tolerations: tuple[Toleration, ...] = ()
    """The job's own. A node with a taint that none of them covers is not for it."""
    shares: bool = False
    """Several workers of its gang may be on one node."""

    def allows(self, node: FleetNode) -> bool:
        """Return whether it may run on that node at all, whatever is free there."""
        return (
            (not self.instance_types or node.instance_type in self.instance_types)
            and (not self.selector or all(node.labels.get(key) == value for key, value in self.selector))
            and (not self.terms or any(term.met_by(node.labels) for term in self.terms))
            and (not node.taints or all(tolerated(taint, self.tolerations) for taint in node.taints))
        )

    def count(self, gpus: int, cpus: float, memory_bytes: int, slots: int) -> int:
        """Return the number of one gang's workers that fit into that much: at most one if they don't share nodes."""
        if not self.shares:
            return int(gpus >= self.gpus and cpus >= self.cpus and memory_bytes >= self.memory_bytes and slots >= 1)
        needs = ((gpus, self.gpus), (cpus, self.cpus), (memory_bytes, self.memory_bytes), (slots, 1))
        return max(0, min(int((there + _ROUNDING) // need) for there, need in needs if need))

    def carried_by(self, node: FleetNode) -> int:
        """Return the number of one gang's workers that fit on an empty node."""
        return self.count(node.gpus, node.cpus, node.memory_bytes, node.slots) if self.allows(node) else 0


def shape_of(spec: JobSpec) -> WorkerShape:
    gang, pods = spec.gang, spec.runtime
    return WorkerShape(
        gpus=gang.gpus_per_node,
        cpus=quantity(gang.resources.cpu),
        memory_bytes=int(quantity(gang.resources.memory)),
        instance_types=gang.instance_types,
        selector=tuple(sorted(pods.node_selector.items())),
        terms=pods.node_terms,
        tolerations=pods.tolerations,
        shares=gang.share_nodes,
    )


@dataclass(frozen=True, slots=True)
class GangRequest:
    """Request of a gang."""

    shape: WorkerShape
    sizes: tuple[int, ...]
    """The numbers of nodes that would do, the best first."""
    capacity_order: tuple[str, ...] = ()
    """Kinds of capacity in the order to try; empty for any."""
    avoid: frozenset[str] = frozenset()
    """Nodes that are excluded for this job."""
    required: str | None = None
    """The node label whose value the whole gang must share."""
    preferred: str | None = None
    """The node label whose value the gang should share as far as it can."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    nodes: tuple[str, ...]
    pool: str
    capacity: str
    instance_type: str = ""  # where all nodes are of one


@dataclass(slots=True)
class NodeSpace:
    """Free resources of one node."""

    node: FleetNode
    gpus: int
    cpus: float
    memory_bytes: int
    slots: int

    def carries(self, shape: WorkerShape, freed: Iterable[WorkerShape] = ()) -> int:
        """Return the number of one gang's workers that fit here once workers of the shapes `freed` are gone."""
        gpus, cpus, memory_bytes, slots = self.gpus, self.cpus, self.memory_bytes, self.slots
        for gone in freed:
            gpus, cpus, memory_bytes, slots = (
                gpus + gone.gpus,
                cpus + gone.cpus,
                memory_bytes + gone.memory_bytes,
                slots + 1,
            )
        count = shape.count(gpus, cpus, memory_bytes, slots)
        return count if count and shape.allows(self.node) else 0

    def freedom(self, shape: WorkerShape) -> tuple[bool, int, float, int, str]:
        """Return a key that sorts the freest node first, and by name where equal."""
        return (not self.carries(shape), -self.gpus, -self.cpus, -self.memory_bytes, self.node.name)


PoolKey = tuple[str, str]  # pool, capacity
# How many workers of a shape each node carries, by pool, then by free GPUs, in name order: the fullest come first.
_Buckets = dict[int, dict[str, int]]
_Candidates = dict[PoolKey, _Buckets]


@dataclass
class FleetSpace:
    """The free part of the fleet. Nodes that are not ready are not in it."""

    nodes: Iterable[FleetNode]
    reservations: Iterable[NodeReservation]
    _rooms: dict[str, NodeSpace] = field(init=False)
    _fitting: dict[WorkerShape, _Candidates] = field(init=False, default_factory=dict)
    _set_aside: set[str] = field(init=False, default_factory=set)
    _kept: dict[WorkerShape, dict[str, int]] = field(init=False, default_factory=dict)  # see kept_back
    _hopeless: dict[tuple[object, ...], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        ready = sorted((node for node in self.nodes if node.ready), key=lambda node: node.name)
        self._rooms = {n.name: NodeSpace(n, n.gpus, n.cpus, n.memory_bytes, n.slots) for n in ready}
        for name, need in needs_by_node(self.reservations):
            if (room := self._rooms.get(name)) is not None:
                _take(room, need)

    def place(self, ask: GangRequest) -> WorkerPlace | None:
        """The best place for the largest of the sizes that fits anywhere; it is not taken yet."""
        key = (ask.shape, ask.capacity_order, ask.avoid, ask.required)
        for size in ask.sizes:
            if size >= self._hopeless.get(key, size + 1):
                continue  # space only shrinks until nodes are released, so what failed once fails again
            if (place := self._place(ask, size)) is not None:
                return place
            self._hopeless[key] = min(size, self._hopeless.get(key, size))
        return None

    def take(self, place: WorkerPlace, shape: WorkerShape) -> None:
        for name in place.nodes:
            room = self._rooms[name]
            before = room.gpus
            _take(room, shape)
            for other, pools in self._fitting.items():
                self._refile(pools, other, room, before)

    def set_aside(self, ask: GangRequest) -> None:
        """Keep as many nodes as the smallest gang needs from those who come after it, whether they are free yet or not:
        the freest of one pool (and topology domain). What is kept only gets freer, so the gang's turn comes.
        """
        size = ask.sizes[-1]
        freest = [sorted(rooms, key=lambda room: room.freedom(ask.shape)) for rooms in self.groups(ask).values()]
        chosen = min(
            (enough for rooms in freest if (enough := _enough(rooms, ask.shape, size))),
            key=lambda rooms: sorted((room.freedom(ask.shape) for room in rooms), reverse=True),
            default=[],
        )
        self.keep(room.node.name for room in chosen)

    def groups(self, ask: GangRequest) -> dict[tuple[str, str, str], list[NodeSpace]]:
        """The nodes that could carry a worker of it, free or not, by pool, capacity and required topology domain."""
        by_place: dict[tuple[str, str, str], list[NodeSpace]] = {}
        for room in self._rooms.values():
            node = room.node
            domain = node.labels.get(ask.required, "") if ask.required else "-"
            if (
                domain
                and node.name not in ask.avoid
                and node.name not in self._set_aside
                and ask.shape.carried_by(node)
            ):
                by_place.setdefault((node.pool, node.capacity, domain), []).append(room)
        return by_place

    def keep(self, names: Iterable[str]) -> tuple[str, ...]:
        """Give these nodes to nobody who comes after, until they are released. Those that were not kept before."""
        self._kept.clear()
        new = tuple(name for name in names if name in self._rooms and name not in self._set_aside)
        self._set_aside.update(new)
        for name in new:
            room = self._rooms[name]
            for pools in self._fitting.values():
                pools.get(_pool(room.node), {}).get(room.gpus, {}).pop(name, None)
        return new

    def release(self, names: tuple[str, ...]) -> None:
        """Make these nodes available again."""
        if not names:
            return
        self._kept.clear()
        self._hopeless.clear()
        self._set_aside.difference_update(names)
        for name in names:
            room = self._rooms[name]
            for shape, pools in self._fitting.items():
                if count := room.carries(shape):
                    pools.setdefault(_pool(room.node), {}).setdefault(room.gpus, {})[name] = count

    def free(self, ask: GangRequest) -> tuple[int, str]:
        """The most nodes that any one pool has free for it, and that pool's name."""
        counts = [(_count(buckets, ask), pool) for (pool, _), buckets in self._pools(ask)]
        return max(counts, key=lambda entry: entry[0], default=(0, ""))

    def kept_back(self, ask: GangRequest) -> int:
        """Return the number of its workers that would fit on the nodes that are set aside for others."""
        if ask.shape not in self._kept:  # nothing is taken from what is set aside, so this changes only with the set
            self._kept[ask.shape] = {name: self._rooms[name].carries(ask.shape) for name in self._set_aside}
        kept = self._kept[ask.shape]
        return sum(kept.values()) - sum(kept.get(name, 0) for name in ask.avoid)

    def extend(self, ask: GangRequest, place: WorkerPlace, size: int) -> WorkerPlace | None:
        """The same place with more nodes of the same pool (and required topology domain); None if there are too few."""
        buckets = self._candidates(ask.shape).get((place.pool, place.capacity), {})
        mine, more = frozenset() if ask.shape.shares else frozenset(place.nodes), size - len(place.nodes)
        names = (name for name in _tightest(buckets) if name not in mine and name not in ask.avoid)
        if ask.required is not None:
            domain = self._label(place.nodes[0], ask.required)
            names = (name for name in names if self._label(name, ask.required or "") == domain)
        extra = tuple(name for name, _ in zip(names, range(more), strict=False))
        return self._at(place.nodes + extra, place.pool, place.capacity) if len(extra) == more else None

    def usable(self, names: Iterable[str], shape: WorkerShape) -> bool:
        """Return whether all of these nodes are ready and may be used."""
        return all(name in self._rooms and shape.allows(self._rooms[name].node) for name in names)

    def _at(self, nodes: tuple[str, ...], pool: str, capacity: str) -> WorkerPlace:
        types = {self._rooms[name].node.instance_type for name in nodes if name in self._rooms}
        return WorkerPlace(nodes, pool, capacity, types.pop() if len(types) == 1 else "")

    def _place(self, ask: GangRequest, size: int) -> WorkerPlace | None:
        order = {capacity: rank for rank, capacity in enumerate(ask.capacity_order)}
        choices = []
        for (pool, capacity), buckets in self._pools(ask):
            count = _count(buckets, ask)
            if count >= size:
                choices.append((order.get(capacity, len(order)), count, pool, capacity, buckets))
        for _, _, pool, capacity, buckets in sorted(choices, key=lambda choice: choice[:4]):
            names = [name for name in _tightest(buckets) if name not in ask.avoid]
            if (chosen := self._choose(names, size, ask)) is not None:
                return self._at(chosen, pool, capacity)
        return None

    def _choose(self, names: list[str], size: int, ask: GangRequest) -> tuple[str, ...] | None:
        """`size` of the names, which come with the tightest fit first; None where the topology forbids it."""
        label = ask.required or ask.preferred
        if label is None:
            return tuple(names[:size])
        domains: dict[str, list[str]] = {}
        for name in names:
            domains.setdefault(self._label(name, label), []).append(name)
        unlabelled = domains.pop("", [])
        fitting = [members for members in domains.values() if len(members) >= size]
        if fitting:
            return tuple(min(fitting, key=lambda members: (len(members), members[0]))[:size])
        if ask.required is not None:
            return None
        # Only preferred: as few domains as possible, the largest first.
        ordered = sorted(domains.values(), key=lambda members: (-len(members), members[0]))
        return tuple([name for members in (*ordered, unlabelled) for name in members][:size])

    def _label(self, name: str, label: str) -> str:
        return self._rooms[name].node.labels.get(label, "") if name in self._rooms else ""

    def _pools(self, ask: GangRequest) -> Iterator[tuple[PoolKey, _Buckets]]:
        yield from self._candidates(ask.shape).items()

    def _candidates(self, shape: WorkerShape) -> _Candidates:
        if shape not in self._fitting:
            pools: _Candidates = {}
            for name, room in self._rooms.items():
                if name not in self._set_aside and (count := room.carries(shape)):
                    pools.setdefault(_pool(room.node), {}).setdefault(room.gpus, {})[name] = count
            self._fitting[shape] = pools
        return self._fitting[shape]

    def _refile(self, pools: _Candidates, shape: WorkerShape, room: NodeSpace, gpus_before: int) -> None:
        name, buckets = room.node.name, pools.get(_pool(room.node), {})
        if name in buckets.get(gpus_before, {}):
            del buckets[gpus_before][name]
            if count := room.carries(shape):
                buckets.setdefault(room.gpus, {})[name] = count


def largest_possible(nodes: Iterable[FleetNode], ask: GangRequest) -> int:
    """The most workers that an empty, healthy fleet would carry of this gang in one pool (and required topology
    domain): as many as nodes, unless its workers may share them.
    """
    counts: dict[tuple[str, ...], int] = {}
    for node in nodes:
        domain = node.labels.get(ask.required, "") if ask.required else "-"
        if domain and (count := ask.shape.carried_by(node)):
            key = (node.pool, node.capacity, domain)
            counts[key] = counts.get(key, 0) + count
    return max(counts.values(), default=0)


def needs_by_node(reservations: Iterable[NodeReservation]) -> Iterator[tuple[str, WorkerShape]]:
    """Return what is held on each node, worker by worker. A job with two reservations (it is to grow) holds what is in
    both only once.
    """
    seen: Counter[tuple[str, str]] = Counter()
    for entry in reservations:
        need = WorkerShape(entry.gpus, entry.cpus, entry.memory_bytes)
        for name, count in Counter(entry.nodes).items():
            key = (entry.uid, name)
            for _ in range(count - seen[key]):
                yield name, need
            seen[key] = max(seen[key], count)


def _take(room: NodeSpace, shape: WorkerShape) -> None:
    room.gpus -= shape.gpus
    room.cpus -= shape.cpus
    room.memory_bytes -= shape.memory_bytes
    room.slots -= 1


def _pool(node: FleetNode) -> PoolKey:
    return node.pool, node.capacity


def _count(buckets: _Buckets, ask: GangRequest) -> int:
    """Return the number of workers that fit there."""
    carried = (sum(names.values()) if ask.shape.shares else len(names) for names in buckets.values())
    return sum(carried) - sum(names.get(name, 0) for names in buckets.values() for name in ask.avoid)


def _tightest(buckets: _Buckets) -> Iterator[str]:
    """A node as often as it has room for a worker."""
    for gpus in sorted(buckets):
        for name, count in buckets[gpus].items():
            yield from repeat(name, count)


def _enough(rooms: list[NodeSpace], shape: WorkerShape, size: int) -> list[NodeSpace]:
    """The first of them that carry so many workers when nothing else is there; none if all of them do not."""
    carried = 0
    for index, room in enumerate(rooms):
        carried += shape.carried_by(room.node)
        if carried >= size:
            return rooms[: index + 1]
    return []
