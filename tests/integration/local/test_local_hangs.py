"""Real ranks that hang, each in its way: found, named, shown where they stand, restarted. A paused machine is not."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.local.house import House
from tests.integration.local.test_local_trainer import reaches, records, submit
from tests.polling import eventually
from tests.processes import send

from muster.trainer.launch.stack_dumps import STACKS
from muster.words.names import EXIT_RECORD, ExitCode
from muster.words.status import Failure, JobStatus, Phase

pytestmark = [pytest.mark.slow, pytest.mark.long]
HOOKS = Path(__file__).parents[2] / "drills" / "faults" / "hooks"
PAUSE_SECONDS = 12.0  # longer than it takes to find one stopped rank
STEPS = 1_000_000  # whatever happens to a gang must happen before it is done; each test cancels its job


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, worker_command=None)
    house.environment["MUSTER_OPERATOR_WORKER_PATHS"] = json.dumps([str(HOOKS)])
    yield house
    house.close()


def restarted(house: House, uid: str) -> Failure:
    """The failure for which attempt 1 was ended, once attempt 2 trains."""
    eventually(lambda: house.status(uid).attempt == 2, f"attempt 2; {house.status(uid).because}")
    failure = house.status(uid).last_failure
    assert failure is not None
    return failure


def goes_on(house: House, uid: str, attempt: int, step: int) -> JobStatus:
    """The status once the attempt has trained that step; then the job is cancelled."""
    reaches(house, uid, attempt, step)
    status = house.status(uid)
    house.set_spec(uid, cancel=True)
    house.becomes(uid, Phase.CANCELLED, timeout=120)
    return status


def test_a_rank_that_is_stopped(house: House) -> None:
    house.start()
    uid = submit(house, steps=STEPS)
    reaches(house, uid, 1, 8)
    house.trees(uid)[1, 1][1].send_signal(signal.SIGSTOP)
    failure = restarted(house, uid)
    assert (failure.cause, failure.rank, failure.worker) == ("hang", 1, 1), failure.message
    assert failure.node is not None
    assert f"rank 1 (worker 1 on {failure.node}) is stopped" in failure.message
    ended = json.loads((house.state.worker(uid, 1, 1) / EXIT_RECORD).read_text())
    assert ended["exitCode"] == ExitCode.HUNG, "it was not waited for"
    assert goes_on(house, uid, 2, 16).restarts.by_cause == {"hang": 1}


def test_a_rank_that_never_comes_to_the_collective(house: House, orders: Path) -> None:
    """Rank 1 sleeps in its forward pass; rank 0 waits for it, and both tell where they stand."""
    house.start()
    uid = submit(
        house,
        steps=STEPS,
        env={"PYTHONPATH": str(HOOKS), "DRILL_ORDERS": str(orders)},
        gang={"nodes": 1, "processesPerNode": 2},
    )
    reaches(house, uid, 1, 8)
    (orders / "tiny").mkdir()
    (orders / "tiny" / ".order").write_text(json.dumps({"kind": "hang"}))
    (orders / "tiny" / ".order").rename(orders / "tiny" / "rank-1.json")
    failure = restarted(house, uid)
    assert failure.cause == "hang"
    assert failure.message.startswith("no progress for ")
    by_rank = {line.split()[1]: line for line in failure.log_tail.splitlines()}
    assert "sitecustomize.py" in by_rank["1"], failure.log_tail
    assert "sitecustomize.py" not in by_rank["0"]
    assert "all_gather" in by_rank["0"], failure.log_tail
    for rank in (0, 1):
        stacks = (house.state.worker(uid, 1, 0) / STACKS.format(rank=rank)).read_text()
        assert "loop.py" in stacks, "the launcher had the stacks of all threads written down"
    goes_on(house, uid, 2, 16)


def test_a_machine_that_pauses_is_not_restarted(house: House) -> None:
    """Evaluations and saves all the time, and in between every process of the gang stands still for a while."""
    house.start()
    uid = submit(house, every=2, evaluate_every=3, steps=STEPS)
    reaches(house, uid, 1, 6)  # an evaluation and two saves
    gang = [process for tree in house.trees(uid).values() for process in tree]
    send(gang, signal.SIGSTOP)
    began = time.monotonic()
    eventually(lambda: time.monotonic() - began > PAUSE_SECONDS, "the pause to end")
    before = records(house, uid, 1)[-1].step
    send(gang, signal.SIGCONT)
    status = goes_on(house, uid, 1, before + 40)
    assert (status.attempt, status.restarts.total) == (1, 0)
