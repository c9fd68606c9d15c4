"""The promises, checked against what truly happened, at every event that could break one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.operator.core.codes import Code
from muster.operator.core.observed import NodeReservation
from muster.words.names import WorkerId
from muster.words.quotas import ProjectQuota
from muster.words.signals import Cause, SignalKind
from muster.words.status import STATUS_VERSION, Failure, GoodputState, JobStatus, Phase
from tests.sim.months import MonthChecks
from tests.sim.preemption_checks import ALIVE, QUOTA_SEEN_SECONDS, PreemptionChecks

if TYPE_CHECKING:
    from tests.sim.physics import Process, SimJob, Training
    from tests.sim.world import SimWorld

FREE = (Cause.PREEMPTION, Cause.EVICTION)
BUG = "IndexError"  # what a job with a bug says when it strikes
HELD_SEEN_SECONDS = 2.0  # after a process was held: what was read before is still acted on


class Violation(AssertionError):
    """A promise was broken."""


class Checkers:
    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.preemption = PreemptionChecks(world, self.require)
        self.months = MonthChecks(world, self.require)
        self.lags = world.weather.stale > 0
        self.errs = world.weather.api_error > 0  # what is written is written again later, after a back-off
        self.slow = world.weather.latency >= 1.0  # what is read is seconds old when it is acted on
        self.jumped = False  # the wall clock did: windows and deadlines then follow it, and are not checked

    def require(self, holds: bool, promise: str, detail: str) -> None:
        if not holds:
            raise Violation(f"{promise}: {detail}")

    # --- each event ---

    def status_written(self, job: SimJob, before: JobStatus, after: JobStatus, who: str) -> None:
        what = f"{job.name} {before.phase}/{before.attempt} -> {after.phase}/{after.attempt} ({after.code}) by {who}"
        self.require(after.because != "" and after.code in set(Code), "a status explains itself", what)
        self.require(after.attempt in (before.attempt, before.attempt + 1), "attempts never go back", what)
        self.require(after.reservation >= before.reservation, "reservations never go back", what)
        rewritten = before.schema_version < STATUS_VERSION and after.phase is before.phase
        self.require(not before.phase.terminal or rewritten, "an ended job stays ended", what)
        self.require(before.schema_version <= STATUS_VERSION, "a newer status is not touched", what)
        self.require(after.schema_version == STATUS_VERSION, "what is written has today's form", what)
        self._progress(before, after, what)
        self._restarts(job, before, after, what)
        charged = {fault.node for fault in after.node_faults if fault.why.startswith("straggler")}
        self.require(charged <= job.slow_nodes, "only the node of a slow rank is charged", f"{what}: {charged}")
        self._goodput(job, after, what)
        self.months.status_written(job, before, after, what, exact=not self.jumped)
        if after.attempt > before.attempt:
            self._minted(job, before, after, what)
        if _closes(before, after):
            self._closed(job, after, what)
        if after.phase is Phase.RUNNING:
            lives = [str(life) for life in map(after.current, range(after.gang.wanted)) if life not in job.created]
            self.require(not lives, "whoever runs was made", f"{what}: {lives}")
        if before.phase in ALIVE and after.phase in (Phase.RESTARTING, Phase.STOPPING):
            self._justified(job, before, after, what)
        if after.phase.terminal or after.phase in (Phase.SUSPENDED, Phase.QUEUED):
            self.require(not after.gang.nodes, "whoever does not run holds nothing", what)
            self._empty(job, what)
        if after.phase.terminal:
            self._ended(job, after, what)
        self._capacity_promised()

    def _progress(self, before: JobStatus, after: JobStatus, what: str) -> None:
        # Until an attempt reports for the first time, the progress that is told is the last one's.
        known = before.attempts[-1].last_step if before.attempts and before.attempt == after.attempt else None
        if known is not None and after.progress and after.progress != before.progress:
            steps = (known, after.progress.step)
            self.require(steps[0] <= steps[1], "progress does not go back within an attempt", f"{what}: {steps}")
        if before.checkpoint and after.checkpoint:
            steps = (before.checkpoint.step, after.checkpoint.step)
            self.require(steps[0] <= steps[1], "a checkpoint that was reported stays reported", f"{what}: {steps}")

    def _restarts(self, job: SimJob, before: JobStatus, after: JobStatus, what: str) -> None:
        old, new = before.restarts, after.restarts
        forgotten = {cause for cause, count in old.by_cause.items() if new.by_cause.get(cause, 0) < count}
        self.require(new.total >= old.total and not forgotten, "restarts are never forgotten", what)
        charged = sum(new.by_cause.values()) - sum(old.by_cause.values())
        self.require(charged == 0 or (charged == 1 and _closes(before, after)), "an attempt is charged once", what)

    def _goodput(self, job: SimJob, after: JobStatus, what: str) -> None:
        seconds, since = after.ledger.seconds, after.ledger.since
        total = sum(seconds.values())
        self.require(
            all(value >= -1e-6 for value in seconds.values()), "goodput has no negative time", f"{what}: {seconds}"
        )
        self.require(
            not since or abs(total - (since - job.created_at)) < 1e-3,
            "goodput sums to the wall clock",
            f"{what}: {total} of {since - job.created_at}",
        )
        if after.phase.terminal and not self.jumped:
            gap = abs(since - (after.finished_at or 0.0))
            self.require(gap < 1e-3, "goodput is complete at the end", f"{what}: {gap} s are missing")

    def _minted(self, job: SimJob, before: JobStatus, after: JobStatus, what: str) -> None:
        wanted = len(after.gang.nodes)
        lingering = [p for p in job.processes.values() if p.visible and p.joined and p.attempt < after.attempt]
        self.require(
            not lingering, "a new attempt begins when the old one is gone", f"{what}: {[str(p.id) for p in lingering]}"
        )
        newest = max(
            (c[0] for c in job.commits if c[2] < self.world.t - 60 or (c[1] == before.attempt and not _late(job, c))),
            default=0,
        )
        self.require(
            after.resume_step >= newest,
            "no checkpoint is forgotten",
            f"{what}: resumes from {after.resume_step}, {newest} is there",
        )
        known = after.resume_step == 0 or any(c[0] == after.resume_step for c in job.commits)
        self.require(known, "an attempt resumes from a checkpoint", f"{what}: {after.resume_step}")
        sizes = job.spec.gang_sizes()
        self.require(
            wanted in sizes and after.gang.wanted == wanted, "all of the gang or none", f"{what}: {wanted} of {sizes}"
        )
        held = [e for e in self.world.reservations if e.uid == job.uid and e.number == after.reservation]
        self.require(
            any(e.nodes == after.gang.nodes for e in held), "only nodes that are reserved for it", f"{what}: {held}"
        )
        if not self.jumped:
            self._budgets_kept(job, what)
        skip = after.data_skip
        sane = skip is None or (skip.after_step == after.resume_step and 0 < skip.steps <= 10 * job.steps)
        self.require(sane, "data is passed over after the checkpoint that is resumed from", f"{what}: {skip}")
        numeric = bool(job.closed) and job.closed[-1][1:] == (before.attempt, Cause.NUMERIC)
        self.require(not numeric or skip is not None, "what could not be learnt from is passed over", what)
        self.require(not after.gang.incarnations, "an attempt begins with first lives", what)
        job.minted_at[after.attempt] = self.world.t
        last = [(a.cause, a.failed_step) for a in before.attempts[-2:] if a.message.startswith(BUG)]
        again = len(last) == 2 and last[0] == last[1]
        self.require(not again, "a deterministic failure is not tried a third time", what)

    def _budgets_kept(self, job: SimJob, what: str) -> None:
        window = job.spec.recovery.window_hours * 3600.0
        for cause in Cause:
            budget = job.spec.recovery.budget(cause)
            spent = sum(c == cause and self.world.wall - at < window for at, _, c in job.closed)
            allowed = budget is None or spent <= budget or "recovery" in job.requested
            self.require(allowed, "budgets are kept", f"{what}: {spent} restarts for {cause}, {budget} allowed")

    def _closed(self, job: SimJob, after: JobStatus, what: str) -> None:
        attempt = after.attempts[-1]
        self.require(attempt.outcome != "running", "an attempt that ended says how", what)
        if attempt.cause is not None:
            job.closed.append((self.world.wall, attempt.number, attempt.cause))
        tolerance = 2.0 * job.step_seconds + 1e-6
        lost = attempt.seconds.get(GoodputState.LOST, 0.0)
        if not self.jumped:
            self.require(
                lost <= (attempt.lost_steps * job.step_seconds) + tolerance,
                "lost time is what is trained again",
                f"{what}: {lost} s",
            )

    def _justified(self, job: SimJob, before: JobStatus, after: JobStatus, what: str) -> None:
        """Nobody restarts a healthy gang, and the cause that is named is one that happened."""
        if after.ends_as is Phase.SUCCEEDED:
            self.require(job.finished_training, "success means that training finished", what)
            return
        if after.code in (Code.SUSPENDING, Code.CANCELLING, Code.DELETING, Code.DEADLINE_EXCEEDED):
            wish = {"Suspending": "suspend", "Cancelling": "cancel", "Deleting": "deleting"}.get(after.code)
            self.require(wish is None or wish in job.requested, "nobody stops a job that nobody wants stopped", what)
            return
        if after.code == Code.MONTH_LIMIT:  # judged in months.py
            return
        if after.code == Code.WORKERS_REJECTED:
            true = before.attempt in job.rejected
            self.require(true, "only a gang that was refused is called so", what)
            return
        if after.code == Code.REGROWING:
            bigger = [e for e in self.world.reservations if e.uid == job.uid and len(e.nodes) > before.gang.wanted]
            self.require(bool(bigger), "a gang grows only into nodes that it holds", what)
            return
        failure = after.last_failure
        allowed = job.allowed.get(before.attempt, set())
        true = failure is not None and (failure.cause in allowed)
        self.require(
            true,
            "a healthy gang is left alone",
            f"{what}: {failure and failure.cause} of {sorted(allowed)}: {after.because}",
        )

        if failure is not None and failure.worker is not None and failure.exit_code is not None:
            life = WorkerId(failure.attempt, failure.worker, failure.incarnation)
            of_gang = life == before.current(failure.worker)
            self.require(of_gang and life in job.deaths, "the life that is named has ended", f"{what}: {life}")
        training = job.trainings.get(before.attempt)
        if failure is not None and training is not None and training.suspect is not None:
            self._suspect_named(training, failure, self._heard(job), what)

    def _suspect_named(self, training: Training, failure: Failure, heard: bool, what: str) -> None:
        """Where one rank shows itself to be the culprit, it is the one that is named, and its node with it."""
        loaded = training.broken_at is not None and training.broken_at >= training.met_at + training.load_seconds
        shows = training.hang in ("stopped", "mute") or (
            training.hang == "behind" and loaded and len(training.members) > 1 and heard
        )
        if failure.cause is Cause.HANG and shows and failure.message != SignalKind.COLLECTIVE_HANG:
            suspect = training.suspect
            named = suspect is not None and (failure.rank, failure.node) == (suspect.index, suspect.node)
            self.require(named, "the rank that hangs is named", f"{what}: {failure.message} ({training.hang})")
            # Found in half the time that a gang may stand still, while its neighbours are heard.
            held = suspect is not None and suspect.held[0] <= self.world.t < suspect.held[1] + HELD_SEEN_SECONDS
            clear = training.hang == "mute" and loaded and heard and not held
            silent = not clear or "no sign of life" in failure.message
            self.require(silent, "a mute rank is known by its silence", f"{what}: {failure.message}")

    def _empty(self, job: SimJob, what: str) -> None:
        """A worker that was created late by a delayed call has not passed the fence and never will."""
        there = [p for p in job.processes.values() if p.visible and p.joined and not p.ghost and p.state != "exited"]
        self.require(not there, "terminal means empty", f"{what}: {[str(p.id) for p in there]}")

    def _ended(self, job: SimJob, after: JobStatus, what: str) -> None:
        if after.phase is Phase.SUCCEEDED:
            self.require(job.finished_training, "success means that training finished", what)
            self.require(job.newest_commit() >= job.steps, "success means that the last step is committed", what)
        if after.phase is Phase.CANCELLED:
            self.require(bool(job.requested & {"cancel", "deleting"}), "nobody cancels unasked", what)
        if after.phase is Phase.FAILED and not self.jumped:
            self._failed_rightly(job, after, what)

    def _failed_rightly(self, job: SimJob, after: JobStatus, what: str) -> None:
        recovery = job.spec.recovery
        if after.code == Code.BUDGET_SPENT:
            cause = after.attempts[-1].cause
            self.require(cause is not None and cause not in FREE, "preemption costs nothing", what)
            budget = recovery.budget(cause) if cause else 0
            spent = sum(c == cause for _, _, c in job.closed)
            enough = budget is not None and (spent > budget or "recovery" in job.requested)
            self.require(enough, "a budget is spent before it is called spent", f"{what}: {spent} of {budget}")
        elif after.code == Code.CRASH_LOOP:
            fruitless = _fruitless(job)
            enough = fruitless >= recovery.stop_after_no_progress or "recovery" in job.requested
            self.require(enough, "a crash loop is one", f"{what}: {fruitless} crashes in a row: {job.closed}")
        elif after.code == Code.REPEATED_FAILURE:
            true = job.bug_step is not None and after.last_failure is not None and BUG in after.last_failure.message
            self.require(true, "only a deterministic failure is called one", what)
        else:
            deadline = job.spec.active_deadline_seconds
            set_once = deadline is not None or "active_deadline_seconds" in job.requested
            self.require(after.code == Code.DEADLINE_EXCEEDED and set_once, "a failure has a reason", what)

    def goodput_is_true(self, job: SimJob) -> None:
        """What the account calls productive or lost was trained in truth. Where no call fails or takes seconds, none is
        missing either (time that is booked as starting, because an old heartbeat said so, is not booked again).
        """
        seconds = job.status.ledger.seconds
        claimed = seconds.get(GoodputState.PRODUCTIVE, 0.0) + seconds.get(GoodputState.LOST, 0.0)
        trained = job.trained_seconds  # of gangs that ended
        if any(not t.over and t.broken_at is None for t in job.trainings.values()):
            return
        rounding = job.step_seconds * len(job.trainings) + 1e-3  # a step that ends at this very moment
        self.require(claimed <= trained + rounding, "goodput claims nothing", f"{job.name}: {claimed} s of {trained} s")
        if job.status.attempt == 1 and job.status.phase is Phase.SUCCEEDED and self._heard(job) and not self.errs:
            missed = f"{job.name}: {claimed} s of {trained} s: {seconds}"
            slack = 2.0 + job.step_seconds  # two heartbeats, and the step in which the gang was first seen to train
            self.require(claimed >= trained - slack, "goodput misses nothing", missed)

    def rejected_gives_back(self, job: SimJob, process: Process) -> None:
        """A gang whose workers are refused for long holds no nodes."""
        if process.rejection is not None:
            self.refused_gives_back(job, process)

    def refused_gives_back(self, job: SimJob, process: Process) -> None:
        """Where nothing keeps the operator from knowing."""
        weather = self.world.weather
        blind = weather.api_error + weather.lost_reply + weather.lost_news + weather.outage + weather.operator_crash
        if blind or self.lags or self.slow or self.jumped or not process.visible:
            return
        holds = job.status.attempt == process.attempt and bool(job.status.gang.nodes)
        self.require(not holds, "a gang that is refused gives its nodes back", f"{job.name}: {job.status.because}")

    def _heard(self, job: SimJob) -> bool:
        """Whether the operator could know at every moment what the job's ranks did."""
        return not (self.jumped or self.lags or self.slow or job.muffled)

    def reservations_written(self, before: tuple[NodeReservation, ...], after: tuple[NodeReservation, ...]) -> None:
        self.preemption.kept(before, after)
        before, after = (tuple(entry for entry in entries if not entry.nominated) for entries in (before, after))
        held: dict[str, set[str]] = {}
        gpus: dict[str, int] = {}
        by_namespace: dict[str, int] = {}
        for entry in after:
            for node in entry.nodes:
                if entry.uid not in held.setdefault(node, set()):
                    held[node].add(entry.uid)
                    gpus[node] = gpus.get(node, 0) + entry.gpus
                    by_namespace[entry.namespace] = by_namespace.get(entry.namespace, 0) + entry.gpus
        for node, used in gpus.items():
            self.require(
                used <= self.world.nodes[node].gpus, "no over-admission", f"{used} GPUs on {node}: {held[node]}"
            )
        grew = {e.namespace for e in set(after) - set(before)}
        for namespace, limit in self.world.limits.items():
            if namespace in grew:
                self.require(
                    by_namespace.get(namespace, 0) <= limit,
                    "a namespace keeps its limit",
                    f"{namespace}: {by_namespace}",
                )
        self._quotas_kept(before, after)
        self.months.granted(before, after, exact=not self.jumped)
        self.preemption.ordered(before, after)
        self._first_in_line_first(set(after) - set(before))
        dropped = {(e.uid, e.number) for e in before} - {(e.uid, e.number) for e in after}
        for uid, number in dropped:
            job = self.world.jobs[uid]
            safe = job.removed or job.status.reservation > number
            self.require(
                safe, "nodes are held until the gang is gone", f"{job.name}#{number} was dropped in {job.status.phase}"
            )

    def _quotas_kept(self, before: tuple[NodeReservation, ...], after: tuple[NodeReservation, ...]) -> None:
        """Whoever is given nodes had room for them, in its project and for its owner."""
        if self.world.t < self.world.quotas_changed_at + QUOTA_SEEN_SECONDS:
            return
        held_before, held = _gpus_held(before), _gpus_held(after)
        for uid in {uid for uid, _ in held.keys() - held_before.keys()}:
            job = self.world.jobs[uid]
            begins = not any(known == uid for known, _ in held_before)
            quota = self.world.quotas.get(job.project, ProjectQuota())
            for whose, limit, owner in (("project", quota, None), ("person", quota.person, job.owner)):
                mates = {
                    mate.uid
                    for mate in self.world.jobs.values()
                    if mate.project == job.project and owner in (None, mate.owner)
                }
                gpus = sum(count for (mate, _), count in held.items() if mate in mates)
                gangs = len(mates & {mate for mate, _ in held})
                processes = sum(self.world.jobs[mate].spec.gang.ranks_per_node for mate, _ in held if mate in mates)
                fits = not job.spec.gang.gpus_per_node or limit.gpus is None or gpus <= limit.gpus
                fits = fits and (not begins or limit.gangs is None or gangs <= limit.gangs)
                fits = fits and (limit.processes is None or processes <= limit.processes)
                what = f"that of {job.name} holds {gpus} GPUs and {processes} processes with {gangs} gangs: {limit!r}"
                self.require(fits, f"a {whose} keeps its quota", what)

    def _shares(self) -> bool:
        quotas = self.world.quotas.values()
        return any(quota.weight is not None or quota.guaranteed_gpus is not None for quota in quotas)

    def _first_in_line_first(self, granted: set[NodeReservation]) -> None:
        """Whoever asks for no more, and is ahead, would have fit where a later one was put."""
        for entry in granted:
            job = self.world.jobs[entry.uid]
            if job.status.phase is not Phase.QUEUED or entry.number != job.status.reservation:
                continue
            for other in self.world.jobs.values():
                ahead = (-other.spec.priority, other.created_at) < (-job.spec.priority, job.created_at)
                if (
                    ahead
                    and (other.project == job.project or not self._shares())
                    and self._could_take(other, entry)
                    and not any(e.uid == other.uid and not e.nominated for e in self.world.reservations)
                ):
                    self.require(False, "the first in line is served first", f"{job.name} before {other.name}")

    def _could_take(self, job: SimJob, entry: NodeReservation) -> bool:
        status, gang, wall = job.status, job.spec.gang, self.world.wall
        waiting = status.phase is Phase.QUEUED and not (
            job.removed or job.deleting or job.spec.cancel or job.spec.suspend
        )
        ready = (
            status.schema_version <= STATUS_VERSION
            and (status.retry_at is None or status.retry_at < wall - 60)
            and not status.excluded_nodes
        )
        long = (
            wall - (status.queued_at or wall) > 60
            and "priority" not in job.requested
            and "suspend" not in job.requested
        )
        small = (
            gang.nodes.min <= len(entry.nodes) and gang.gpus_per_node <= entry.gpus and gang.topology.required is None
        )
        return (
            waiting
            and ready
            and long
            and small
            and job.namespace not in self.world.limits
            and job.project not in self.world.quotas
        )

    def process_started(self, job: SimJob, process: Process) -> None:
        self._capacity_used(process.node)
        current = job.status.current(process.index)
        self.require(process.id <= current, "a life begins after the status says so", f"{process.id}, not {current}")

    def process_joins(self, job: SimJob, process: Process) -> None:
        current = job.status.current(process.index)
        self.require(process.id == current, "only a worker's current life joins", f"{process.id}, not {current}")
        others = [
            str(p.id)
            for p in job.processes.values()
            if (p.attempt, p.index) == (process.attempt, process.index) and p.joined and p.alive and not p.ghost
        ]
        self.require(not others, "a worker has one life at a time", f"{process.id} beside {others}")

    def training_began(self, job: SimJob, training: Training) -> None:
        """Two gangs of one job never train at once: except one that is cut off from everything, and can't commit."""
        others = [
            t.attempt
            for t in job.trainings.values()
            if t is not training and not t.over and t.broken_at is None and not any(p.ghost for p in t.members)
        ]
        self.require(not others, "one attempt at a time", f"{job.name}-{training.attempt} while {others} train")
        self.require(not job.status.phase.terminal, "nothing runs when it is over", f"{job.name}-{training.attempt}")
        nodes = {p.node for p in training.members}
        self.require(len(nodes) == len(training.members), "one worker per node", f"{job.name}: {nodes}")

    def committed(self, job: SimJob, training: Training, step: int) -> None:
        self.require(
            training.attempt == job.status.attempt, "only the current attempt commits", f"{job.name}-{training.attempt}"
        )
        speaker, current = training.speaker.id, job.status.current(0)
        self.require(
            speaker == current, "only a worker's current life commits", f"{job.name}: {speaker}, not {current}"
        )

    def worker_removed(self, job: SimJob, process: Process, who: str) -> None:
        status = job.status
        current = status.current(process.index)
        healthy = process.id == current and status.phase in ALIVE
        newer = process.id > current
        self.require(
            not healthy and not newer,
            "no live newer worker is deleted",
            f"{process.id} of {job.name} in {status.phase} by {who}",
        )

    def job_removed(self, job: SimJob) -> None:
        there = [str(p.id) for p in job.processes.values() if p.visible and p.joined and p.state != "exited"]
        self.require(
            job.status.phase.terminal and not there,
            "a job goes after its gang",
            f"{job.name}: {job.status.phase} {there}",
        )
        asked = job.deleting or job.spec.ttl_seconds_after_finished is not None
        self.require(asked, "no job is lost", f"{job.name} was removed unasked")

    # --- capacity ---

    def _capacity_promised(self) -> None:
        used: dict[str, int] = {}
        for job in self.world.jobs.values():
            if not job.removed:
                for node in job.status.gang.nodes:
                    used[node] = used.get(node, 0) + job.spec.gang.gpus_per_node
        for name, gpus in used.items():
            self.require(gpus <= self.world.nodes[name].gpus, "no over-admission", f"{gpus} GPUs promised on {name}")

    def _capacity_used(self, name: str) -> None:
        running = [
            (job, p)
            for job in self.world.jobs.values()
            for p in job.processes.values()
            if p.node == name and p.alive and p.joined and not p.ghost
        ]
        gpus = sum(job.spec.gang.gpus_per_node for job, _ in running)
        words = [f"{job.name}-{p.attempt}-{p.index}" for job, p in running]
        self.require(gpus <= self.world.nodes[name].gpus, "no over-admission", f"{gpus} GPUs used on {name} by {words}")


def _closes(before: JobStatus, after: JobStatus) -> bool:
    """An attempt ends with this write."""
    open_before = bool(before.attempts) and before.attempts[-1].ended_at is None
    return open_before and bool(after.attempts) and after.attempts[-1].ended_at is not None


def _fruitless(job: SimJob) -> int:
    """Attempts in a row, up to now, that failed by no act of the platform and made no commit."""
    count = 0
    for _, attempt, cause in reversed(job.closed):
        if any(commit[1] == attempt for commit in job.commits):
            break
        count += cause not in FREE
    return count


def _late(job: SimJob, commit: tuple[int, int, float, float]) -> bool:
    """A commit that a ghost may have published after it was seen gone."""
    return any(p.attempt == commit[1] and p.ghost for p in job.processes.values())


def _gpus_held(entries: tuple[NodeReservation, ...]) -> dict[tuple[str, str], int]:
    """By job and node."""
    return {(entry.uid, node): entry.gpus for entry in entries for node in entry.nodes}
