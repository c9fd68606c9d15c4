"""A rank that lost a peer often speaks before the peer's own launcher does: the cause is still the peer's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.core.seen import NOW, crew, exited, running, with_status

from muster.operator.core.audit import audit
from muster.operator.core.causes import PEER_REPORT_SECONDS
from muster.operator.core.decide import decide
from muster.operator.core.decision import RemoveWorker
from muster.operator.core.observed import ObservedJob
from muster.words.signals import Cause
from muster.words.status import Failure, Phase

PEER_LOST = exited(0, 88, at=NOW - 0.1, message="lost another rank")


def after(seen: ObservedJob) -> ObservedJob:
    decision = decide(seen)
    assert audit(seen, decision) == ()
    return with_status(seen, decision.status)


def failure_of(seen: ObservedJob) -> Failure:
    assert seen.status.phase in (Phase.RESTARTING, Phase.STOPPING)
    assert seen.status.last_failure is not None
    return seen.status.last_failure


def survivors_word() -> ObservedJob:
    """Worker 0 has ended for want of its peer; of worker 1 nothing is known yet."""
    seen = running()
    return after(with_status(seen, seen.status, workers=(PEER_LOST, crew()[1])))


def test_a_lost_peer_is_the_infrastructures_fault_until_more_is_known() -> None:
    failure = failure_of(survivors_word())
    assert (failure.cause, failure.exit_code, failure.worker) == (Cause.INFRASTRUCTURE, 88, 0)


@pytest.mark.parametrize(
    ("code", "cause"), [(137, Cause.INFRASTRUCTURE), (82, Cause.NUMERIC), (80, Cause.USER_ERROR), (1, Cause.UNKNOWN)]
)
def test_the_peers_own_end_explains_it_although_it_is_told_later(code: int, cause: Cause) -> None:
    told = exited(1, code, at=NOW + 0.2, message="its own word")
    failure = failure_of(after(replace(survivors_word(), now=NOW + 0.3, workers=(PEER_LOST, told))))
    assert (failure.cause, failure.exit_code, failure.worker) == (cause, code, 1)


@pytest.mark.parametrize(
    ("code", "at"),
    [(85, NOW + 0.2), (86, NOW + 0.2), (143, NOW + 0.2), (137, NOW + 5.0)],
    ids=["committed when told", "stopped when told", "SIGTERM", "killed after the grace"],
)
def test_a_peer_that_ended_because_we_stopped_it_explains_nothing(code: int, at: float) -> None:
    seen = survivors_word()
    later = after(replace(seen, now=at + 0.1, workers=(PEER_LOST, exited(1, code, at=at))))
    assert failure_of(later) == failure_of(seen)


def test_nobodys_node_is_charged_for_a_lost_peer() -> None:
    seen = after(replace(survivors_word(), now=NOW + 1.0, workers=()))
    assert seen.status.node_faults == ()
    seen = survivors_word()
    seen = after(replace(seen, now=NOW + 0.3, workers=(PEER_LOST, exited(1, 137, at=NOW + 0.2))))
    seen = after(replace(seen, workers=()))
    assert [fault.node for fault in seen.status.node_faults] == ["b"]


def test_the_lost_peer_may_speak_before_those_that_live_are_removed() -> None:
    seen = survivors_word()
    waits = decide(replace(seen, now=NOW + 0.4))
    assert (waits.actions, waits.wake_after) == ((), pytest.approx(PEER_REPORT_SECONDS - 0.4))
    said_nothing = decide(replace(seen, now=NOW + PEER_REPORT_SECONDS))
    assert [action.id.worker for action in said_nothing.actions if isinstance(action, RemoveWorker)] == [1]
    spoke = replace(seen, now=NOW + 0.4, workers=(PEER_LOST, exited(1, 1, at=NOW + 0.3, message="ValueError: no")))
    assert failure_of(after(spoke)).message == "ValueError: no"


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0], ids=["backwards", "forwards"])
def test_a_clock_that_jumps_makes_nobody_wait_for_a_word(jump: float) -> None:
    seen = survivors_word()
    assert decide(replace(seen, now=NOW + jump)).actions


def test_a_death_by_a_foreign_hand_is_charged_to_no_node() -> None:
    seen = running()
    killed = exited(1, 137, message="rank 1 was killed by SIGKILL", signal=9, node_blameless=True)
    after = decide(replace(seen, workers=(seen.workers[0], killed))).status
    assert (after.phase, after.node_faults, after.excluded_nodes) == (Phase.RESTARTING, (), ())
    assert after.last_failure is not None
    assert (after.last_failure.cause, after.last_failure.node) == (Cause.INFRASTRUCTURE, None)
    assert after.last_failure.message == (
        "rank 1 was killed by SIGKILL; neither Muster nor the kernel's memory killer did that, so b is not charged"
    )
