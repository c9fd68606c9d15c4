"""A program that knows nothing of Muster, on one machine: a rank is killed, and it resumes from its own checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.local.house import House
from tests.polling import eventually
from tests.processes import command_of

from muster.words.names import EXIT_RECORD, LOG
from muster.words.signals import Cause
from muster.words.status import GoodputState, JobStatus, Phase

STEPS, SAVED = 12, 8
# As much of torch as the hook of optimizer steps meets; importing the real one takes longer than all the rest.
TORCH = """
hooks = []
def register_optimizer_step_post_hook(hook): hooks.append(hook)
class Optimizer:
    def step(self):
        for hook in hooks: hook(self, (), {})
"""
# Each rank counts; rank 0 saves once, by a rename. In the first attempt they stop after that, until they are killed.
PROGRAM = f"""
import json, os, pathlib, sys, time
from torch.optim.optimizer import Optimizer
rank, world, attempt = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MUSTER_ATTEMPT"))
assert world == 2 and os.environ["MASTER_ADDR"] and sys.argv[1:] == ["--lr", "1"], sys.argv
resumed, state = os.environ.get("MUSTER_RESUME_DIR"), 0
if resumed:
    state = json.loads((pathlib.Path(resumed) / "state.json").read_text())["step"]
print(f"rank {{rank}} of attempt {{attempt}} begins after step {{state}}", flush=True)
downloads = pathlib.Path(os.environ["HF_HOME"], "hub", f"models--{{rank}}")
if not resumed:
    downloads.mkdir(parents=True)
assert downloads.is_dir(), "downloads outlive the attempt"
optimizer = Optimizer()
while state < {STEPS}:
    state += 1
    optimizer.step()
    if state == {SAVED} and rank == 0 and not resumed:
        folder = pathlib.Path(os.environ["MUSTER_CHECKPOINT_DIR"])
        (folder / ".new").mkdir()
        (folder / ".new" / "state.json").write_text(json.dumps({{"step": state}}))
        (folder / ".new").rename(folder / f"step-{{state:08d}}")
    while state == {SAVED} + 2 and attempt == 1:
        time.sleep(0.05)
print(f"rank {{rank}} is done at step {{state}}", flush=True)
"""


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "state", None)
    yield house
    house.close()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "torch" / "optim").mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text("")
    (folder / "torch" / "optim" / "__init__.py").write_text("from . import optimizer")
    (folder / "torch" / "optim" / "optimizer.py").write_text(TORCH)
    (folder / "train.py").write_text(PROGRAM)
    return folder


def log_of(house: House, uid: str, attempt: int, worker: int) -> str:
    return (house.state.worker(uid, attempt, worker) / LOG).read_text()


def rank_of(house: House, uid: str, worker: int) -> psutil.Process:
    """The process of the program in that worker."""

    def there() -> psutil.Process | None:
        for process in house.trees(uid).get((1, worker), []):
            if "--lr" in command_of(process):
                return process
        return None

    found = eventually(there, f"the rank of worker {worker}")
    assert found is not None
    return found


@pytest.mark.long
def test_a_killed_rank_costs_what_was_done_since_the_last_checkpoint(house: House, project: Path) -> None:
    house.start()
    uid = house.submit(
        "mine",
        nodes=2,
        training=None,
        program={"command": [str(project / "train.py"), "--lr", "1"], "steps": STEPS},
    )

    def has_saved() -> JobStatus | None:
        status = house.status(uid)
        saved = status.checkpoint is not None and status.checkpoint.step == SAVED
        return status if saved and status.phase is Phase.RUNNING else None

    eventually(has_saved, "the program's checkpoint to be kept")
    rank_of(house, uid, 1).kill()
    status = house.becomes(uid, Phase.SUCCEEDED)
    first, second = status.attempts
    assert (first.cause, first.resume_step, second.resume_step) == (Cause.INFRASTRUCTURE, 0, SAVED)
    assert status.last_failure is not None
    assert (status.last_failure.rank, status.last_failure.exit_code) == (1, 137)
    for worker in (0, 1):
        assert f"rank {worker} of attempt 1 begins after step 0" in log_of(house, uid, 1, worker)
        assert f"rank {worker} of attempt 2 begins after step {SAVED}" in log_of(house, uid, 2, worker)
        assert f"rank {worker} is done at step {STEPS}" in log_of(house, uid, 2, worker)
    assert status.ledger.seconds[GoodputState.PRODUCTIVE] > 0.0
    assert status.progress is not None
    assert status.progress.step == STEPS
    ended = json.loads((house.state.worker(uid, 2, 0) / EXIT_RECORD).read_text())
    assert ended["exitCode"] == 0
