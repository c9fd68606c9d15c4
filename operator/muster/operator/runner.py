"""One pass of the operator: observe, decide, audit, then either write the status or do what it says.

`JobRunner` awaits nothing but the world, so the simulation drives it by hand; `serve` is the asyncio shell around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from dataclasses import replace

from muster.operator.core.admit import admit
from muster.operator.core.audit import AuditFailed, audit
from muster.operator.core.codes import Code
from muster.operator.core.decide import decide
from muster.operator.core.decision import ACTIONS_MAX, Action, JobDecision
from muster.operator.core.fleet import Fleet
from muster.operator.core.observed import NodeReservation, ObservedJob, QueueWait
from muster.operator.core.work_queue import WorkQueue
from muster.operator.pacing import (
    ADMISSION_SECONDS,
    IDLE_ADMISSION_SECONDS,
    PROGRESS_TEXT_SECONDS,
    PROGRESS_TEXT_SECONDS_MAX,
    PROGRESS_TEXTS_PER_SECOND,
    RESYNC_RESTING,
    RESYNC_RETRY_SECONDS,
    RESYNC_SECONDS,
    WAIT_TEXT_SECONDS,
    WAIT_TEXTS_PER_SECOND,
    WORKERS_PER_SECOND,
    WORKERS_SECONDS_MAX,
)
from muster.operator.world import FLEET, NotFound, VersionConflict, World
from muster.words.status import JobStatus, Phase

TROUBLE_LENGTH_MAX = 500
FAILURES_UNTIL_WARNING = 3  # in a row, within the first second; fewer pass by themselves and would only make noise


class RunnerListener:
    """Told of what happened, after it happened: metrics and logs hang here. All methods do nothing by default."""

    def decided(self, seen: ObservedJob, decision: JobDecision) -> None:
        """A decision was made, whether or not anything follows."""

    def wrote(self, seen: ObservedJob, decision: JobDecision) -> None:
        """The status was written: counters move here and nowhere else."""

    def applied(self, uid: str, action: Action) -> None:
        """An action was carried out."""

    def reserved(self, before: tuple[NodeReservation, ...], after: tuple[NodeReservation, ...]) -> None:
        """The reservations were written."""

    def failed(self, key: str, error: Exception, retry_seconds: float) -> None:
        """A pass ended in an error and is tried again; `key` is a job's uid, or FLEET for admission."""


