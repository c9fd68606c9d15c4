"""What is told of a gang that trains all the same; and a dry run, in which nothing else is done either."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.seen import NOW, beat, crew, exited, running, spec, with_status, worker, write
from tests.unit.core.test_core_decide import check
from tests.unit.core.test_core_signals import signal
from tests.unit.core.test_core_stalls import gang

from muster.operator.core.codes import Code
from muster.operator.core.observed import ObservedJob
from muster.words.signals import SignalKind, SlowRank
from muster.words.status import Condition, Phase


def told(seen: ObservedJob, **facts: Any) -> ObservedJob:
    """The state after rank 0's heartbeat said so."""
    changed = with_status(seen, seen.status, workers=(worker(0, heartbeats=(beat(1, 6, **facts),)), crew()[1]))
    return write(changed)


def condition(seen: ObservedJob, kind: str) -> Condition | None:
    return next((entry for entry in seen.status.conditions if entry.type == kind), None)


def slow(rank: int, since: int = 4, ratio: float = 1.5) -> SlowRank:
    return SlowRank(rank=rank, ratio=ratio, since_step=since)


def test_a_straggler_is_told_and_its_node_remembers() -> None:
    seen = told(running(), slow_ranks=(slow(9),))
    found = condition(seen, "Straggler")
    assert found is not None
    assert (found.status, found.reason) == ("True", "RankIsSlow")
    assert "rank 9 (worker 1 on b) since step 4" in found.message
    assert seen.status.phase is Phase.RUNNING
    assert [fault.node for fault in seen.status.node_faults] == ["b"]
    assert seen.status.excluded_nodes == ()
    assert told(seen, slow_ranks=(slow(9, ratio=1.7),)).status == seen.status, "the same, told again"

    well = told(seen, slow_ranks=())
    assert (found := condition(well, "Straggler")) is not None
    assert found.status == "False"
    again = told(well, slow_ranks=(slow(9, since=60),))
    assert [entry.node for entry in again.status.excluded_nodes] == ["b"], "repeated: it is avoided from now on"
    assert again.status.phase is Phase.RUNNING, "but nothing is restarted for it"


@pytest.mark.parametrize(("share", "expected"), [(0.1, None), (0.2, None), (0.3, "True"), (None, None)])
def test_waiting_for_data_is_told(share: float | None, expected: str | None) -> None:
    found = condition(told(running(), data_wait_share=share), "DataBound")
    assert (found.status if found else None) == expected


def test_waiting_for_data_does_not_flap() -> None:
    seen = told(running(), data_wait_share=0.3)
    for share, expected in ((0.2, "True"), (0.1, "False"), (0.2, "False"), (0.3, "True")):
        seen = told(seen, data_wait_share=share)
        found = condition(seen, "DataBound")
        assert found is not None
        assert found.status == expected


def test_an_overdue_commit_is_told() -> None:
    seen = running()
    known = {"commit_seconds": 100.0, "last_commit_step": 3}
    assert condition(told(seen, last_commit_at=NOW - 290.0, **known), "CheckpointOverdue") is None
    seen = replace(seen, status=seen.status.model_copy(update={"attempts": (first_step(seen, NOW - 900.0),)}))
    late = told(seen, last_commit_at=NOW - 310.0, **known)
    found = condition(late, "CheckpointOverdue")
    assert found is not None
    assert (found.status, "after step 3" in found.message) == ("True", True)
    found = condition(told(late, last_commit_at=NOW, **known), "CheckpointOverdue")
    assert found is not None
    assert found.status == "False"


def first_step(seen: ObservedJob, at: float) -> Any:
    return seen.status.attempts[-1].model_copy(update={"first_step_at": at})


def test_skipped_batches_are_counted() -> None:
    record = beat(1, 6).last_step
    assert record is not None
    last = record.model_copy(update={"skipped": "the loss is nan"})
    seen = told(running(), skipped_steps=2, skipped_samples=16, last_skipped=last)
    found = condition(seen, "BatchesSkipped")
    assert found is not None
    assert found.message == "2 steps were not learnt from (16 samples skipped); the last is step 6: the loss is nan"


def test_training_conditions_end_with_the_gang() -> None:
    seen = told(running(), slow_ranks=(slow(9),))
    seen = write(with_status(seen, seen.status, workers=(exited(0, 137), crew()[1])))
    assert seen.status.phase is Phase.RESTARTING
    found = condition(seen, "Straggler")
    assert found is not None
    assert (found.status, found.reason) == ("False", "NotTraining")


def test_a_dry_run_only_says_what_it_would_do() -> None:
    dry = running(spec=spec(recovery={"dryRun": True}))
    seen = write(replace(dry, signals=(signal(SignalKind.GPU_FAULT, 1, "a"),)))
    assert (seen.status.phase, seen.status.code) == (Phase.RUNNING, Code.WOULD_RESTART)
    assert "infrastructure: gpu_fault" in seen.status.because
    assert check(seen).actions == ()
    seen = write(replace(seen, signals=()))
    assert seen.status.code == Code.TRAINING


def test_a_hang_in_a_dry_run_is_told_once() -> None:
    status, codes = running(spec=spec(recovery={"dryRun": True})).status, []
    for seconds in (16.0, 20.0, 24.0, 28.0, 60.0):
        now = gang(NOW + 1_000.0 + seconds, {"idle": seconds}, {"idle": seconds})
        status = check(replace(now, status=status, spec=spec(recovery={"dryRun": True}))).status
        codes.append(status.code)
    assert codes == [Code.STALLING, Code.STALLING, *[Code.WOULD_RESTART] * 3]


def test_what_has_ended_by_itself_restarts_in_a_dry_run_too() -> None:
    dry = running(spec=spec(recovery={"dryRun": True}))
    assert check(with_status(dry, dry.status, workers=(exited(0, 137), crew()[1]))).status.phase is Phase.RESTARTING


def test_a_worker_killed_for_its_memory_ends_with_the_arithmetic() -> None:
    """The kernel left it no time to say so itself."""
    said = beat(1, 5, memory="a rank needs about 9 GiB and has 8 GiB. To fit: lower batch.microBatch (now 4)")
    end = exited(0, 137, reason="OOMKilled", heartbeats=(said,))
    seen = running()
    status = check(with_status(seen, seen.status, workers=(end, crew()[1]))).status
    assert status.last_failure is not None
    assert status.last_failure.message == f"worker 0 on a: OOMKilled; {said.memory}"
