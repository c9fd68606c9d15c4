"""A tracker that dies, or that can't write, costs its numbers alone: the gang trains on, and everybody is told."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.api.test_api_process import api
from tests.integration.local.house import House
from tests.integration.local.test_local_trainer import reaches, records
from tests.polling import eventually
from tests.processes import command_of

from muster.client import Muster
from muster.trainer.tracking.processes import FAULTS
from muster.words.status import Condition

pytestmark = [pytest.mark.long, pytest.mark.slow]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "state", worker_command=None)
    yield house
    house.close()


def document(name: str, steps: int) -> dict[str, Any]:
    """Two ranks that learn a small package of the standard library, with TensorBoard's files."""
    shape = {"dim": 32, "layers": 1, "heads": 2, "kvHeads": 1, "ffnDim": 64, "vocabSize": 260, "maxPositions": 64}
    training = {
        "model": {"architecture": shape},
        "data": {"train": [{"source": f"{Path(json.__file__).parent}/*.py"}], "sequenceLength": 64},
        "batch": {"tokensPerStep": 256, "microBatch": 2},
        "length": {"steps": steps},
    }
    spec = {"training": training, "gang": {"nodes": 1, "processesPerNode": 2}, "tracking": {"tensorboard": True}}
    return {"apiVersion": "muster.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}


def trackers(house: House, uid: str) -> list[psutil.Process]:
    found = [process for tree in house.trees(uid).values() for process in tree]
    return [process for process in found if "muster.trainer.tracking" in command_of(process)]


def test_a_tracker_that_dies_or_cannot_write_stops_no_run_and_is_told_of(house: House) -> None:
    root = house.state.root
    with api(root) as server, Muster(server.url) as muster:
        killed, barred = (muster.jobs.submit(document(n, s)) for n, s in (("killed", 1_000_000), ("barred", 20)))
        in_the_way = house.job_folder(barred.id) / "tensorboard"
        in_the_way.parent.mkdir(parents=True)
        in_the_way.write_text("a file where its folder should be")
        house.start()

        eventually(lambda: len(records(house, killed.id, 1)) > 2, "three steps")
        (tracker,) = eventually(lambda: trackers(house, killed.id), "the tracker's process")
        tracker.send_signal(signal.SIGKILL)

        def condition() -> Condition | None:
            found = {each.type: each for each in house.status(killed.id).conditions}
            return found.get("TrackingFailed")

        failed = eventually(condition, "the condition")
        words = "tensorboard is left out from here on: its process ended with code -9"
        assert (failed.status, failed.reason) == ("True", "TrackerLeftOut")
        assert failed.message.startswith(words)
        # Other conditions may come on a busy machine, where one rank may be slower than the other.
        begins = "TrackingFailed is True: "
        told = eventually(
            lambda: [e.message for e in killed.events(types=["condition.changed"]) if e.message.startswith(begins)],
            "the event",
        )
        assert told == [f"{begins}{failed.message}"]
        (advice,) = [words_ for words_ in killed.why().next if words_.startswith("TrackingFailed")]
        assert advice.startswith(f"TrackingFailed: {words}")
        reaches(house, killed.id, 1, records(house, killed.id, 1)[-1].step + 20)
        assert house.status(killed.id).restarts.total == 0
        killed.cancel().wait(120, check=False)

        assert barred.wait(200).phase == "Succeeded"
        assert house.status(barred.id).restarts.total == 0
        left_out = (house.state.worker(barred.id, 1, 0) / FAULTS).read_text()
        assert left_out.startswith("tensorboard is left out from here on: ")
        assert in_the_way.read_text() == "a file where its folder should be"