class JobRunner:
    """All state here is a cache: a new Runner over the same world goes on where the old one ended."""

    def __init__(self, world: World, listener: RunnerListener | None = None) -> None:
        self.world = world
        self.listener = listener or RunnerListener()
        self.queue = WorkQueue()
        self.queue.prefer(FLEET, True)
        self._waits: dict[str, QueueWait] = {}
        self._budgets: dict[str, QueueWait] = {}  # who must stop for a month's budget, or may go on again
        self._published_waits: dict[
            str, tuple[QueueWait, float]
        ] = {}  # what each queued job was last told, and when (ticks)
        self._wrote: dict[str, float] = {}  # when a job's status was last written, or the job first seen (ticks)
        self._passing: dict[str, float] = {}  # since when a job has words that wait (ticks)
        self._failures: dict[str, int] = {}  # passes in a row that could not carry out what they decided
        self._resting: set[str] = set()  # suspended or over, and nothing was to be done at the last look
        self._resyncs = 0
        self._distrusted: set[str] = set()  # a conflict showed that what we see lags behind

    def enqueue(self, key: str, ticks: float) -> None:
        """Enqueue a job (its uid) or the fleet (FLEET) after a change."""
        self.queue.enqueue(key, ticks)

    async def turn(self, ticks: float) -> bool:
        """See to the one key that is due; False if none is. No error gets out and none loses the key."""
        key = self.queue.take(ticks)
        if key is None:
            return False
        try:
            wake_after = await (self.admission(ticks) if key == FLEET else self.look(key, ticks))
        except VersionConflict:
            self._distrusted.add(key)
            self.queue.done(key, ticks, 0.0)
        except NotFound:
            self.queue.done(key, ticks, None)
            self.queue.enqueue(FLEET, ticks)
        except Exception as error:
            self._distrusted.add(key)
            self.listener.failed(key, error, self.queue.failed(key, ticks))
        else:
            self.queue.done(key, ticks, wake_after)
        return True

    async def look(self, uid: str, ticks: float) -> float | None:
        """Make one pass over one job; return the seconds until the next."""
        seen, decision = await self._decide(uid)
        if seen is None or decision is None:
            self._forget(uid)
            self.queue.enqueue(FLEET, ticks)
            return None
        if faults := audit(seen, decision):
            raise AuditFailed(faults)
        if decision.status != seen.status:
            if (pause := self._pause(seen, decision, ticks)) > 0:
                return pause
            await self.world.write_status(uid, decision.status, seen.version)
            self._wrote[uid] = ticks
            self._passing.pop(uid, None)
            # Whoever begins goes on before others begin, too: of many jobs the first then train while the last start.
            self.queue.prefer(uid, bool(decision.status.gang.nodes))
            self.listener.wrote(seen, decision)
            if _concerns_the_queue(seen, decision):
                self.queue.enqueue(FLEET, ticks)
            return 0.0
        self._passing.pop(uid, None)
        if decision.wake_after is None and seen.status.phase in _RESTS:
            self._resting.add(uid)
        else:
            self._resting.discard(uid)
        await self._apply(seen, decision)
        return self._wake_after(decision)

    async def _apply(self, seen: ObservedJob, decision: JobDecision) -> None:
        """Carry out the actions; what keeps failing is said in the status."""
        try:
            for action in decision.actions:
                await self.world.apply(seen.uid, action)
                self.listener.applied(seen.uid, action)
        except (VersionConflict, NotFound):
            raise
        except Exception as error:
            self._failures[seen.uid] = self._failures.get(seen.uid, 0) + 1
            if self._failures[seen.uid] >= FAILURES_UNTIL_WARNING:
                await self._state_trouble(replace(seen, trouble=f"{error}"[:TROUBLE_LENGTH_MAX] or repr(error)))
            raise
        self._failures.pop(seen.uid, None)

    async def _state_trouble(self, seen: ObservedJob) -> None:
        decision = decide(seen)
        if decision.status == seen.status or audit(seen, decision):
            return
        with contextlib.suppress(VersionConflict, NotFound):  # the next pass sees why
            await self.world.write_status(seen.uid, decision.status, seen.version)
            self.listener.wrote(seen, decision)

    async def admission(self, ticks: float) -> float:
        """Make one pass over the queue, which decides who gets which nodes. Grants are made in one compare-and-swap of
        all reservations."""
        reservations = await self.world.reservations()
        fresh = FLEET in self._distrusted
        fleet = await self.world.fleet(fresh)
        plan = admit(fleet, reservations.entries)
        if not fresh and _trusts_absence(fleet, reservations.entries, plan.entries):
            plan = admit(await self.world.fleet(fresh=True), reservations.entries)
        self._distrusted.discard(FLEET)
        if plan.entries != reservations.entries:
            await self.world.write_reservations(plan.entries, reservations.version)
            self.listener.reserved(reservations.entries, plan.entries)
            for entry in set(plan.entries) - set(reservations.entries):
                self.queue.enqueue(entry.uid, ticks)
        for uid in {uid for uid, wait in plan.budgets.items() if self._budgets.get(uid) != wait}:
            self.queue.enqueue(uid, ticks)
        self._budgets = plan.budgets
        self._publish_waits(plan.waits, ticks)
        pause = ADMISSION_SECONDS if plan.waits else IDLE_ADMISSION_SECONDS
        return pause if plan.look_after is None else min(pause, plan.look_after)

    async def resync(self, ticks: float) -> None:
        """Look at everything, but at jobs that rest only now and then: ten thousand of them would keep a core busy."""
        for uid in await self.world.jobs():
            if uid not in self._resting or zlib.crc32(uid.encode()) % RESYNC_RESTING == self._resyncs % RESYNC_RESTING:
                self.queue.enqueue(uid, ticks)
        self._resyncs += 1
        self.queue.enqueue(FLEET, ticks)

    async def _decide(self, uid: str) -> tuple[ObservedJob | None, JobDecision | None]:
        fresh = uid in self._distrusted
        seen = await self._observe(uid, fresh)
        decision = decide(seen) if seen else None
        if (decision is None or decision.trusts_absence) and not fresh:
            seen = await self._observe(uid, fresh=True)
            decision = decide(seen) if seen else None
        self.queue.prefer(uid, bool(seen and seen.status.gang.nodes))
        if seen and decision:
            self.listener.decided(seen, decision)
        self._distrusted.discard(uid)
        return seen, decision

    async def _observe(self, uid: str, fresh: bool) -> ObservedJob | None:
        seen = await self.world.observe(uid, fresh)
        wait, budget = self._waits.get(uid), self._budgets.get(uid)
        return replace(seen, wait=wait, budget=budget) if seen and (wait or budget) else seen

    def _publish_waits(self, waits: dict[str, QueueWait], ticks: float) -> None:
        """Let the queued jobs whose reason changed report it."""
        self._waits = waits
        self._published_waits = {uid: published for uid, published in self._published_waits.items() if uid in waits}
        pause = max(WAIT_TEXT_SECONDS, len(waits) / WAIT_TEXTS_PER_SECOND)
        for uid, wait in waits.items():
            before, at = self._published_waits.get(uid, (None, 0.0))
            if before is None or before.code != wait.code or (before != wait and ticks - at >= pause):
                self._published_waits[uid] = (wait, ticks)
                self.queue.enqueue(uid, ticks)

    def _pause(self, seen: ObservedJob, decision: JobDecision, ticks: float) -> float:
        """The seconds that this change of status may wait for the next one; 0 if it is to be written now."""
        before, after = seen.status, decision.status
        if before.code == Code.CREATED and after.code == Code.AWAITING_ADMISSION:
            if seen.uid not in self._wrote:  # the pass over the queue will say more than that it has not come yet
                self._wrote[seen.uid] = ticks
                self.queue.enqueue(FLEET, ticks)
        elif not (_is_on_its_way(before, after) or _only_counts(before, after)):
            return 0.0
        pause = PROGRESS_TEXT_SECONDS
        since = self._wrote.get(seen.uid, ticks - pause)
        if not any(worker.reason for worker in seen.workers):
            pause = min(PROGRESS_TEXT_SECONDS_MAX, max(pause, len(self.queue) / PROGRESS_TEXTS_PER_SECOND))
            since = self._passing.setdefault(seen.uid, ticks)
        return max(0.0, since + pause - ticks)

    def _wake_after(self, decision: JobDecision) -> float | None:
        """The code that creates and removes workers reports when it is done: where there is much to do, that is not
        asked."""
        seconds, patient = decision.wake_after, decision.code == Code.CREATING_WORKERS or decision.status.phase.terminal
        if not patient or len(decision.actions) >= ACTIONS_MAX or seconds is None:
            return seconds
        return max(seconds, min(WORKERS_SECONDS_MAX, len(self.queue) / WORKERS_PER_SECOND))

    def _forget(self, uid: str) -> None:
        self._resting.discard(uid)
        self._wrote.pop(uid, None)
        self._passing.pop(uid, None)
        self._waits.pop(uid, None)
        self._budgets.pop(uid, None)
        self._failures.pop(uid, None)
        self._published_waits.pop(uid, None)


