"""Experiment trackers: what they are told, by their own libraries, and that none of them is any matter to a run."""

from __future__ import annotations

import importlib
import json
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.polling import WAIT_SECONDS_MAX, eventually

from muster.recipe.document import parse_job
from muster.trainer.config import WorkerRun, read_run
from muster.trainer.tracking.__main__ import TimeLimits, tell
from muster.trainer.tracking.processes import FAULTS, TrackerProcesses, commands
from muster.trainer.tracking.step_log import StepLogReader
from muster.trainer.tracking.to_mlflow import MLflow
from muster.trainer.tracking.to_tensorboard import TensorBoard
from muster.trainer.tracking.tracker import scalars
from muster.words.base import InvalidDocument, dump_json
from muster.words.names import STEP_LOG, Env
from muster.words.signals import StepRecord
from muster.words.tracking import Tracking

TRAINING = {
    "model": {"preset": "muster-1m"},
    "data": {"train": [{"source": "/a"}], "sequenceLength": 64},
    "batch": {"tokensPerStep": 64},
    "length": {"steps": 10},
}


def run_in(root: Path, attempt: int = 1, **tracking: Any) -> WorkerRun:
    directory = root / f"worker-{attempt}"
    directory.mkdir(parents=True, exist_ok=True)
    environment = {
        Env.JOB: "demo",
        Env.JOB_UID: "uid-1",
        Env.ATTEMPT: str(attempt),
        Env.CHECKPOINT_URI: f"file://{root}/checkpoints/uid-1",
        Env.WORKER_DIR: str(directory),
        Env.CONFIG: json.dumps({"training": TRAINING, "tracking": tracking}),
    }
    return read_run(environment)


def record(step: int, attempt: int = 1, **changes: Any) -> StepRecord:
    numbers = {"grad_norm": 1.0, "lr": 1e-3, "tokens": 64, "tokens_per_second": 640.0, "data_wait_seconds": 0.0}
    known = {"attempt": attempt, "step": step, "steps": 10, "at": 1e9 + step, "loss": 5.0 - step / 10}
    return StepRecord.model_validate(known | numbers | {"step_seconds": 0.1, "memory_bytes": 1000} | changes)


def log(run: WorkerRun, *records: StepRecord) -> None:
    with (run.worker_dir / STEP_LOG).open("a") as file:
        file.writelines(dump_json(each) + "\n" for each in records)


class Kept:
    """A tracker that keeps what it is told, and fails as often as it is asked to."""

    def __init__(self, fails: int = 0) -> None:
        self.told: list[int] = []
        self.closed, self._fails = False, fails

    def write(self, records: Sequence[StepRecord]) -> None:
        if records and self._fails:
            self._fails -= 1
            raise ConnectionError("nobody is there")
        self.told += [each.step for each in records]

    def close(self) -> None:
        self.closed = True


def test_a_step_is_shown_by_the_names_that_people_look_for() -> None:
    found = scalars(record(3, mfu=0.4, values={"kl": 0.1}, evaluation_loss=4.0, evaluation_values={"code/loss": 3.0}))
    assert found["train/loss"] == 4.7
    assert (found["train/kl"], found["speed/mfu"], found["evaluation/code/loss"]) == (0.1, 0.4, 3.0)
    start = scalars(record(0, step_seconds=0.0, evaluation_loss=6.0))
    assert start == {"evaluation/loss": 6.0}


def test_the_log_is_read_line_by_line_while_it_grows(tmp_path: Path) -> None:
    path, reader = tmp_path / "log", StepLogReader(tmp_path / "log", 2)
    assert reader.next() == []
    lines = [dump_json(record(step, attempt)) + "\n" for step, attempt in ((1, 1), (2, 2), (3, 2))]
    path.write_text("".join(lines[:2]) + lines[2][:40])
    assert [each.step for each in reader.next()] == [2]
    assert [each.step for each in reader.next()] == [2]  # nobody took it
    reader.took()
    assert reader.next() == []
    path.write_text("".join(lines) + "{a disk that was full\n" + lines[1])
    assert [each.step for each in reader.next()] == [3, 2]


