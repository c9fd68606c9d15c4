"""make sim-mutants: mistakes planted in the production code, one at a time; the simulation must find each.

Audit is switched off for all of them: what is tested here is whether the checkers see what really happens.

    python tests/sim/mutants.py [--seeds 2000] [--only NAME …]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from muster.operator import runner
from muster.operator.core import (
    admit,
    budgets,
    causes,
    conditions,
    decide,
    gang_rules,
    goodput,
    month_budgets,
    nominations,
    placement,
    preemption,
    quotas,
    shutdown,
    stalls,
    transitions,
    victims,
    work_queue,
)
from muster.operator.core.codes import Code
from muster.operator.core.decision import CreateWorker, JobDecision, RemoveJob
from muster.operator.core.month_budgets import MonthBudgets
from muster.operator.core.observed import ObservedJob, WorkerState
from muster.operator.core.worker_summary import WorkerSummary, summarize_workers
from muster.words.status import GangStatus, GoodputAccount, Phase
from muster.worker import fence
from tests.sim.swarm import run_seed
from tests.sim.walks import walk

Plant = Callable[[], None]


@dataclass(frozen=True)
class Mutant:
    """plant: changes the production code of this process."""

    name: str
    plant: Plant


def patch(module: Any, **values: Any) -> Plant:
    """Replace functions or constants of a module; a name that is not there is our mistake."""

    def plant() -> None:
        for name, value in values.items():
            assert hasattr(module, name), f"{module.__name__} has no {name}"
            setattr(module, name, value)

    return plant


def replace_rule(name: str, rule: Callable[[WorkerSummary], JobDecision | None] | None) -> Plant:
    def plant() -> None:
        assert any(old.__name__ == name for old in decide.RULES)
        rules = [rule if old.__name__ == name else old for old in decide.RULES]
        decide.RULES = tuple(r for r in rules if r is not None)  # type: ignore[misc]

    return plant


# --- the mistakes ---


def stopping_without_waiting(summary: WorkerSummary) -> JobDecision | None:
    """The attempt is closed as soon as its removal was asked for."""
    status, closed = summary.status, transitions.between_attempts(summary.status)
    if status.phase is not Phase.STOPPING and (status.phase is not Phase.RESTARTING or closed):
        return None
    if any(worker.state is not WorkerState.EXITED and not worker.removing for worker in summary.mine):
        return JobDecision(status, shutdown.clear(summary), 5.0, status.code, status.because)
    written = shutdown.end(summary) if closed else shutdown.close(summary)
    return JobDecision(written, (), None, written.code, written.because, True)


def terminal_before_cleanup(summary: WorkerSummary) -> JobDecision | None:
    """A job is called ended while its workers are still being removed."""
    if summary.status.phase is Phase.STOPPING and not transitions.between_attempts(summary.status):
        written = shutdown.close(summary)
        return JobDecision(written, (), None, written.code, written.because)
    if summary.status.phase is Phase.STOPPING:
        written = shutdown.end(summary)
        return JobDecision(written, (), None, written.code, written.because)
    return ORIGINAL_STOPPING(summary)


ORIGINAL_STOPPING = decide.stopping
ORIGINAL_DECIDE = decide.decide
ORIGINAL_SIGNALS = causes._signals
ORIGINAL_CURRENT_SIGNALS = causes.current_signals
ORIGINAL_REFUSAL = fence.refusal
ORIGINAL_RELEASED = shutdown.released
ORIGINAL_CHARGE = budgets.charge
ORIGINAL_MINT = decide._start_attempt
ORIGINAL_FAIL = shutdown.fail
ORIGINAL_OVER = shutdown._over
ORIGINAL_BOOK = goodput.book
ORIGINAL_STILL_HELD = admit._still_held
ORIGINAL_QUEUE = admit._queue
ORIGINAL_CHOOSE = placement.FleetSpace._choose
ORIGINAL_WEIGH = stalls._weigh
ORIGINAL_PLACE = placement.FleetSpace._place


def believing_any_read(seen: ObservedJob) -> JobDecision:
    return replace(ORIGINAL_DECIDE(seen), trusts_absence=False)


def signals_of_any_attempt(seen: ObservedJob) -> Any:
    return ORIGINAL_SIGNALS(
        replace(seen, signals=tuple(s.model_copy(update={"attempt": seen.status.attempt}) for s in seen.signals))
    )


def signals_of_any_life(seen: ObservedJob) -> Any:
    return ORIGINAL_CURRENT_SIGNALS(
        replace(
            seen,
            signals=tuple(
                s.model_copy(update={"incarnation": seen.status.gang.incarnation(s.worker)})
                if s.worker is not None
                else s
                for s in seen.signals
            ),
        )
    )


def any_life_is_the_worker(seen: ObservedJob) -> WorkerSummary:
    """A worker that was replaced is taken for the one that replaces it."""
    current = seen.status.gang.incarnation
    return summarize_workers(
        replace(seen, workers=tuple(replace(w, incarnation=current(w.worker)) for w in seen.workers))
    )


def replaced_while_it_is_there(summary: WorkerSummary) -> JobDecision | None:
    """The next life of a worker is made without waiting for the end of the one before."""
    attempt = summary.status.attempt
    return gang_rules.starting(replace(summary, older=tuple(w for w in summary.older if w.attempt < attempt)))


def released_with_all_that_was_known(status: Any) -> Any:
    """With the nodes it is forgotten which lives the workers had, who are still to be swept."""
    return ORIGINAL_RELEASED(status) | {"gang": GangStatus()}


def fence_of_attempts_alone(gang: Any, uid: str, attempt: int, worker: int, incarnation: int) -> str:
    current = gang.incarnations[worker] if gang is not None and worker < len(gang.incarnations) else 1
    return ORIGINAL_REFUSAL(gang, uid, attempt, worker, current)


def mint_with_replaced_workers(summary: WorkerSummary, gang: Any) -> Any:
    """An attempt begins with the incarnations that the one before it ended with."""
    status, lives = ORIGINAL_MINT(summary, gang), gang.incarnations
    return status.model_copy(update={"gang": status.gang.model_copy(update={"incarnations": lives})})


def newer_lives_are_swept(seen: ObservedJob) -> WorkerSummary:
    summary = summarize_workers(seen)
    others = tuple(w for w in seen.workers if w.attempt == seen.status.attempt and w not in summary.mine)
    return replace(summary, older=(*(w for w in summary.older if w not in others), *others))


def newer_workers_are_swept(seen: ObservedJob) -> WorkerSummary:
    summary = summarize_workers(seen)
    return replace(summary, older=tuple(worker for worker in seen.workers if worker.attempt != seen.status.attempt))


def progress_refills_the_budget(*args: Any, **kwargs: Any) -> Any:
    return ORIGINAL_CHARGE(*args, **kwargs).model_copy(update={"recent": ()})


def resuming_at_the_last_step(summary: WorkerSummary, gang: Any) -> Any:
    return ORIGINAL_MINT(summary, gang).model_copy(update={"resume_step": summary.status.resume_step})


def fail_and_charge(summary: WorkerSummary, diagnosis: causes.FailureDiagnosis) -> Any:
    """The failure is charged when it is seen, and again when the attempt is closed."""
    status, seen = ORIGINAL_FAIL(summary, diagnosis), summary.seen
    charged = ORIGINAL_CHARGE(seen.spec, status.restarts, diagnosis.failure, False, seen.now, True)
    return status.model_copy(update={"restarts": charged})


def fail_and_let_go(summary: WorkerSummary, diagnosis: causes.FailureDiagnosis) -> Any:
    """The nodes go back while the gang is still on them."""
    status = ORIGINAL_FAIL(summary, diagnosis)
    return status.model_copy(update={"reservation": status.reservation + 1})


def over_without_voiding_offers(summary: WorkerSummary, code: Code, because: str, phase: Phase, updates: Any) -> Any:
    status = ORIGINAL_OVER(summary, code, because, phase, updates)
    return status.model_copy(update={"reservation": status.reservation - 1})


def dropped_while_restarting(fleet: Any, entries: Any) -> Any:
    busy = {job.uid for job in fleet.jobs if job.status.phase in (Phase.STARTING, Phase.RUNNING, Phase.QUEUED)}
    return tuple(entry for entry in ORIGINAL_STILL_HELD(fleet, entries) if entry.uid in busy)


def one_node_short(self: Any, ask: Any, size: int) -> Any:
    return ORIGINAL_PLACE(self, ask, max(1, size - 1))


def one_node_twice(self: Any, names: list[str], size: int, ask: Any) -> Any:
    chosen = ORIGINAL_CHOOSE(self, names, size, ask)
    return (*chosen[:-1], chosen[0]) if chosen and size > 1 else chosen


def book_twice(old: GoodputAccount, mine: Any, now: float, rest: Any, beat: Any) -> Any:
    booked = ORIGINAL_BOOK(old, mine, now, rest, beat)
    seconds = {state: value * 1.01 for state, value in booked.account.seconds.items()}
    return replace(booked, account=booked.account.model_copy(update={"seconds": seconds}))


def forget_failed_keys(self: Any, key: str, ticks: float) -> float:
    self._finish(key)
    return 0.0


async def acting_before_writing(self: Any, uid: str, ticks: float) -> float | None:
    """The actions of the status to come are done before it is written."""
    seen, decision = await self._decide(uid)
    if seen is None or decision is None:
        return None
    for action in decide.decide(replace(seen, status=decision.status)).actions:
        await self.world.apply(uid, action)
    if decision.status != seen.status:
        await self.world.write_status(uid, decision.status, seen.version)
        self.queue.enqueue(runner.FLEET, ticks)
        return 0.0
    return decision.wake_after


def deleted_at_once(summary: WorkerSummary) -> JobDecision | None:
    if summary.seen.deleting:
        return JobDecision(summary.status, (RemoveJob(),), 5.0, summary.status.code, summary.status.because, True)
    return decide.finished(summary)


def requests_of_the_past(summary: WorkerSummary) -> JobDecision | None:
    """A suspension is asked for again although it was taken back: any edit counts as a wish to suspend."""
    if summary.seen.generation > 1 and summary.status.phase is Phase.RUNNING:
        written = shutdown.stop(summary, Phase.SUSPENDED, Code.SUSPENDING, "the job was edited")
        return JobDecision(written, (), None, written.code, written.because)
    return decide.user_request(summary)


def recreating_in_a_running_gang(summary: WorkerSummary) -> JobDecision | None:
    """A worker that was lost while running is replaced within the same attempt."""
    if summary.status.phase is Phase.RUNNING and summary.missing:
        nodes = summary.gang.nodes
        actions = tuple(
            CreateWorker(summary.status.current(i), nodes[i], nodes, summary.status.resume_step)
            for i in summary.missing
        )
        return JobDecision(summary.status, actions, 5.0, summary.status.code, summary.status.because)
    return decide.failed(summary)


def backwards(fleet: Any, entries: Any) -> Any:
    return ORIGINAL_QUEUE(fleet, entries)[::-1]


def deaf_in_the_queue(summary: WorkerSummary) -> JobDecision | None:
    return None if summary.status.phase is Phase.QUEUED else decide.user_request(summary)


ORIGINAL_LIMIT = quotas._UsageLimit


def unlimited(code: Code, **limits: None) -> Plant:
    """Limits of this kind are not kept."""

    def make(whose: str, code_of_it: Code, gpus: int | None, gangs: int | None, processes: int | None = None) -> Any:
        kept: dict[str, int | None] = {"gpus": gpus, "gangs": gangs, "processes": processes}
        if code_of_it is code:
            kept |= limits
        return ORIGINAL_LIMIT(whose, code_of_it, kept["gpus"], kept["gangs"], kept["processes"])

    return patch(quotas, _UsageLimit=make)


def room_for_one_more(self: quotas._UsageLimit, uid: str) -> bool:
    return self.gangs is None or uid in self.by_job or len(self.by_job) <= self.gangs


def only_the_smallest_asked_about(self: quotas.QuotaBook, job: Any, ask: Any) -> Any:
    """An elastic gang that fits with its fewest nodes is given as many as there are."""
    kept = ORIGINAL_ALLOWED(self, job, ask)
    return ask if kept.sizes else kept


ORIGINAL_ALLOWED = quotas.QuotaBook.allowed


def half_is_all(self: month_budgets._MonthBudget) -> bool:
    return self.used >= self.limit / 2


def sizes_that_do_not_divide(spec: Any) -> tuple[int, ...]:
    return tuple(range(spec.gang.nodes.max, spec.gang.nodes.min - 1, -1))


def never_retry(summary: WorkerSummary) -> JobDecision | None:
    return (
        None
        if summary.status.phase is not Phase.RESTARTING
        else JobDecision(summary.status, (), None, summary.status.code, "waiting")
    )


def failed_before(spec: Any, status: Any, failure: Any) -> bool:
    return len(status.attempts) > 1 and status.attempts[-2].cause == failure.cause


def the_neighbour(summary: WorkerSummary, rank: int) -> str:
    nodes = summary.gang.nodes
    return nodes[(rank // summary.seen.spec.gang.ranks_per_node + 1) % len(nodes)]


def the_rank_ahead(gang: Any) -> Any:
    return max(gang, key=lambda w: (w.beat.step, w.beat.moves))


def believed_at_once(seen: ObservedJob, evidence: Any, progressed_at: float) -> Any:
    return replace(ORIGINAL_WEIGH(seen, evidence, progressed_at), confirmed=True)


def any_equal(self: victims.VictimSelector, job: Any, priority: int) -> set[str]:
    return {uid for uid, victim in self.all.items() if self._fleet.priority(victim) == priority and uid != job.uid}


def judged_by_what_it_gains(self: preemption.PreemptionPlanner, job: Any, ask: Any, evictions: Any) -> bool:
    """What the others lose of their shares does not count."""
    priority, gpus = self._fleet.priority(job), ask.sizes[-1] * ask.shape.gpus
    if all(self._fleet.priority(eviction.job) < priority for eviction in evictions):
        return True
    within = self._shares.within
    return within(job.project, priority, gpus) > within(job.project, priority)


def only_while_it_waits(job: Any, now: float) -> float:
    """Who waits has its first minutes again."""
    return float("inf") if job.status.gang.nodes else 0.0


def a_fault_of_the_platform(summary: WorkerSummary, granted: Any) -> Any:
    found = ORIGINAL_PREEMPTED(summary, granted)
    return replace(found, failure=found.failure.model_copy(update={"cause": causes.Cause.INFRASTRUCTURE}))


def shrunk_to_all_it_had(self: preemption.PreemptionPlanner, entries: Any, waiting: Any) -> Any:
    had = {entry.uid: entry.nodes for entry in entries}
    return tuple(replace(entry, nodes=had[entry.uid]) for entry in ORIGINAL_PUT_OUT(self, entries, waiting))


ORIGINAL_PREEMPTED = gang_rules.diagnose_preemption
ORIGINAL_PUT_OUT = preemption.PreemptionPlanner.put_out


MUTANTS = (
    Mutant("the attempt is closed before its gang is gone", replace_rule("stopping", stopping_without_waiting)),
    Mutant("terminal before cleanup", replace_rule("stopping", terminal_before_cleanup)),
    Mutant("absence is believed from a cached read", patch(runner, decide=believing_any_read)),
    Mutant("signals of any attempt count", patch(causes, _signals=signals_of_any_attempt)),
    Mutant("workers newer than the status are swept", patch(decide, summarize_workers=newer_workers_are_swept)),
    Mutant("the fence lets a replaced worker pass", patch(fence, refusal=fence_of_attempts_alone)),
    Mutant("signals of any incarnation count", patch(causes, current_signals=signals_of_any_life)),
    Mutant("a replaced worker is taken for its successor", patch(decide, summarize_workers=any_life_is_the_worker)),
    Mutant("a worker is replaced while it is there", replace_rule("starting", replaced_while_it_is_there)),
    Mutant("the lives of an ended attempt are forgotten", patch(shutdown, released=released_with_all_that_was_known)),
    Mutant("an attempt begins with replaced workers", patch(decide, _start_attempt=mint_with_replaced_workers)),
    Mutant("newer incarnations are swept", patch(decide, summarize_workers=newer_lives_are_swept)),
    Mutant("a charge refills the budget", patch(shutdown, charge=progress_refills_the_budget)),
    Mutant("a failure is charged twice", patch(gang_rules, fail=fail_and_charge)),
    Mutant(
        "preemption is charged to the user",
        lambda: [patch(m, FREE=frozenset())() for m in (budgets, shutdown)] and None,
    ),
    Mutant("an attempt resumes where the last one did", patch(decide, _start_attempt=resuming_at_the_last_step)),
    Mutant("nodes go back while the gang is on them", patch(gang_rules, fail=fail_and_let_go)),
    Mutant("offers to grow outlive the job", patch(shutdown, _over=over_without_voiding_offers)),
    Mutant("the reservations drop a gang that restarts", patch(admit, _still_held=dropped_while_restarting)),
    Mutant("held nodes count as free", patch(placement, needs_by_node=lambda held: iter(()))),
    Mutant("a gang gets one node too few", patch(placement.FleetSpace, _place=one_node_short)),
    Mutant("two workers of a gang share a node", patch(placement.FleetSpace, _choose=one_node_twice)),
    Mutant("elastic sizes that do not divide the batch", patch(admit, _sizes=sizes_that_do_not_divide)),
    Mutant("namespace limits are not kept", unlimited(Code.NAMESPACE_LIMIT, gpus=None)),
    Mutant("a project's GPUs are not limited", unlimited(Code.PROJECT_LIMIT, gpus=None)),
    Mutant("a project's gangs are not limited", unlimited(Code.PROJECT_LIMIT, gangs=None)),
    Mutant("a project's processes are not limited", unlimited(Code.PROJECT_LIMIT, processes=None)),
    Mutant("a person's GPUs are not limited", unlimited(Code.PERSON_LIMIT, gpus=None)),
    Mutant("a person's gangs are not limited", unlimited(Code.PERSON_LIMIT, gangs=None)),
    Mutant("a project runs one gang too many", patch(quotas._UsageLimit, _may_run=room_for_one_more)),
    Mutant("an elastic gang grows over a limit", patch(quotas.QuotaBook, has_room=lambda self, job, nodes: True)),
    Mutant("an elastic gang begins over a limit", patch(quotas.QuotaBook, allowed=only_the_smallest_asked_about)),
    Mutant(
        "small jobs of a project pass its large one for ever", patch(quotas.QuotaBook, keep=lambda self, job, ask: None)
    ),
    Mutant("a month's budget stops nobody", patch(MonthBudgets, waits=lambda self: {})),
    Mutant("a month's budget lasts for ever", patch(month_budgets._MonthBudget, lasts=lambda self, more: True)),
    Mutant("half a month's budget is all of it", patch(month_budgets._MonthBudget, spent=property(half_is_all))),
    Mutant("nobody goes on with a new budget", patch(MonthBudgets, _may_go_on=lambda self, job: False)),
    Mutant("what ran since the API counted is free", patch(MonthBudgets, _count=lambda self, job: None)),
    Mutant("last month's use counts in this one", patch(MonthBudgets, _since=lambda self, spent: 0.0)),
    Mutant("small jobs may pass a large gang for ever", patch(admit, BACKFILL_SECONDS=float("inf"))),
    Mutant("an excluded node is never used again", patch(admit, largest_possible=lambda nodes, ask: 10**6)),
    Mutant("hangs are not noticed", patch(gang_rules, check_running=lambda summary: stalls.StallDetector(None))),
    Mutant(
        "a deterministic failure is tried for ever", patch(budgets, is_repeated=lambda spec, status, failure: False)
    ),
    Mutant("any failure twice is called deterministic", patch(budgets, is_repeated=failed_before)),
    Mutant("a straggler's neighbour is charged", patch(conditions, _node=the_neighbour)),
    Mutant("a rank that is held for a moment is hung", patch(stalls, STOPPED_CONFIRM_SECONDS=0.0)),
    Mutant("a paused disk is a hang", patch(stalls, SILENT_SECONDS=3.0, SILENT_CONFIRM_SECONDS=2.0)),
    Mutant("a mute rank is not told from the others", patch(stalls, _mute=lambda gang, newest: None)),
    Mutant("a stopped rank is not told from the others", patch(stalls, _stopped=lambda gang: None)),
    Mutant("the rank that the others wait for is not found", patch(stalls, behind=lambda gang: None)),
    Mutant("the rank that is ahead is charged", patch(stalls, behind=the_rank_ahead)),
    Mutant("a hang is believed without a second look", patch(stalls, _weigh=believed_at_once)),
    Mutant(
        "a gang may take for ever to start",
        patch(gang_rules, check_starting=lambda summary, at: stalls.StallDetector(None)),
    ),
    Mutant("a vanished worker is replaced in a running gang", replace_rule("failed", recreating_in_a_running_gang)),
    Mutant("a status from a newer version is touched", replace_rule("newer", None)),
    Mutant("what an earlier release wrote keeps its form", replace_rule("outdated", None)),
    Mutant("a deleted job goes before its gang", replace_rule("finished", deleted_at_once)),
    Mutant("an edit suspends the job", replace_rule("user_request", requests_of_the_past)),
    Mutant("goodput books more than there was", patch(transitions, book=book_twice)),
    Mutant("a job whose pass failed is forgotten", patch(work_queue.WorkQueue, failed=forget_failed_keys)),
    Mutant("the last in line is served first", patch(admit, _queue=backwards)),
    Mutant("a cancel is not noticed while queued", replace_rule("user_request", deaf_in_the_queue)),
    Mutant("every failure counts towards a crash loop", patch(shutdown, progressed=lambda summary: False)),
    Mutant("a rejection that never passes is the platform's", patch(causes, _rejections=lambda summary: iter(()))),
    Mutant("a mistyped image is waited for", patch(gang_rules, check_refused=lambda summary: None)),
    Mutant("a gang that is refused keeps its nodes", patch(gang_rules, rejected=lambda summary: "")),
    Mutant("acting before the status is written", patch(runner.JobRunner, look=acting_before_writing)),
    Mutant("anybody may preempt", patch(preemption, may_preempt=lambda fleet, job: job.spec.gang.gpus_per_node > 0)),
    Mutant(
        "equals are put out whatever the shares",
        lambda: (
            patch(victims.VictimSelector, beyond_their_share=any_equal)(),
            patch(preemption.PreemptionPlanner, _fair=lambda *args: True)(),
        ),
    ),
    Mutant(
        "what others lose of their shares does not count",
        patch(preemption.PreemptionPlanner, _fair=judged_by_what_it_gains),
    ),
    Mutant("a gang has first minutes whenever it waits", patch(victims, served_seconds=only_while_it_waits)),
    Mutant("a gang is put out by an equal in its first minutes", patch(victims, FIRST_SECONDS=0.0)),
    Mutant(
        "what is freed goes to whoever is first in line",
        patch(nominations.NominationPass, turn=lambda self, job, space: None),
    ),
    Mutant("whom others make room for is forgotten", patch(nominations.NominationPass, entries=lambda *args: ())),
    Mutant(
        "much more is put out than is asked for",
        patch(preemption, EVICTED_PER_REQUESTED_MAX=100.0, EVICTED_PER_URGENT_REQUESTED_MAX=100.0),
    ),
    Mutant("nodes are not kept for whom others are put out", patch(placement.FleetSpace, keep=lambda self, names: ())),
    Mutant("whoever makes room has no time to commit", lambda: shutdown._GRACE.update({Code.EVICTED: 5.0})),
    Mutant("to be put out is a fault", patch(gang_rules, diagnose_preemption=a_fault_of_the_platform)),
    Mutant("nobody does as the reservation says", replace_rule("preempted", None)),
    Mutant(
        "a gang that is made smaller keeps its nodes", patch(preemption.PreemptionPlanner, put_out=shrunk_to_all_it_had)
    ),
    Mutant("a paused restart is never resumed", replace_rule("restart_pending", never_retry)),
)


def hunt(mutant: Mutant, seeds: int) -> tuple[str, int, str]:
    """The name, the number of seeds it took (0: it got away), and the promise that broke."""
    patch(runner, audit=lambda seen, decision: ())()
    mutant.plant()
    for count, seed in enumerate(range(seeds), 1):
        if broken := walk(seed).fault or run_seed(seed).failure:
            return mutant.name, count, broken
    return mutant.name, 0, ""


def _hunt_by_name(arguments: tuple[str, int]) -> tuple[str, int, str]:
    name, seeds = arguments
    return hunt(next(mutant for mutant in MUTANTS if mutant.name == name), seeds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000, help="at most so many per mutant")
    parser.add_argument("--only", nargs="*", default=[], help="mutants whose name contains one of these")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    names = [m.name for m in MUTANTS if not arguments.only or any(part in m.name for part in arguments.only)]
    began, escaped = time.monotonic(), 0
    # A process per mutant: what is planted must not outlive it.
    with multiprocessing.get_context("fork").Pool(arguments.processes, maxtasksperchild=1) as pool:
        for name, count, promise in pool.imap(_hunt_by_name, [(name, arguments.seeds) for name in names], chunksize=1):
            escaped += not count
            print(f"{'seed ' + str(count):>9}  {name}: {promise[:140]}" if count else f"  ESCAPED  {name}", flush=True)
    print(f"{len(names) - escaped} of {len(names)} planted mistakes caught in {time.monotonic() - began:.0f} s")
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main())