_RESTS = frozenset({Phase.SUSPENDED, Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})
_PASSING = frozenset({Code.AWAITING_WORKERS, Code.AWAITING_RANKS, Code.AWAITING_SCHEDULER})
_COUNTS = frozenset({"gang", "ledger", "attempts"})


def _is_on_its_way(before: JobStatus, after: JobStatus) -> bool:
    return (
        before.phase is after.phase is Phase.STARTING
        and after.code in _PASSING
        and before.suspicion == after.suspicion
        and before.schema_version == after.schema_version
    )


def _only_counts(before: JobStatus, after: JobStatus) -> bool:
    """Return whether only the number of running workers changed: they end one after another, and soon there is more to
    report."""
    if not before.phase is after.phase is Phase.RUNNING:
        return False
    old, new = before.__dict__, after.__dict__
    return all(value is old[name] or value == old[name] for name, value in new.items() if name not in _COUNTS)


def _trusts_absence(fleet: Fleet, before: tuple[NodeReservation, ...], after: tuple[NodeReservation, ...]) -> bool:
    """Return whether this change of the reservations holds only for a freshly read fleet: nodes are given to somebody,
    or a job is not there any more. What a job has given back it never takes again, however old the read that shows it.
    """
    uids = {job.uid for job in fleet.jobs}
    return not set(after) <= set(before) or any(entry.uid not in uids for entry in set(before) - set(after))


def _concerns_the_queue(seen: ObservedJob, decision: JobDecision) -> bool:
    before, after = seen.status, decision.status
    return (
        before.phase != after.phase
        or before.reservation != after.reservation
        # A commit is the moment at which an elastic gang may grow.
        or (after.gang.wanted < seen.spec.gang.nodes.max and before.checkpoint != after.checkpoint)
        or (before.code != after.code and after.code == Code.AWAITING_ADMISSION)  # its pause is over: in line again
    )


async def serve(runner: JobRunner, workers: int = 8) -> None:
    """Run until cancelled, with so many `workers` passes at the same time, each over another job.

    Errors of the watch are the world's to handle; if it ends, so does this.
    """
    loop = asyncio.get_running_loop()
    news, free = asyncio.Event(), asyncio.Semaphore(workers)

    async def watch() -> None:
        async for key in runner.world.watch():
            runner.enqueue(key, loop.time())
            news.set()

    async def resync() -> None:
        while True:
            try:
                await runner.resync(loop.time())
            except Exception as error:
                runner.listener.failed(FLEET, error, RESYNC_RETRY_SECONDS)
                await asyncio.sleep(RESYNC_RETRY_SECONDS)
                continue
            news.set()
            await asyncio.sleep(RESYNC_SECONDS)

    async def turn() -> None:
        try:
            if await runner.turn(loop.time()):
                news.set()  # a turn may have made work for others
        finally:
            free.release()

    async def dispatch(group: asyncio.TaskGroup) -> None:
        while True:
            news.clear()
            next_at = runner.queue.next_at()
            if next_at is not None and next_at <= loop.time():
                await free.acquire()
                group.create_task(turn())
                await asyncio.sleep(0)  # it takes its key
                continue
            try:
                # Not wait_for: until Python 3.12 it swallows a cancellation that comes together with the news, and then
                # the process could not be stopped.
                async with asyncio.timeout_at(next_at):
                    await news.wait()
            except TimeoutError:
                pass

    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        group.create_task(resync())
        group.create_task(dispatch(group))
