"""Preemption: the cheapest set of gangs to preempt so that a gang without room can run.

A gang may preempt others if its project's quota says so (`preempts`): gangs of a lower priority; where projects have
shares, gangs of the same priority that others hold beyond theirs; and in its first minutes gangs of its own project and
priority that have had theirs, so that a short job does not wait for as long as large ones run (Tiresias' least attained
service, NSDI '19, with one threshold). A preempted gang is asked to commit, is charged no restart, and returns to the
queue; its nodes are kept for the gang that it made room for. An elastic gang may be made smaller instead.

**No cycle.** Count a gang as having its nodes from the moment at which others are asked to make room for it, and those
others as gone. Let F(p) be how many gangs of priority p or higher have nodes in their first minutes, U(p) the GPUs that
projects hold by gangs of priority p or higher as far as they are entitled to them, and H(p) all GPUs held by such
gangs. Compare states by (F(p), U(p), H(p)), from the highest p down. Giving idle nodes to a gang of priority p lowers
nothing and raises H(p). Preempting gangs of lower priorities for it changes nothing above p, lowers nothing at p, and
raises H(p). No gang in its first minutes is preempted for an equal: so preempting its own project's gangs for it raises
F(p), and preempting other projects' lowers no F; that is done only if it raises U(p) (`_fair`), judged for the set that
is truly preempted (what Kueue #14543 does for another set). A gang that begins where others made room was counted
before. It finds that room, however many gangs wait at once and whichever of the others is gone first: from the order
on, its nodes are given to none of its priority or a lower one (nominations.py). One of a higher priority that takes
them raises what is compared before. Each step goes up, and there are finitely many states; so while nobody submits,
ends, has had its first minutes or changes a quota, and no node fails, preemption comes to an end. A gang with others
preempted for it also comes first in the queue among its equals, and must stand before the preempted gangs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from muster.operator.core.evictions import FIRST_SECONDS, Eviction, PreemptionOption, cheapest_set, cost
from muster.operator.core.explain_wait import need
from muster.operator.core.fair_share import FleetShares, gpus_by_project
from muster.operator.core.fleet import Fleet, JobSummary
from muster.operator.core.nominations import NominationPass
from muster.operator.core.observed import NodeReservation
from muster.operator.core.placement import FleetSpace, GangRequest, NodeSpace, WorkerShape, needs_by_node
from muster.operator.core.victims import VictimSelector, is_leaving
from muster.operator.core.visibility import describe_job, describe_jobs

# GPUs put out for each that is asked for, at most. With less, a gang of one node waits where only gangs of two run;
# without a limit a request for 48 GPUs once put out 376 (KAI, PR 1565). Over many requests it is about one for one, for
# the cheapest set is nearly always the smallest (benchmarks/fairness.py).
EVICTED_PER_REQUESTED_MAX = 2.0
# The same where all of them are of a lower priority, and nothing less would do: else an urgent gang of one node waits
# for as long as only gangs of four nodes run.
EVICTED_PER_URGENT_REQUESTED_MAX = 4.0
# In one pass so many gangs have others put out, and of so many it is tried. The first in line suffices for progress.
PREEMPTIONS_MAX, TRIES_MAX = 4, 8


@dataclass(frozen=True, slots=True)
class GangPreemption:
    """Gangs that are preempted for one gang, and the nodes that are kept for it meanwhile."""

    job: JobSummary
    evictions: tuple[Eviction, ...]
    nodes: tuple[str, ...]
    reasons: tuple[str, ...] = ()
    """Reason why each may be preempted, in words for the gang for which it is done."""

    @property
    def cost(self) -> float:
        return sum(eviction.cost for eviction in self.evictions)


@dataclass(slots=True)
class _VictimGroup:
    """Gangs of which some share a node that only all of them together would free."""

    uids: set[str]
    gains: dict[str, int] = field(default_factory=dict)
    """Number of additional workers that each node carries without them."""


class PreemptionPlanner:
    """Planner of preemptions over one pass of admission. `entries` is its list of reservations, `space` what is
    free."""

    def __init__(
        self,
        fleet: Fleet,
        entries: list[NodeReservation],
        space: FleetSpace,
        shares: FleetShares,
        nominations: NominationPass,
    ) -> None:
        self._fleet, self._entries, self._space, self._shares = fleet, entries, space, shares
        self._nominations = nominations
        self._jobs = {job.uid: job for job in fleet.jobs}
        self.yielding: dict[str, str] = {entry.uid: entry.yields_to for entry in entries if entry.yields_to}
        for holders in self._on.values() if self.yielding else ():
            for uid in holders.keys() & self.yielding.keys():
                shares.hold(self._jobs[uid], -sum(shape.gpus for shape in holders[uid]))
        self._victims = VictimSelector(fleet, entries, shares, self.yielding)
        self._costs: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        self._failed: set[tuple[object, ...]] = set()
        self._tries = 0
        self.made: list[GangPreemption] = []
        self.kept: dict[str, tuple[str, ...]] = {}
        """The nodes that are kept for a gang while others make room for it, by its uid."""

    @cached_property
    def _on(self) -> dict[str, dict[str, list[WorkerShape]]]:
        """The workers that each job takes from each node once it is preempted; by node, then by uid. Computed only when
        a gang has to be preempted: in a large fleet it takes as long as all the rest.
        """
        by_job: dict[str, list[NodeReservation]] = {}
        for entry in self._entries:
            by_job.setdefault(entry.uid, []).append(entry)
        shapes: dict[str, dict[str, list[WorkerShape]]] = {}
        for uid, mine in by_job.items():
            stays = {name for entry in mine[1:] for name in entry.nodes} if mine[0].yields_to else set()
            for name, shape in needs_by_node(mine):
                if name not in stays:
                    shapes.setdefault(name, {}).setdefault(uid, []).append(shape)
        return shapes

    def plan(self, job: JobSummary, ask: GangRequest) -> GangPreemption | None:
        """Return the gangs to preempt so that the smallest gang of the request fits; no evictions where what already
        yields to it will do. None if nothing helps.
        """
        if not may_preempt(self._fleet, job):
            return None
        mine = {uid for uid, other in self.yielding.items() if other == job.uid}
        goes_on = bool(mine) or job.uid in self._nominations
        priority = self._fleet.priority(job)
        if not goes_on and (self._tries >= TRIES_MAX or len(self.made) >= PREEMPTIONS_MAX):
            return None
        victims = self._victims
        lower, equal = victims.lower(priority), victims.beyond_their_share(job, priority)
        own = victims.of_its_project(job, priority, EVICTED_PER_REQUESTED_MAX * ask.sizes[-1] * ask.shape.gpus)
        whose = (job.project, bool(own)) if equal or own else ()
        key = (ask.shape, ask.sizes[-1], priority, whose, ask.avoid, ask.required)
        if not goes_on and key in self._failed:
            return None
        self._tries += not goes_on
        tries = [(lower | equal, EVICTED_PER_REQUESTED_MAX)] if equal else []
        tries += [(lower, EVICTED_PER_REQUESTED_MAX), (lower, EVICTED_PER_URGENT_REQUESTED_MAX)]
        tries += [(lower | own, EVICTED_PER_REQUESTED_MAX)] if own else []
        for allowed, most in tries:
            preemption = self._cheapest_of_all(job, ask, allowed, mine, most)
            if preemption is not None and self._fair(job, ask, preemption.evictions):
                self._keep(preemption, ask)
                return preemption
        self._failed.add(key)
        return None

    def words(self, job: JobSummary, ask: GangRequest) -> str:
        """Return the reason for a gang that others make room for."""
        asked = [self._jobs[uid] for uid, other in self.yielding.items() if other == job.uid]
        whom = f"{describe_jobs(job, asked)} {'is' if len(asked) == 1 else 'are'} asked to commit and make room"
        return f"{need(ask.shape, ask.sizes[-1])}; {whom if asked else 'others are about to end and make room'}"

    def put_out(self, entries: list[NodeReservation], waiting: set[str]) -> tuple[NodeReservation, ...]:
        """The reservations with whom each yields to. One that yields to a job that is not `waiting` for it any more is
        as before, unless the smaller gang that it becomes has its reservation already: whoever moves there may have
        begun.
        """
        orders = {e.job.uid: (preemption.job, e) for preemption in self.made for e in preemption.evictions}
        later = {(entry.uid, entry.number - 1) for entry in entries}
        after = []
        for entry in entries:
            job, eviction = orders.get(entry.uid, (None, None))
            if job is not None and eviction is not None:
                after.append(replace(entry, yields_to=job.uid, yields_because=self._reasons[entry.uid]))
                if eviction.kept:
                    after.append(replace(entry, number=entry.number + 1, nodes=eviction.kept, at=self._fleet.now))
            elif entry.yields_to and entry.yields_to not in waiting and (entry.uid, entry.number) not in later:
                after.append(replace(entry, yields_to="", yields_because=""))
            else:
                after.append(entry)
        return tuple(after)

    def _cost(self, uid: str) -> float:
        if uid not in self._costs:
            self._costs[uid] = cost(self._victims.all[uid], self._fleet.now)
        return self._costs[uid]

    def _keep(self, preemption: GangPreemption, ask: GangRequest) -> None:
        """Keep the nodes for the gang: from here on they count as the gang's in whose turn it is and in what is
        fair."""
        job, shares = preemption.job, self._shares
        self._space.keep(preemption.nodes)
        self.kept[job.uid] = preemption.nodes
        reasons = tuple(self._why(job, eviction.job, job) for eviction in preemption.evictions)
        for eviction in preemption.evictions:
            victim = eviction.job
            self._victims.all.pop(victim.uid)
            self.yielding[victim.uid] = job.uid
            self._reasons[victim.uid] = f"preempted by {describe_job(victim, job)}, {self._why(job, victim, victim)}"
        for eviction in preemption.evictions:
            shares.hold(eviction.job, -eviction.gpus)
        shares.hold(job, ask.sizes[-1] * ask.shape.gpus)
        if preemption.evictions:
            self.made.append(replace(preemption, reasons=reasons))

    def _why(self, job: JobSummary, victim: JobSummary, reader: JobSummary) -> str:
        """Return why `victim` is preempted for `job`, in words for one of them."""
        other = victim if reader is job else job
        mine, theirs = self._fleet.priority(reader), self._fleet.priority(other)
        if mine != theirs:
            return f"which has priority {theirs} where this job has {mine}"
        if job.project == victim.project:
            return f"so that each job of project {job.project} soon has its first {FIRST_SECONDS / 60:g} minutes"
        words = self._shares.words
        return f"for {words(job.project, reader)}, and {words(victim.project, reader)}"

    def _fair(self, job: JobSummary, ask: GangRequest, evictions: tuple[Eviction, ...]) -> bool:
        """See `No cycle` above."""
        priority, shares = self._fleet.priority(job), self._shares
        others = (e for e in evictions if e.job.project != job.project)
        equals = [(e.job, e.gpus) for e in others if self._fleet.priority(e.job) == priority]
        if not equals:
            return True
        taken = gpus_by_project(equals)
        gpus = ask.sizes[-1] * ask.shape.gpus
        gain = shares.within(job.project, priority, gpus) - shares.within(job.project, priority)
        loss = sum(shares.within(name, priority) - shares.within(name, priority, -less) for name, less in taken.items())
        turn = shares.turn(job.project, priority)
        first = all(turn < shares.turn(name, priority, -less) for name, less in taken.items())
        return first and gain > loss + 1e-9

    def _cheapest_of_all(
        self, job: JobSummary, ask: GangRequest, allowed: set[str], mine: set[str], most: float
    ) -> GangPreemption | None:
        """The cheapest over all pools (and topology domains), of at most `most` GPUs for each that is asked for."""
        size = ask.sizes[-1]
        already = sum(
            shape.gpus for shapes in self._on.values() for uid in shapes.keys() & mine for shape in shapes[uid]
        )
        gpus_max = int(most * size * ask.shape.gpus) - already
        gone = mine | {other.uid for other in self._fleet.jobs if is_leaving(other)}
        best: GangPreemption | None = None
        for rooms in self._space.groups(ask).values():
            if sum(ask.shape.carried_by(room.node) for room in rooms) < size:
                continue
            option = self._cheapest_here(job, ask, rooms, allowed, gone, gpus_max)
            if option is not None and (best is None or option.cost < best.cost):
                best = option
        return best

    def _cheapest_here(
        self,
        job: JobSummary,
        ask: GangRequest,
        rooms: list[NodeSpace],
        allowed: set[str],
        gone: set[str],
        gpus_max: int,
    ) -> GangPreemption | None:
        shape, size = ask.shape, ask.sizes[-1]
        there = {room.node.name: self._carries(room, shape, gone) for room in rooms}
        missing = size - sum(there.values())
        chosen: tuple[Eviction, ...] = ()
        if missing > 0:
            options = [list(self._options(unit, missing)) for unit in self._units(rooms, shape, allowed, gone, there)]
            option = cheapest_set(options, missing, gpus_max)
            if option is None:
                return None
            chosen = option.evictions
        freed: dict[str, set[str]] = {}
        for eviction in chosen:
            for name in eviction.freed:
                freed.setdefault(name, set()).add(eviction.job.uid)
        nominated = self._nominations.nodes(job.uid)  # they come first, so that they stay the same from pass to pass
        useful = sorted(
            (r for r in rooms if there[r.node.name] or r.node.name in freed),
            key=lambda r: (r.node.name not in nominated, r.freedom(shape)),
        )
        counts = {r.node.name: self._carries(r, shape, gone | freed.get(r.node.name, set())) for r in useful}
        return GangPreemption(job, chosen, tuple(_enough(counts, size))) if sum(counts.values()) >= size else None

    def _carries(self, room: NodeSpace, shape: WorkerShape, without: set[str]) -> int:
        """Workers that the node has room for once these jobs are gone from it."""
        shapes = self._on.get(room.node.name, {})
        return room.carries(shape, [each for uid in shapes.keys() & without for each in shapes[uid]])

    def _units(
        self, rooms: list[NodeSpace], shape: WorkerShape, allowed: set[str], gone: set[str], there: dict[str, int]
    ) -> Iterable[_VictimGroup]:
        """Return the units that can be preempted, so that no two gain by the same node: a node that one gang alone
        would free is the cheapest such gang's, and one that only several together would free makes them one unit.
        """
        units: dict[str, _VictimGroup] = {}
        together: list[tuple[str, list[str], int]] = []
        for room in rooms:
            name = room.node.name
            holders = sorted(self._on.get(name, {}).keys() & allowed)
            for uid in holders:
                units.setdefault(uid, _VictimGroup({uid}))
            alone = {uid: self._carries(room, shape, gone | {uid}) - there[name] for uid in holders}
            if useful := [uid for uid in holders if alone[uid] > 0]:
                uid = min(useful, key=lambda uid: (self._cost(uid), uid))
                units[uid].gains[name] = alone[uid]
            elif len(holders) > 1 and (gain := self._carries(room, shape, gone | set(holders)) - there[name]) > 0:
                together.append((name, holders, gain))
        for name, holders, gain in together:
            joined = units[holders[0]]
            for other in (units[uid] for uid in holders):
                if other is not joined:
                    joined.uids |= other.uids
                    joined.gains |= other.gains
                    for uid in other.uids:
                        units[uid] = joined
            joined.gains[name] = gain
        return {min(unit.uids): unit for unit in units.values() if unit.gains}.values()

    def _options(self, unit: _VictimGroup, missing: int) -> Iterator[PreemptionOption]:
        jobs = [self._victims.all[uid] for uid in sorted(unit.uids)]
        stopped = tuple(Eviction(job, job.status.gang.nodes, (), self._cost(job.uid)) for job in jobs)
        workers = sum(unit.gains.values())
        yield PreemptionOption(stopped, workers, sum(e.cost for e in stopped), sum(e.gpus for e in stopped))
        if len(jobs) > 1:
            return
        job, nodes = jobs[0], jobs[0].status.gang.nodes
        if len(set(nodes)) < len(nodes):
            return
        useful = sorted((name for name in nodes if name in unit.gains), key=lambda name: (-unit.gains[name], name))
        others = [name for name in nodes if name not in unit.gains]
        for size in sorted(job.spec.gang_sizes(), reverse=True) if job.spec.gang.nodes.min < len(nodes) else ():
            if size >= len(nodes):
                continue
            freed = set((useful + others)[: len(nodes) - size])
            shrunk = Eviction(
                job,
                tuple(name for name in nodes if name in freed),
                tuple(name for name in nodes if name not in freed),
                cost(job, self._fleet.now, requeued=False),
            )
            workers = sum(unit.gains.get(name, 0) for name in freed)
            yield PreemptionOption((shrunk,), workers, shrunk.cost, shrunk.gpus)
            if workers >= missing:
                return


def may_preempt(fleet: Fleet, job: JobSummary) -> bool:
    quota = fleet.quotas.get(job.project)
    return quota is not None and quota.preempts and job.spec.gang.gpus_per_node > 0


def _enough(counts: Mapping[str, int], size: int) -> Iterator[str]:
    """The first nodes that carry so many workers together."""
    for name, count in counts.items():
        if size <= 0:
            return
        if count:
            yield name
            size -= count
