"""The real trainer under the real operator: real gangs die and come back, and never two at once."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.local.house import House, whole_lines
from tests.polling import eventually
from tests.processes import kill, send

from muster.operator.local import processes
from muster.words.names import STEP_LOG, ExitCode
from muster.words.signals import StepRecord
from muster.words.status import Phase

pytestmark = pytest.mark.slow
STEPS = 150  # far more than a gang trains until its rank is found and killed


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "state", worker_command=None)
    yield house
    house.close()


def submit(house: House, every: int = 5, evaluate_every: int = 0, steps: int = STEPS, **spec: Any) -> str:
    text = house.state.root.parent / "text.txt"
    text.write_text("".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py"))))
    shape = {"dim": 32, "layers": 2, "heads": 2, "kvHeads": 1, "ffnDim": 64, "vocabSize": 260, "maxPositions": 256}
    training: dict[str, Any] = {
        "model": {"architecture": shape},
        "data": {"train": [{"source": str(text)}], "sequenceLength": 128},
        "batch": {"tokensPerStep": 1024, "microBatch": 1},
        "parallel": {"shard": "fsdp"},
        "length": {"steps": steps},
    }
    if evaluate_every:
        training["evaluation"] = {"every": evaluate_every, "data": [{"source": str(text)}], "samples": 8}
    return house.submit(training=training, checkpoint={"every": every}, **spec)


def records(house: House, uid: str, attempt: int) -> list[StepRecord]:
    path = house.state.worker(uid, attempt, 0) / STEP_LOG
    return [StepRecord.model_validate_json(line) for line in whole_lines(path)]


def reaches(house: House, uid: str, attempt: int, step: int) -> None:
    eventually(
        lambda: any(record.step >= step for record in records(house, uid, attempt)),
        f"step {step} of attempt {attempt}; {house.status(uid).because}",
    )


@pytest.mark.long
def test_a_rank_dies_then_the_operator_then_everything(house: House) -> None:
    house.start()
    uid = submit(house)
    reaches(house, uid, 1, 8)
    rank = house.trees(uid)[1, 1][1]
    rank.send_signal(signal.SIGKILL)

    reaches(house, uid, 2, 16)
    status = house.status(uid)
    assert status.last_failure is not None
    assert (status.last_failure.cause, status.last_failure.exit_code) == ("infrastructure", 137)
    assert status.resume_step >= 5
    gang = [process for tree in house.trees(uid).values() for process in tree]
    send(gang, signal.SIGSTOP)  # or it may be done before the operator is back
    house.signal(signal.SIGKILL)
    assert house.trees(uid), "it outlives the operator"
    house.start()
    eventually(lambda: house.log.count("adopted a running worker") == 2, "the gang to be adopted")
    assert {attempt for attempt, _ in house.trees(uid)} == {2}

    house.signal(signal.SIGKILL)
    kill(gang)
    eventually(lambda: not house.trees(uid), "everything to be dead")
    house.start()
    status = house.becomes(uid, Phase.SUCCEEDED, timeout=150)
    eventually(lambda: not processes.scan(house.state), "the last process to be gone")
    assert status.attempt == 3
    for attempt in status.attempts:
        steps = [record.step for record in records(house, uid, attempt.number)]
        assert steps == list(range(attempt.resume_step + 1, steps[-1] + 1)), "each goes on from what was committed"
    assert records(house, uid, 3)[-1].step == STEPS


@pytest.mark.long
def test_a_suspended_gang_commits_where_it_stands(house: House) -> None:
    house.start()
    uid = submit(house, steps=1_000_000, gang={"nodes": 1, "processesPerNode": 2})  # it is cancelled
    reaches(house, uid, 1, 7)
    house.set_spec(uid, suspend=True)
    status = house.becomes(uid, Phase.SUSPENDED, timeout=120)
    last = records(house, uid, 1)[-1].step
    assert status.checkpoint is not None
    assert status.checkpoint.step == last, "nothing is lost"
    ended = json.loads((house.state.worker(uid, 1, 0) / "exit.json").read_text())
    assert ended["exitCode"] == ExitCode.PREEMPTED_COMMITTED
    house.set_spec(uid, suspend=False)
    reaches(house, uid, 2, last + 1)
    house.set_spec(uid, cancel=True)
    house.becomes(uid, Phase.CANCELLED, timeout=120)
    eventually(lambda: not processes.scan(house.state), "the last process to be gone")
