"""Jobs that reach for the platform's token, its database or another job's files, through a real `muster up`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.cli.house import ARCHITECTURE, House
from tests.polling import eventually

from muster.local.sandbox import available

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not available(), reason="this kernel has no Landlock"),
]


def job(house: House, name: str, source: Path | str, **spec: Any) -> str:
    """The file of a job that trains on `source`."""
    training = {
        "model": spec.pop("model", {"architecture": ARCHITECTURE}),
        "data": {"train": [{"source": str(source)}], "sequenceLength": 32},
        "batch": {"tokensPerStep": 128},
        "length": {"steps": 3},
    }
    path = house.root / f"{name}.yaml"
    document = {
        "apiVersion": "muster.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"training": training, "gang": {"nodes": 1}, **spec},
    }
    path.write_text(json.dumps(document))
    return str(path)


def ends(house: House, name: str, phase: str) -> dict[str, Any]:
    over = ("Succeeded", "Failed", "Cancelled")
    eventually(lambda: house.phase(name) in over, f"the end of {name}", 150)
    found: dict[str, Any] = house.ask("get", name)["status"]
    assert found["phase"] == phase, found
    return found


def test_what_a_job_names_is_refused_or_out_of_reach(house: House) -> None:
    house.up("--stop-jobs")
    token, data = house.state.admin_token, house.root / "data"
    data.mkdir()
    (data / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    house.muster("submit", job(house, "honest", data, checkpoint={"every": 1}))
    ends(house, "honest", "Succeeded")
    uid = house.ask("get", "honest")["id"]

    refused = {
        "token": {"source": f"file://{token}"},
        "database": {"source": f"{house.state.root}/*.db"},
        "log": {"source": f"{house.state.jobs}/{uid}"},
        "commits": {"source": f"file://{house.state.checkpoints}/{uid}"},
        "checkpoint": {"source": data, "checkpoint": {"uri": f"file://{house.state.checkpoints}/{uid}"}},
    }
    for name, wish in refused.items():
        said = house.muster("submit", job(house, name, **wish), expect=1).stderr
        assert "lies in Muster's own state folder" in said, name

    (data / "b.txt").symlink_to(token)
    house.muster("submit", job(house, "linked", data))
    message = ends(house, "linked", "Failed")["lastFailure"]["message"]
    assert "b.txt: permission denied" in message
    assert "MUSTER_OPERATOR_WORKER_PATHS" in message, "the next step"
    assert token.read_text().strip() not in message
    (data / "b.txt").unlink()

    house.muster("submit", job(house, "after", data, model={"from": {"job": "honest"}}))
    ends(house, "after", "Succeeded")