def test_a_tracker_that_fails_for_a_while_misses_nothing(tmp_path: Path) -> None:
    run, tracker, ended = run_in(tmp_path), Kept(fails=2), threading.Event()
    log(run, *map(record, range(1, 5)))
    ended.set()
    with pytest.raises(ConnectionError):  # the run is over: there is no other time
        tell(run, lambda: tracker, ended)
    ended.clear()
    teller = threading.Thread(target=tell, args=(run, lambda: tracker, ended, TimeLimits(look=0.01)))
    teller.start()
    eventually(lambda: tracker.told == [1, 2, 3, 4], "all steps")
    log(run, record(5))
    ended.set()
    teller.join(WAIT_SECONDS_MAX)
    assert (tracker.told, tracker.closed) == ([1, 2, 3, 4, 5], True)


def test_patience_ends(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    log(run, record(1))
    with pytest.raises(ConnectionError, match="nobody is there"):
        tell(run, lambda: Kept(fails=10**9), threading.Event(), TimeLimits(look=0.01, patience=0.05))


def test_tensorboard_shows_every_attempt_as_one_curve(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoard(run_in(tmp_path, tensorboard=True))
    first.write([record(step, values={"kl": step / 100}) for step in range(1, 7)])
    first.close()
    second = TensorBoard(replace(run_in(tmp_path, 2), resume_step=4))
    second.write([record(step, 2, loss=1.0) for step in range(5, 9)])
    second.close()
    folder = tmp_path / "checkpoints" / "uid-1" / "tensorboard"
    found = EventAccumulator(str(folder))
    found.Reload()
    losses = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert [step for step, _ in losses] == list(range(1, 9))
    assert [round(value, 6) for _, value in losses] == [4.9, 4.8, 4.7, 4.6, 1.0, 1.0, 1.0, 1.0]
    assert [event.step for event in found.Scalars("train/kl")] == [1, 2, 3, 4]
    assert found.Scalars("train/loss")[0].wall_time == 1e9 + 1


def test_a_large_event_file_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr("muster.trainer.tracking.to_tensorboard.PART_BYTES", 2_000)
    tracker = TensorBoard(run_in(tmp_path))
    for step in range(1, 21):
        tracker.write([record(step)])
    tracker.close()
    folder = tmp_path / "checkpoints" / "uid-1" / "tensorboard"
    assert len(list(folder.iterdir())) > 2
    found = EventAccumulator(str(folder))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == list(range(1, 21))


@pytest.mark.long
def test_mlflow_goes_on_with_the_jobs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    url = f"file://{tmp_path}/store"
    first = MLflow(run_in(tmp_path), url, "trials")
    first.write([record(step) for step in range(1, 5)])
    first.close()
    second = MLflow(run_in(tmp_path, 2), url, "trials")
    second.write([record(step, 2) for step in range(4, 11)])
    second.close()
    client = MlflowClient(tracking_uri=url)
    (run,) = client.search_runs([client.get_experiment_by_name("trials").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted({(metric.step, metric.value) for metric in history}) == [(s, 5.0 - s / 10) for s in range(1, 11)]
    assert (run.info.run_name, run.info.status) == ("demo", "FINISHED")
    assert run.data.params["batch.tokensPerStep"] == "64"


@pytest.mark.long
def test_wandb_keeps_an_offline_run_beside_the_commits(tmp_path: Path) -> None:
    """By the tracker's own process, as a job starts it."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")  # made at import: nobody can type it
    run = run_in(tmp_path, wandb={"project": "demo", "mode": "offline"})
    log(run, *(record(step, evaluation_loss=4.0) for step in range(1, 4)))
    trackers = started(run)
    trackers.finish()
    assert trackers.faults == ()
    (path,) = (tmp_path / "checkpoints" / "uid-1" / "wandb" / "attempt-1").glob("*/*.wandb")
    steps = []
    for data in leveldb_records(path.read_bytes()):
        found = messages.Record.FromString(data)
        if found.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in found.history.item}
            steps.append((items["_step"], items["train/loss"], items["evaluation/loss"]))
    assert steps == [(step, 5.0 - step / 10, 4.0) for step in range(1, 4)]


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a file of less than one block (32 KiB): each behind a checksum, its length and its kind."""
    assert len(data) < 32_768
    assert data.startswith(b":W&B")
    at = 7
    while at < len(data):
        _, size, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1  # whole
        yield data[at + 7 : at + 7 + size]
        at += 7 + size


def started(run: WorkerRun) -> TrackerProcesses:
    """The processes, with the environment that the launcher has."""
    import os

    environment = {
        Env.JOB: run.job,
        Env.JOB_UID: run.job_uid,
        Env.ATTEMPT: str(run.attempt),
        Env.CHECKPOINT_URI: run.folder,
        Env.WORKER_DIR: str(run.worker_dir),
        Env.CONFIG: json.dumps({"training": TRAINING, "tracking": run.tracking.model_dump(by_alias=True)}),
    }
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        return TrackerProcesses(run.worker_dir, commands(run), finish_seconds=60.0)
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_a_tracker_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    code = f"""
import subprocess, time
with open({str(tmp_path / "child")!r}, "w") as file:
    file.write(str(subprocess.Popen(["sleep", "600"]).pid))
time.sleep(600)
"""
    command = (sys.executable, "-c", code)
    trackers = TrackerProcesses(tmp_path, {"wandb": command}, finish_seconds=-1.5)
    child = eventually(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip(), "a child")
    began = time.monotonic()
    trackers.finish()
    assert time.monotonic() - began < 500
    assert trackers.faults == ("wandb is left out from here on: it did not end with the run, and was killed",)
    assert (tmp_path / FAULTS).read_text() == trackers.faults[0]
    eventually(lambda: not Path(f"/proc/{child}").exists(), "the end of what it started")


def test_a_tracker_that_dies_is_told_of_while_the_run_goes_on(tmp_path: Path) -> None:
    missing = TrackerProcesses(tmp_path, {"mlflow": ("/nowhere/python",)})
    assert missing.faults[0].startswith("mlflow is left out from here on: ")
    trackers = TrackerProcesses(tmp_path, {"wandb": (sys.executable, "-c", "raise SystemExit(3)")})
    eventually(lambda: (tmp_path / FAULTS).exists() and "wandb" in (tmp_path / FAULTS).read_text(), "word of it")
    assert "its process ended with code 3: it did not answer in time, or crashed" in trackers.faults[0]
    trackers.finish()
    assert len(trackers.faults) == 1


def test_only_the_first_worker_tracks_and_only_what_is_asked_for(tmp_path: Path) -> None:
    run = run_in(tmp_path, tensorboard=True, mlflow={"url": "https://mlflow.example", "experiment": "e"})
    assert list(commands(run)) == ["tensorboard", "mlflow"]
    assert commands(replace(run, worker=1)) == {}
    assert commands(run_in(tmp_path)) == {}


@pytest.mark.parametrize(
    ("tracking", "words"),
    [
        ({"mlflow": {"url": "http://169.254.169.254/x", "experiment": "e"}}, "metadata service"),
        ({"mlflow": {"url": "https://me:word@mlflow.example", "experiment": "e"}}, "pattern"),
        ({"mlflow": {"url": "file:///tmp/x", "experiment": "e"}}, "pattern"),
        ({"wandb": {"project": "a/b"}}, "pattern"),
    ],
)
def test_what_no_tracker_can_be_asked_is_refused(tracking: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Tracking.model_validate(tracking)


def test_a_tracker_without_its_token_is_refused_with_the_next_step() -> None:
    def job(**runtime: Any) -> dict[str, Any]:
        spec = {"training": TRAINING, "tracking": {"wandb": {"project": "demo"}}, "runtime": runtime}
        return {"metadata": {"name": "demo"}, "spec": spec}

    with pytest.raises(InvalidDocument, match="keep it by `muster secrets set wandb`"):
        parse_job(job())
    secret = {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "value"}}}
    assert parse_job(job(env=[secret])).spec.tracking.kinds == ("wandb",)
    assert parse_job(job(envFrom=[{"secretRef": {"name": "wandb"}}])).spec.tracking.kinds == ("wandb",)
