"""What the core makes of signals, hangs, clocks that jump, offers to grow, and of what is newer than itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.core.seen import (
    NOW,
    crew,
    exited,
    gone,
    granted,
    running,
    settled,
    with_status,
    worker,
    write,
)
from tests.unit.core.test_core_decide import check, closed, restarting

from muster.operator.core.codes import Code
from muster.operator.core.decision import RemoveWorker
from muster.operator.core.shutdown import STOP_SECONDS
from muster.words.names import WorkerId
from muster.words.signals import Signal, SignalKind
from muster.words.status import STATUS_VERSION, Phase

# --- signals ---


def signal(kind: SignalKind, attempt: int, node: str | None = None) -> Signal:
    return Signal(kind=kind, attempt=attempt, at=NOW, node=node, message=f"{kind}", source="test")


@pytest.mark.parametrize("kind", list(SignalKind))
def test_a_signal_about_another_attempt_changes_nothing(kind: SignalKind) -> None:
    seen = running()
    assert check(replace(seen, signals=(signal(kind, 0, "a"), signal(kind, 2, "a")))).status == seen.status


@pytest.mark.parametrize("kind", [SignalKind.ALERT, SignalKind.STRAGGLER, SignalKind.REBALANCE])
def test_a_signal_that_asks_for_nothing_changes_nothing(kind: SignalKind) -> None:
    seen = running()
    assert check(replace(seen, signals=(signal(kind, 1, "a"),))).status == seen.status


def test_a_spot_notice_gives_time_to_commit_and_costs_nothing() -> None:
    seen = restarting(replace(running(), signals=(signal(SignalKind.SPOT_NOTICE, 1, "b"),)))
    assert seen.status.code == Code.PREEMPTED
    assert check(seen).actions == tuple(RemoveWorker(WorkerId(1, i), STOP_SECONDS) for i in range(2))
    seen = closed(seen)
    assert (seen.status.restarts.recent, seen.status.preemptions_in_a_row) == ((), 1)
    assert seen.status.attempts[-1].outcome == "preempted"
    assert write(seen).status.phase is Phase.QUEUED, "the node that goes away is not used again"


def test_a_node_that_an_alert_wants_drained_is_not_given_again() -> None:
    alert = signal(SignalKind.NODE_DRAIN, 1, "b")
    seen = write(replace(running(), signals=(alert,)))
    assert seen.status.code == Code.EVICTED
    assert [(entry.node, entry.until) for entry in seen.status.excluded_nodes] == [("b", NOW + 3600.0)]
    cordoned = write(replace(running(), signals=(alert,), nodes_unfit=("b",)))
    assert cordoned.status.excluded_nodes == (), "its end is the cluster's to tell"


def test_a_node_with_a_broken_gpu_is_avoided_at_once() -> None:
    seen = write(replace(running(), signals=(signal(SignalKind.GPU_FAULT, 1, "b"),)))
    assert (seen.status.phase, seen.status.code) == (Phase.RESTARTING, Code.INFRASTRUCTURE_FAULT)
    assert [entry.node for entry in seen.status.excluded_nodes] == ["b"]
    seen = closed(seen)
    assert [entry.node for entry in seen.status.excluded_nodes] == ["b"]
    assert [fault.node for fault in seen.status.node_faults] == ["b"]
    assert write(seen).status.phase is Phase.QUEUED, "the gang asks for another"


# --- clocks ---


@pytest.mark.parametrize("jump", [3600.0, 86_400.0 * 400, -3600.0, -86_400.0 * 400])
def test_a_clock_that_jumps_kills_nobody(jump: float) -> None:
    """The operator's clock jumps; the workers' don't, and they go on."""
    seen = running()
    for k in range(1, 40):
        at = NOW + 5.0 * k
        decision = check(replace(seen, now=at + jump, workers=crew(step=5 + k, now=at)))
        seen = write(seen, decision)
        assert seen.status.phase is Phase.RUNNING, decision.because


def test_a_backoff_in_the_far_future_means_that_the_clock_went_back() -> None:
    seen = running()
    seen = closed(restarting(with_status(seen, seen.status, workers=(exited(0, 137), crew()[1]))))
    back = replace(seen, now=NOW - 86_400.0)
    assert check(back).status.phase is Phase.STARTING


# --- growth ---


def test_an_offer_to_grow_restarts_into_the_larger_gang() -> None:
    seen = running()
    offer = granted(1, ("a", "b", "c", "d"))
    seen = replace(seen, reservations=(granted(0), offer))
    seen = restarting(seen)
    assert seen.status.code == Code.REGROWING
    assert check(seen).actions == tuple(RemoveWorker(WorkerId(1, i), STOP_SECONDS) for i in range(2))
    seen = closed(seen)
    assert seen.status.attempts[-1].outcome == "resized"
    seen = write(seen)
    assert (seen.status.phase, seen.status.reservation) == (Phase.QUEUED, 1)
    seen = write(seen)
    assert (seen.status.phase, seen.status.gang.nodes, seen.status.restarts.total) == (Phase.STARTING, offer.nodes, 0)


# --- fences ---


def test_a_newer_status_is_not_touched() -> None:
    seen = running()
    seen = with_status(seen, seen.status.model_copy(update={"schema_version": STATUS_VERSION + 1}), deleting=True)
    decision = check(seen)
    assert (decision.status, decision.actions, decision.code) == (seen.status, (), Code.NEWER_STATUS)
    assert f"schema version {STATUS_VERSION + 1}" in decision.because


def test_a_worker_newer_than_the_status_is_left_alone() -> None:
    """The status that we see lags behind: somebody else has begun attempt 2."""
    seen = running()
    for state in (seen, settled(gone(write(replace(seen, spec=seen.spec.model_copy(update={"cancel": True})))))):
        decision = check(replace(state, workers=(*state.workers, worker(0, attempt=2))))
        assert not any(isinstance(a, RemoveWorker) and a.id.attempt == 2 for a in decision.actions)
