"""Real ranks that are slow, or whose numbers go wrong: told, skipped, passed over, and trained to the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.local.house import House
from tests.integration.local.test_local_hangs import HOOKS
from tests.integration.local.test_local_trainer import reaches, records, submit
from tests.polling import eventually

from muster.trainer.train.straggler_timer import WINDOW
from muster.words.names import HEARTBEAT
from muster.words.signals import Heartbeat
from muster.words.status import Condition, Phase

pytestmark = pytest.mark.slow
FOUND_STEPS = 10
STEPS = 200  # the operator has hundreds of them to say that one was skipped
SAMPLES_PER_STEP = 8
PASSES_PER_STEP = 4  # of each rank: micro-batches of one sample


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, worker_command=None)
    house.environment["MUSTER_OPERATOR_WORKER_PATHS"] = json.dumps([str(HOOKS)])
    yield house
    house.close()


class Ordered:
    """A job of two ranks that obey tests/drills/faults/hooks."""

    def __init__(self, house: House, orders: Path, steps: int = STEPS) -> None:
        self.house, self.orders = house, orders / "tiny"
        self.orders.mkdir()
        self.uid = submit(
            house,
            steps=steps,
            env={"PYTHONPATH": str(HOOKS), "DRILL_ORDERS": str(self.orders.parent)},
            gang={"nodes": 1, "processesPerNode": 2},
        )

    def order(self, rank: int, **order: Any) -> None:
        (self.orders / ".order").write_text(json.dumps(order))
        (self.orders / ".order").rename(self.orders / f"rank-{rank}.json")

    def obeyed(self, rank: int) -> dict[str, Any]:
        path = self.orders / f"rank-{rank}.done.json"
        eventually(path.exists, f"rank {rank} to obey")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def condition(self, kind: str) -> Condition | None:
        return next((entry for entry in self.house.status(self.uid).conditions if entry.type == kind), None)

    def beat(self, rank: int) -> Heartbeat:
        path = self.house.state.worker(self.uid, 1, 0) / HEARTBEAT.format(rank=rank)
        return Heartbeat.model_validate_json(path.read_text())


def commits(house: House, uid: str) -> list[Path]:
    return list((house.job_folder(uid) / "commits").glob("step-*.json"))


@pytest.mark.long
def test_a_straggler_is_found_within_ten_steps_and_not_restarted(house: House, orders: Path) -> None:
    house.start()
    job = Ordered(house, orders, steps=1_000_000)  # it is cancelled
    # Slow enough to stand out where the machine is busy with others; how little is enough is the unit tests' matter.
    job.order(1, kind="slow", factor=10.0, passes=10_000, after=12 * PASSES_PER_STEP)
    reaches(house, job.uid, 1, 1)
    beat = eventually(lambda: (now := job.beat(0)).slow_ranks and now, "rank 0 to notice")
    assert [entry.rank for entry in beat.slow_ranks] == [1]
    onset = next(record.step for record in records(house, job.uid, 1) if record.at >= job.obeyed(1)["at"])
    # By its own count, for the heartbeat may be some steps old when it is read.
    assert beat.slow_ranks[0].since_step + WINDOW - onset <= FOUND_STEPS
    found = eventually(lambda: job.condition("Straggler"), "the condition")
    assert found is not None
    assert found.status == "True"
    assert "rank 1 (worker 0 on " in found.message
    house.set_spec(job.uid, cancel=True)
    status = house.becomes(job.uid, Phase.CANCELLED, timeout=120)
    assert (status.attempt, [fault.node for fault in status.node_faults]) == (1, [status.attempts[0].nodes[0]])


@pytest.mark.long
def test_a_bad_batch_is_skipped_then_bad_data_is_passed_over_then_a_commit_is_given_up(
    house: House, orders: Path
) -> None:
    house.start()
    job = Ordered(house, orders)
    reaches(house, job.uid, 1, 6)
    job.order(0, kind="scale", by=float("nan"), passes=1)
    found = eventually(lambda: job.condition("BatchesSkipped"), "a skipped batch")
    assert found is not None
    assert found.message.startswith(
        f"1 step was not learnt from ({SAMPLES_PER_STEP} samples skipped); the last is step "
    )
    skipped = eventually(lambda: [r for r in records(house, job.uid, 1) if r.skipped], "its record")
    assert [record.skipped for record in skipped] == ["the loss is nan"]
    assert house.status(job.uid).attempt == 1

    eventually(lambda: len(commits(house, job.uid)) > 1, "a checkpoint to go back to")
    job.order(1, kind="scale", by=float("nan"), passes=10_000)
    job.obeyed(1)
    job.order(1, kind="scale", by=float("nan"), passes=10_000)  # and the next attempt's from its first step on
    status = house.becomes(job.uid, Phase.SUCCEEDED, timeout=200)
    assert (status.attempt, status.restarts.by_cause) == (3, {"numeric": 2})
    last = status.attempts[0].last_step
    assert last is not None
    doubted, resumed = (attempt.resume_step for attempt in status.attempts[1:])
    assert 0 < resumed < doubted <= last
    commit = json.loads((house.job_folder(job.uid) / "commits" / f"step-{STEPS:08d}.json").read_text())
    (passed_over,) = commit["state"]["passedOver"]
    steps = passed_over["samples"] // SAMPLES_PER_STEP
    assert (passed_over["epoch"], passed_over["sample"]) == (0, resumed * SAMPLES_PER_STEP)
    assert steps >= last - resumed + 1, "up to the batch that ended the attempt"
    used, epochs = (STEPS + steps) * SAMPLES_PER_STEP, commit["cursor"]["epoch"]
    whole = used - commit["cursor"]["sample"]
    assert whole % epochs == 0 if epochs else whole == 0, "every other sample was used once"
