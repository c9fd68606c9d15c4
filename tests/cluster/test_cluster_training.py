"""Real training in pods: the launcher, torch's agent, ranks that meet, commits, the fence over the API server."""

from pathlib import Path

import pytest
from tests.cluster.house import House, quick_job
from tests.polling import eventually

from muster.kube import paths

TEXT = "A gang of workers marches on, and what it has learnt it commits before the next hill.\n"


@pytest.mark.timeout(600)
def test_a_gang_trains_through_a_killed_container(house: House, tmp_path: Path) -> None:
    for index in range(2):
        house.node(f"train-{index}", {"node.kubernetes.io/instance-type": "train"})
    for index in range(40):
        (tmp_path / f"{index}.txt").write_text(TEXT * (20 + index))
    house.start_operator(MUSTER_OPERATOR_PREFLIGHT="true", MUSTER_OPERATOR_PREFLIGHT_ANSWERS="disk=warn")
    training = {
        "model": {"preset": "muster-1m"},
        "data": {"train": [{"source": f"{tmp_path}/*.txt"}], "sequenceLength": 64},
        "batch": {"tokensPerStep": 256, "microBatch": 1},
        "length": {"steps": 100},
    }
    document = quick_job(
        "torch", training=training, gang={"instanceTypes": ["train"]}, runtime={"image": "trainer"},
        checkpoint={"every": 20},
    )  # fmt: skip
    try:
        uid = house.submit(document)
        eventually(
            lambda: (house.status("torch").get("checkpoint") or {}).get("step"), f"a checkpoint\n{house.tail()}", 240
        )
        process = house.kubelets.of("torch-1-1")
        assert process is not None
        assert (process.folder / "log-preflight").exists()
        process.kill_container()
        status = house.reaches("torch", "Succeeded", 240)
        assert status["attempt"] == 2, house.tail()
        assert status["restarts"]["byCause"] == {"infrastructure": 1}
        assert status["attempts"][1]["resumeStep"] >= 20
        assert status["progress"]["step"] == status["progress"]["steps"] == 100
        assert status["progress"]["loss"] < 5.6  # of a byte that could be anything: ln 260
        assert status["checkpoint"]["step"] == 100
        assert (house.checkpoints / uid / "commits" / "step-00000100.json").exists()
        assert house.get(paths.core("team", "services", "muster-workers"))["spec"]["publishNotReadyAddresses"]
    finally:
        house.stop_operators()
