"""`muster demo` as a whole, on a job small enough for a test: it keeps its promises and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.polling import eventually
from tests.processes import command_of, environment_of, others

from muster.cli.demo_checks import CHECKS

ARCHITECTURE = {"dim": 64, "layers": 2, "heads": 2, "kvHeads": 1, "ffnDim": 128, "vocabSize": 260, "maxPositions": 128}


def job(folder: Path, steps: int, **training: Any) -> Path:
    """The example with a smaller model and fewer steps, on one small package of the standard library."""
    example = yaml.safe_load((Path(__file__).parents[3] / "examples" / "pretrain-stdlib.yaml").read_text())
    source = f"{os.path.dirname(json.__file__)}/*.py"
    example["spec"]["training"] |= {
        "model": {"architecture": ARCHITECTURE},
        "data": {"train": [{"source": source}], "sequenceLength": 64},
        "batch": {"tokensPerStep": 512, "microBatch": 4},
        "optimizer": {"lr": 0.003, "schedule": {"warmupSteps": 5}},
        "length": {"steps": steps},
        "evaluation": {"every": 40, "holdout": 0.3, "samples": 4},
        **training,
    }
    example["spec"]["checkpoint"] = {"every": 5}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(example, sort_keys=False))
    return path


class Demo:
    """The demo as a process; what it leaves is found by its state folder, which every process of it names."""

    def __init__(self, folder: Path, file: Path, *words: str) -> None:
        self.state = folder.resolve() / "demo-state"
        command = [sys.executable, "-m", "muster.cli", "demo", "--job", str(file), "--state", str(self.state), *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self) -> tuple[int, str, str]:
        output, errors = self.process.communicate(timeout=300)
        return self.process.returncode, output, errors

    def left(self) -> list[str]:
        """Command lines of platform, workers and ranks that are still there."""
        mark = str(self.state)
        found = {each: " ".join(command_of(each)) for each in others() if each.pid != self.process.pid}
        return [
            command
            for each, command in found.items()
            if mark in command or mark in environment_of(each).get("MUSTER_WORKER_DIR", "")
        ]


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    """Those started here; a failing test leaves nothing either."""
    started: list[Demo] = []
    yield started
    for demo in started:
        if demo.process.poll() is None:
            demo.process.kill()
            demo.process.communicate()
        eventually(lambda demo=demo: not demo.left(), "the demo's processes to be gone")  # type: ignore[misc]


def test_the_demo_keeps_every_promise(tmp_path: Path, demos: list[Demo]) -> None:
    # The kill comes after the operator has told of a commit: there must be steps left then, also on a busy machine.
    demo = Demo(tmp_path, job(tmp_path, steps=120), "--json")
    demos.append(demo)
    code, output, errors = demo.end()
    report = json.loads(output)
    assert [(p["promise"], p["because"]) for p in report["promises"] if not p["kept"] and not p["skipped"]] == [], (
        errors
    )
    assert [promise["promise"] for promise in report["promises"]] == list(CHECKS)
    assert (code, report["kept"], report["job"]["phase"]) == (0, True, "Succeeded")
    first, second = report["attempts"]
    assert (first["cause"], first["resumeStep"]) == ("infrastructure", 0)
    assert second["resumeStep"] == report["kill"]["commit_step"] or second["resumeStep"] > 0
    assert first["lostSteps"] == report["lostSteps"] >= 0
    assert 0 < report["detectionSeconds"] < report["recoverySeconds"]
    assert sum(report["goodput"].values()) == pytest.approx(1)
    assert report["sample"].startswith("def ")
    page = Path(report["report"])
    assert all(words in page.read_text() for words in ("Attempt 2", "infrastructure", "<job-curves>", "Succeeded"))
    page.unlink()
    assert demo.left() == []
    assert not demo.state.exists(), "without --keep nothing stays on the disk"


@pytest.mark.long
def test_a_job_that_can_not_keep_the_promises_fails_the_demo(tmp_path: Path, demos: list[Demo]) -> None:
    """Too short for a commit: nobody is killed, so nothing is resumed, and the demo must say so."""
    demo = Demo(tmp_path, job(tmp_path, steps=3), "--keep")
    demos.append(demo)
    code, output, _ = demo.end()
    assert code == 1
    broken = [line.split(":")[0].split() for line in output.splitlines() if line.startswith("BROKEN")]
    assert broken == [["BROKEN", "lost", "a", "worker"], ["BROKEN", "resumed", "from", "a", "checkpoint"]]
    assert (demo.state / "logs" / "api.log").exists(), "--keep keeps"
    assert demo.left() == []


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGTERM, signal.SIGKILL))],
)
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, demos: list[Demo], number: signal.Signals) -> None:
    demo = Demo(tmp_path, job(tmp_path, steps=100_000))
    demos.append(demo)
    eventually(lambda: any("muster.trainer" in line for line in demo.left()), "workers")
    demo.process.send_signal(number)
    code, _, errors = demo.end()
    assert code == (-9 if number == signal.SIGKILL else 130), errors
    if number == signal.SIGKILL:  # then it is `muster up` that notices, and takes everything with it
        eventually(lambda: not demo.left(), "everything to end")
    assert demo.left() == []
