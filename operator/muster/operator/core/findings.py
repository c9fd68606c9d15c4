"""What is not as it should be in a gang that trains all the same. It is said, as a condition; no gang ends for it.

The words carry no number that moves by itself: each change is a write of the status and an event.
"""

from __future__ import annotations

from typing import Any

from muster.contract.signals import Heartbeat, SlowRank
from muster.contract.status import Condition
from muster.operator.core.budgets import accuse
from muster.operator.core.conditions import FINDINGS, Finding, with_findings
from muster.operator.core.roll import Roll

STARVED_SHARE, FED_SHARE = 0.25, 0.15  # of a minute's training spent waiting for data: from where, and until where
OVERDUE_INTERVALS = 3.0  # a commit may be so many of its intervals late: uploads take time, and one may fail
OVERDUE_SECONDS_MIN = 120.0
NODES_NAMED_MAX = 4


def updates(roll: Roll) -> dict[str, Any]:
    """Conditions, and faults charged to the nodes of ranks that have just become slow; empty if there is no news."""
    seen, status, beat = roll.seen, roll.status, roll.beat
    if beat is None or _is_well(beat, status.conditions):
        return {}
    known = {condition.type: condition for condition in status.conditions}
    found = (
        _stragglers(roll, beat.slow_ranks),
        _data_bound(beat.data_wait_share, known.get("DataBound")),
        _overdue(roll),
        _skipped(roll),
    )
    after = with_findings(status.conditions, found, seen.now, seen.generation)
    if after is status.conditions:
        return {}
    return {"conditions": after} | _accusations(roll, known.get("Straggler"))


def news(beat: Heartbeat) -> tuple[object, ...]:
    """What of a heartbeat calls for a look when it changes; a mere step does not."""
    slow = tuple(entry.rank for entry in beat.slow_ranks)
    return beat.rank, beat.pid, beat.phase, beat.last_commit_step, slow, beat.skipped_steps


def _is_well(beat: Heartbeat, conditions: tuple[Condition, ...]) -> bool:
    """Nothing to tell, nor to take back. Almost always so, and cheap to see."""
    share, due = beat.data_wait_share, beat.commit_seconds
    if beat.slow_ranks or beat.last_skipped is not None or (share is not None and share > FED_SHARE):
        return False
    if due is not None and beat.at - (beat.last_commit_at or beat.started_at) > OVERDUE_INTERVALS * due:
        return False
    return all(condition.status != "True" or condition.type not in FINDINGS for condition in conditions)


def _stragglers(roll: Roll, slow: tuple[SlowRank, ...]) -> Finding:
    if not slow:
        return Finding("Straggler", False, "RanksAreAlike", "no rank is slower than its peers")
    named = [f"{_name(roll, entry.rank)} since step {entry.since_step}" for entry in slow[:NODES_NAMED_MAX]]
    more = f" and {len(slow) - NODES_NAMED_MAX} more" if len(slow) > NODES_NAMED_MAX else ""
    words = f"slower than their peers, which wait for them at every step: {', '.join(named)}{more}"
    return Finding("Straggler", True, "RankIsSlow", words)


def _data_bound(share: float | None, before: Condition | None) -> Finding | None:
    if share is None:
        return None
    starved = share > (FED_SHARE if before is not None and before.status == "True" else STARVED_SHARE)
    if starved:
        words = "ranks spend much of their time waiting for data: put it nearer, or use larger shards"
        return Finding("DataBound", True, "DataWait", words)
    return Finding("DataBound", False, "DataInTime", "data is there when it is needed")


def _overdue(roll: Roll) -> Finding | None:
    beat, attempt = roll.beat, roll.status.attempts[-1]
    if beat is None or beat.commit_seconds is None:
        return None
    # The worker's own clock, as both times are of it.
    since = beat.at - max(beat.last_commit_at or 0.0, attempt.first_step_at or beat.started_at)
    step = beat.last_commit_step or attempt.resume_step
    if since > max(OVERDUE_SECONDS_MIN, OVERDUE_INTERVALS * beat.commit_seconds):
        words = f"no commit after step {step}, although several were due: a failure would lose all steps since then"
        return Finding("CheckpointOverdue", True, "NoCommit", words)
    return Finding("CheckpointOverdue", False, "CommitsInTime", "commits are made as often as they should be")


def _skipped(roll: Roll) -> Finding | None:
    beat = roll.beat
    if beat is None or beat.last_skipped is None:
        return None
    last = beat.last_skipped
    words = f"{beat.skipped_steps} batches were not learnt from; the last at step {last.step}: {last.skipped}"
    return Finding("BatchesSkipped", True, "NumbersUnsound", words)


def _accusations(roll: Roll, before: Condition | None) -> dict[str, Any]:
    """A rank that becomes slow is one hit against its node; a node that is hit repeatedly is avoided from then on."""
    status, beat = roll.status, roll.beat
    said = before.message if before is not None and before.status == "True" else ""
    faults, excluded = status.node_faults, status.excluded_nodes
    for entry in beat.slow_ranks if beat is not None else ():
        node = _node(roll, entry.rank)
        if node is not None and f"{_name(roll, entry.rank)} since step {entry.since_step}" not in said:
            why = f"straggler: rank {entry.rank} took {entry.ratio:.2f} times as long as its peers"
            faults, excluded = accuse(roll.seen.spec.recovery, faults, excluded, node, why, roll.seen.now)
    return {} if faults is status.node_faults else {"node_faults": faults, "excluded_nodes": excluded}


def _name(roll: Roll, rank: int) -> str:
    return (
        f"rank {rank} (worker {rank // roll.seen.spec.gang.ranks_per_node} on {_node(roll, rank) or 'an unknown node'})"
    )


def _node(roll: Roll, rank: int) -> str | None:
    worker = rank // roll.seen.spec.gang.ranks_per_node
    return roll.gang.nodes[worker] if worker < len(roll.gang.nodes) else None
