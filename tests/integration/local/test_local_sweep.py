"""A sweep of twelve real trainings on one machine ends with the best found, the API killed on the way."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.integration.api.test_api_process import api
from tests.integration.local.house import House
from tests.polling import eventually

from muster.client import Muster

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]
SHAPE = {"dim": 32, "layers": 1, "heads": 2, "kvHeads": 1, "ffnDim": 64, "vocabSize": 260, "maxPositions": 64}


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "state", worker_command=None)
    yield house
    house.close()


def document() -> dict[str, Any]:
    """The example with a smaller model and fewer steps, on one small package of the standard library."""
    example: dict[str, Any] = yaml.safe_load((Path(__file__).parents[3] / "examples" / "sweep-stdlib.yaml").read_text())
    example["sweep"] |= {"concurrency": 2, "stopping": {"kind": "asha", "minSteps": 4, "factor": 3}}
    example["spec"]["training"] |= {
        "model": {"architecture": SHAPE},
        "data": {"train": [{"source": f"{os.path.dirname(json.__file__)}/*.py"}], "sequenceLength": 64},
        "batch": {"tokensPerStep": 256, "microBatch": 4},
        "length": {"steps": 12},
        "evaluation": {"every": 4, "holdout": 0.3, "samples": 4},
    }
    return example


def test_a_sweep_of_twelve_finds_the_best_though_the_api_is_killed(house: House) -> None:
    house.start()
    root = house.state.root
    with api(root) as first, Muster(first.url) as muster:
        sweep = muster.sweeps.create(document())
        eventually(lambda: len(sweep.refresh().trials) >= 4, "four trials", 300)
        first.end(signal.SIGKILL)
    with api(root) as second, Muster(second.url) as muster:
        sweep = muster.sweeps.get(sweep.id).wait(timeout_seconds=500)
        assert (sweep.phase, [trial.number for trial in sweep.trials]) == ("Succeeded", list(range(1, 13)))
        jobs = list(muster.jobs.list())
        assert {job.id for job in jobs} == {trial.job_id for trial in sweep.trials}, "each trial has one job"
        values = {trial.number: trial.value for trial in sweep.trials if trial.value is not None}
        best = sweep.best
        assert best is not None
        assert (best.trial, best.value) == (min(values, key=lambda number: values[number]), min(values.values()))
        assert best.commit is not None
        steps = [commit.step for commit in muster.jobs.get(best.commit.job).checkpoints().items]
        assert best.commit.step in steps
        for trial in sweep.trials:
            assert trial.phase in ("Succeeded", "Cancelled")
            assert trial.phase == "Succeeded" or trial.reason is not None, "who was cancelled was told why"
            if trial.phase == "Cancelled":
                because = muster.jobs.get(trial.job_id).status.because
                assert because == f"stopped by sweep {sweep.name}: {trial.reason}"
