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

from muster.contract.status import Ledger, Phase
from muster.operator import runner
from muster.operator.core import (
    admit,
    agenda,
    budgets,
    causes,
    decide,
    endings,
    findings,
    ledger,
    moves,
    placement,
    stalls,
)
from muster.operator.core.codes import Code
from muster.operator.core.decision import CreateWorker, Decision, RemoveJob
from muster.operator.core.observed import Observed, WorkerState
from muster.operator.core.roll import Roll, call_roll
from tests.sim.swarm import run_seed

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


def replace_rule(name: str, rule: Callable[[Roll], Decision | None] | None) -> Plant:
    def plant() -> None:
        assert any(old.__name__ == name for old in decide.RULES)
        rules = [rule if old.__name__ == name else old for old in decide.RULES]
        decide.RULES = tuple(r for r in rules if r is not None)  # type: ignore[misc]

    return plant


# --- the mistakes ---


def stopping_without_waiting(roll: Roll) -> Decision | None:
    """The attempt is closed as soon as its removal was asked for."""
    status, closed = roll.status, moves.between_attempts(roll.status)
    if status.phase is not Phase.STOPPING and (status.phase is not Phase.RESTARTING or closed):
        return None
    if any(worker.state is not WorkerState.EXITED and not worker.removing for worker in roll.mine):
        return Decision(status, endings.clear(roll), 5.0, status.code, status.because)
    written = endings.end(roll) if closed else endings.close(roll)
    return Decision(written, (), None, written.code, written.because, True)


def terminal_before_cleanup(roll: Roll) -> Decision | None:
    """A job is called ended while its workers are still being removed."""
    if roll.status.phase is Phase.STOPPING and not moves.between_attempts(roll.status):
        written = endings.close(roll)
        return Decision(written, (), None, written.code, written.because)
    if roll.status.phase is Phase.STOPPING:
        written = endings.end(roll)
        return Decision(written, (), None, written.code, written.because)
    return ORIGINAL_STOPPING(roll)


ORIGINAL_STOPPING = decide.stopping
ORIGINAL_DECIDE = decide.decide
ORIGINAL_SIGNALS = causes._signals
ORIGINAL_CHARGE = budgets.charge
ORIGINAL_MINT = decide._mint
ORIGINAL_FAIL = endings.fail
ORIGINAL_END = endings.end
ORIGINAL_BOOK = ledger.book
ORIGINAL_STILL_HELD = admit._still_held
ORIGINAL_QUEUE = admit._queue
ORIGINAL_CHOOSE = placement.Space._choose
ORIGINAL_WEIGH = stalls._weigh
ORIGINAL_PLACE = placement.Space._place


def believing_any_read(seen: Observed) -> Decision:
    return replace(ORIGINAL_DECIDE(seen), trusts_absence=False)


def signals_of_any_attempt(seen: Observed) -> Any:
    return ORIGINAL_SIGNALS(
        replace(seen, signals=tuple(s.model_copy(update={"attempt": seen.status.attempt}) for s in seen.signals))
    )


def newer_workers_are_swept(seen: Observed) -> Roll:
    roll = call_roll(seen)
    return replace(roll, older=tuple(worker for worker in seen.workers if worker.attempt != seen.status.attempt))


def progress_refills_the_budget(*args: Any, **kwargs: Any) -> Any:
    return ORIGINAL_CHARGE(*args, **kwargs).model_copy(update={"recent": ()})


def mint_from_the_last_attempts_step(roll: Roll, gang: Any) -> Any:
    return ORIGINAL_MINT(roll, gang).model_copy(update={"resume_step": roll.status.resume_step})


def fail_and_charge(roll: Roll, verdict: causes.Verdict) -> Any:
    """The failure is charged when it is seen, and again when the attempt is closed."""
    status, seen = ORIGINAL_FAIL(roll, verdict), roll.seen
    charged = ORIGINAL_CHARGE(seen.spec, status.restarts, verdict.failure, False, seen.now, True)
    return status.model_copy(update={"restarts": charged})


def fail_and_let_go(roll: Roll, verdict: causes.Verdict) -> Any:
    """The nodes go back while the gang is still on them."""
    status = ORIGINAL_FAIL(roll, verdict)
    return status.model_copy(update={"reservation": status.reservation + 1})


def end_without_voiding_offers(roll: Roll) -> Any:
    status = ORIGINAL_END(roll)
    return status.model_copy(update={"reservation": status.reservation - 1})


