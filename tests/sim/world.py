"""A seeded world: its store, its gangs, and its machines, with everything that goes wrong in it.

Nothing here knows how the operator thinks.
"""

from __future__ import annotations

from muster.operator.core.observed import WorkerState
from muster.words.signals import Cause, Signal, SignalKind, WorkerExit
from tests.sim.gangs import Gangs
from tests.sim.physics import Process, SimJob, SimNode


class SimWorld(Gangs):
    # --- machines ---

    def node_down(self, node: SimNode) -> None:
        """Power lost: its processes end unseen, its workers stop answering."""
        if not node.up or node.gone:
            return
        node.up = node.reachable = False
        node.down_since = self.t
        self.log(lambda: f"node {node.name} dies")
        for job, process in self.on(node):
            job.allow(process.attempt, Cause.INFRASTRUCTURE)
            if process.alive:
                process.alive, process.died_at = False, self.t
                self.break_gang(job, process.attempt)
            self.after(self.rng.uniform(0.5, 15.0), lambda j=job, p=process: self._unanswered(j, p))  # type: ignore[misc]
        self.fleet_changed()

    def _unanswered(self, job: SimJob, process: Process) -> None:
        node = self.nodes[process.node]
        if process.visible and not node.reachable and process.state is WorkerState.RUNNING:
            process.state, process.since = WorkerState.UNREACHABLE, self.t
            job.allow(process.attempt, Cause.INFRASTRUCTURE)
            self.crew_changed(job)

    def node_up(self, node: SimNode) -> None:
        if node.gone or (node.up and node.reachable):
            return
        died = not node.up
        node.up = node.reachable = True
        self.log(lambda: f"node {node.name} is back")
        for job, process in self.on(node):
            process.cut_off_at = float("inf")
            if process.ghost and process.alive:
                self.end(process, 137, signal=9)  # the kubelet learns that the worker should not be there
            elif process.state in (WorkerState.UNREACHABLE, WorkerState.RUNNING) and not process.alive:
                process.state, process.since, process.reason = (
                    WorkerState.EXITED,
                    self.t,
                    "NodeLost" if died else process.reason,
                )
                process.exit = process.exit or WorkerExit.model_construct(
                    exit_code=137, at=self.wall, rank=None, signal=9, step=None, message="", log_tail=""
                )
                job.deaths.setdefault(process.id, 137)
                job.allow(process.attempt, Cause.INFRASTRUCTURE, Cause.UNKNOWN)
                if process.removing:
                    self.after(1.0, lambda j=job, p=process: self.forget(j, p))  # type: ignore[misc]
                self.crew_changed(job)
            elif process.state in (WorkerState.UNREACHABLE, WorkerState.RUNNING):
                if process.state is WorkerState.UNREACHABLE:
                    process.state, process.since = WorkerState.RUNNING, self.t
                # The kubelet hears only now that it was deleted, or still owes a kill.
                if process.removing and (process.kill_at is None or process.kill_at <= self.t):
                    self.at(self.t + 5.0, lambda p=process: self.end(p, 137, signal=9))  # type: ignore[misc]
                self.crew_changed(job)
        self.fleet_changed()

    def partition(self, node: SimNode, seconds: float) -> None:
        """The node goes on, but nothing reaches it: neither the operator nor, from it, the API or its peers."""
        if not node.up or not node.reachable or node.gone:
            return
        node.reachable = False
        self.log(lambda: f"node {node.name} is cut off")
        for job, process in self.on(node):
            process.cut_off_at = self.t
            self.after(self.rng.uniform(0.5, 15.0), lambda j=job, p=process: self._unanswered(j, p))  # type: ignore[misc]
            if process.wanted > 1:
                self.break_gang(job, process.attempt)
        self.after(seconds, lambda: self.node_up(node))
        self.fleet_changed()

    def drain_node(self, node: SimNode, kind: SignalKind, seconds: float) -> None:
        """The node is announced to go; spot capacity is gone for good after two minutes, a drained node comes back."""
        if node.gone or node.draining:
            return
        node.draining = True
        self.log(lambda: f"{kind} for node {node.name}")
        cause = Cause.PREEMPTION if kind is SignalKind.SPOT_NOTICE else Cause.EVICTION
        for job, process in self.on(node):
            if self.current(job, process):
                job.allow(process.attempt, cause)
                signal = Signal.model_construct(
                    kind=kind,
                    attempt=process.attempt,
                    at=self.wall,
                    worker=None,
                    rank=None,
                    node=node.name,
                    message="",
                    source="agent",
                )
                delay = self.rng.uniform(0.1, 5.0)
                self.after(delay, lambda j=job, s=signal: self.signal(j, s))  # type: ignore[misc]
                if self.chance(self.weather.late_signal):
                    self.after(self.rng.uniform(20.0, 300.0), lambda j=job, s=signal: self.signal(j, s))  # type: ignore[misc]
        self.after(seconds, lambda: self._reclaim(node, kind))
        self.fleet_changed()

    def _reclaim(self, node: SimNode, kind: SignalKind) -> None:
        if node.gone:
            return
        if kind is SignalKind.NODE_DRAIN:
            node.draining = False
            self.fleet_changed()
            return
        self.node_down(node)
        node.gone = True
        for job, process in self.on(node):
            job.allow(process.attempt, Cause.INFRASTRUCTURE, Cause.PREEMPTION)
            self.after(self.rng.uniform(1.0, 40.0), lambda j=job, p=process: self.forget(j, p))  # type: ignore[misc]
        # The autoscaler finds another one later.
        self.after(self.rng.uniform(60.0, 400.0), lambda: self._replace(node))
        self.fleet_changed()

    def _replace(self, node: SimNode) -> None:
        node.gone = node.draining = False
        node.up = node.reachable = True
        self.log(lambda: f"node {node.name} is replaced")
        self.fleet_changed()

    def on(self, node: SimNode) -> list[tuple[SimJob, Process]]:
        return [
            (job, p)
            for job in self.jobs.values()
            for p in list(job.processes.values())
            if p.node == node.name and (p.visible or p.alive)
        ]