def dropped_while_restarting(fleet: Any, entries: Any) -> Any:
    busy = {job.uid for job in fleet.jobs if job.status.phase in (Phase.STARTING, Phase.RUNNING, Phase.QUEUED)}
    return tuple(entry for entry in ORIGINAL_STILL_HELD(fleet, entries) if entry.uid in busy)


def one_node_short(self: Any, ask: Any, size: int) -> Any:
    return ORIGINAL_PLACE(self, ask, max(1, size - 1))


def one_node_twice(self: Any, names: list[str], size: int, ask: Any) -> Any:
    chosen = ORIGINAL_CHOOSE(self, names, size, ask)
    return (*chosen[:-1], chosen[0]) if chosen and size > 1 else chosen


def book_twice(old: Ledger, mine: Any, now: float, rest: Any, beat: Any) -> Any:
    booked = ORIGINAL_BOOK(old, mine, now, rest, beat)
    seconds = {state: value * 1.01 for state, value in booked.ledger.seconds.items()}
    return replace(booked, ledger=booked.ledger.model_copy(update={"seconds": seconds}))


def forget_failed_keys(self: Any, key: str, ticks: float) -> float:
    self._out_of_hand(key)
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
        self.agenda.notice(runner.FLEET, ticks)
        return 0.0
    return decision.wake_after


def deleted_at_once(roll: Roll) -> Decision | None:
    if roll.seen.deleting:
        return Decision(roll.status, (RemoveJob(),), 5.0, roll.status.code, roll.status.because, True)
    return decide.finished(roll)


def wishes_of_the_past(roll: Roll) -> Decision | None:
    """A suspension is asked for again although it was taken back: any edit counts as a wish to suspend."""
    if roll.seen.generation > 1 and roll.status.phase is Phase.RUNNING:
        written = endings.stop(roll, Phase.SUSPENDED, Code.SUSPENDING, "the job was edited")
        return Decision(written, (), None, written.code, written.because)
    return decide.wished(roll)


def recreating_in_a_running_gang(roll: Roll) -> Decision | None:
    """A worker that was lost while running is replaced within the same attempt."""
    if roll.status.phase is Phase.RUNNING and roll.missing:
        nodes = roll.gang.nodes
        actions = tuple(
            CreateWorker(roll.status.attempt, i, nodes[i], nodes, roll.status.resume_step) for i in roll.missing
        )
        return Decision(roll.status, actions, 5.0, roll.status.code, roll.status.because)
    return decide.failed(roll)


def backwards(fleet: Any, entries: Any) -> Any:
    return ORIGINAL_QUEUE(fleet, entries)[::-1]


def deaf_in_the_queue(roll: Roll) -> Decision | None:
    return None if roll.status.phase is Phase.QUEUED else decide.wished(roll)


class Unlimited(admit._Limits):
    def left(self, namespace: str) -> int | None:
        return None


def sizes_that_do_not_divide(spec: Any) -> tuple[int, ...]:
    return tuple(range(spec.gang.nodes.max, spec.gang.nodes.min - 1, -1))


def never_retry(roll: Roll) -> Decision | None:
    return (
        None
        if roll.status.phase is not Phase.RESTARTING
        else Decision(roll.status, (), None, roll.status.code, "waiting")
    )


def failed_before(status: Any, failure: Any) -> bool:
    return len(status.attempts) > 1 and status.attempts[-2].cause == failure.cause


def the_neighbour(roll: Roll, rank: int) -> str:
    nodes = roll.gang.nodes
    return nodes[(rank // roll.seen.spec.gang.ranks_per_node + 1) % len(nodes)]


def the_rank_ahead(gang: Any) -> Any:
    return max(gang, key=lambda w: (w.beat.step, w.beat.moves))


def believed_at_once(seen: Observed, doubt: Any, progressed_at: float) -> Any:
    return replace(ORIGINAL_WEIGH(seen, doubt, progressed_at), confirmed=True)


MUTANTS = (
    Mutant("the attempt is closed before its gang is gone", replace_rule("stopping", stopping_without_waiting)),
    Mutant("terminal before cleanup", replace_rule("stopping", terminal_before_cleanup)),
    Mutant("absence is believed from a cached read", patch(runner, decide=believing_any_read)),
    Mutant("signals of any attempt count", patch(causes, _signals=signals_of_any_attempt)),
    Mutant("workers newer than the status are swept", patch(decide, call_roll=newer_workers_are_swept)),
    Mutant("a charge refills the budget", patch(endings, charge=progress_refills_the_budget)),
    Mutant("a failure is charged twice", patch(decide, fail=fail_and_charge)),
    Mutant(
        "preemption is charged to the user", lambda: [patch(m, FREE=frozenset())() for m in (budgets, endings)] and None
    ),
    Mutant("an attempt resumes where the last one did", patch(decide, _mint=mint_from_the_last_attempts_step)),
    Mutant("nodes go back while the gang is on them", patch(decide, fail=fail_and_let_go)),
    Mutant("offers to grow outlive the job", patch(decide, end=end_without_voiding_offers)),
    Mutant("the ledger drops a gang that restarts", patch(admit, _still_held=dropped_while_restarting)),
    Mutant("held nodes count as free", patch(placement, needs_by_node=lambda held: iter(()))),
    Mutant("a gang gets one node too few", patch(placement.Space, _place=one_node_short)),
    Mutant("two workers of a gang share a node", patch(placement.Space, _choose=one_node_twice)),
    Mutant("elastic sizes that do not divide the batch", patch(admit, _sizes=sizes_that_do_not_divide)),
    Mutant("namespace limits are not kept", patch(admit, _Limits=Unlimited)),
    Mutant("small jobs may pass a large gang for ever", patch(admit, BACKFILL_SECONDS=float("inf"))),
    Mutant("an excluded node is never used again", patch(admit, largest_possible=lambda nodes, ask: 10**6)),
    Mutant("hangs are not noticed", patch(decide, check_running=lambda roll: stalls.Stall(None))),
    Mutant("a deterministic failure is tried for ever", patch(budgets, is_repeated=lambda status, failure: False)),
    Mutant("any failure twice is called deterministic", patch(budgets, is_repeated=failed_before)),
    Mutant("a straggler's neighbour is charged", patch(findings, _node=the_neighbour)),
    Mutant("a rank that is held for a moment is hung", patch(stalls, STOPPED_CONFIRM_SECONDS=0.0)),
    Mutant("a paused disk is a hang", patch(stalls, SILENT_SECONDS=3.0, SILENT_CONFIRM_SECONDS=2.0)),
    Mutant("a mute rank is not told from the others", patch(stalls, _mute=lambda gang, newest: None)),
    Mutant("a stopped rank is not told from the others", patch(stalls, _stopped=lambda gang: None)),
    Mutant("the rank that the others wait for is not found", patch(stalls, behind=lambda gang: None)),
    Mutant("the rank that is ahead is blamed", patch(stalls, behind=the_rank_ahead)),
    Mutant("a hang is believed without a second look", patch(stalls, _weigh=believed_at_once)),
    Mutant("a gang may take for ever to start", patch(decide, check_starting=lambda roll, at: stalls.Stall(None))),
    Mutant("a vanished worker is replaced in a running gang", replace_rule("failed", recreating_in_a_running_gang)),
    Mutant("a status from a newer version is touched", replace_rule("newer", None)),
    Mutant("a deleted job goes before its gang", replace_rule("finished", deleted_at_once)),
    Mutant("an edit suspends the job", replace_rule("wished", wishes_of_the_past)),
    Mutant("goodput books more than there was", patch(moves, book=book_twice)),
    Mutant("a job whose pass failed is forgotten", patch(agenda.Agenda, failed=forget_failed_keys)),
    Mutant("the last in line is served first", patch(admit, _queue=backwards)),
    Mutant("a cancel is not noticed while queued", replace_rule("wished", deaf_in_the_queue)),
    Mutant("every failure counts towards a crash loop", patch(endings, progressed=lambda roll: False)),
    Mutant("acting before the status is written", patch(runner.Runner, look=acting_before_writing)),
    Mutant("a paused restart is never resumed", replace_rule("holding", never_retry)),
)


def hunt(mutant: Mutant, seeds: int) -> tuple[str, int, str]:
    """The name, the number of seeds it took (0: it got away), and the promise that broke."""
    patch(runner, audit=lambda seen, decision: ())()
    mutant.plant()
    for count, seed in enumerate(range(seeds), 1):
        verdict = run_seed(seed)
        if verdict.failure:
            return mutant.name, count, verdict.failure
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
