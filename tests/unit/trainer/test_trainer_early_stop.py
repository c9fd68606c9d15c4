"""A worker that is asked to stop before its ranks have begun ends at once, whatever it is doing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.polling import WAIT_SECONDS_MAX

from muster.trainer.launch.worker import first_failure
from muster.words.base import dump_json
from muster.words.names import EXIT_RECORD, RANK_FAILURE, Env, ExitCode
from muster.words.signals import RankFailure, WorkerExit
from muster.worker import early_stop
from muster.worker.ranks import ProcessEnd

WAIT = "print('here', flush=True)\nimport threading\nthreading.Event().wait()\n"
TRAINING = {
    "model": {"preset": "muster-1m"},
    "data": {"train": [{"source": "/data/*.txt"}], "sequenceLength": 32},
    "batch": {"tokensPerStep": 512},
    "length": {"steps": 10},
}


def stopped(folder: Path, module: str, stubs: dict[str, str]) -> tuple[int, WorkerExit, WorkerExit]:
    """Stop the module where a stub of a library says that it has come to; its code, exit record and last message."""
    for name, text in stubs.items():
        path = folder / "stubs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    paths = [str(folder / "stubs"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "PYTHONPATH": os.pathsep.join(paths),
        Env.WORKER_DIR: str(folder),
        Env.TERMINATION_LOG: str(folder / "message"),
        Env.CONFIG: json.dumps({"training": TRAINING, "checkpoint": {}}),
        Env.CHECKPOINT_URI: f"file://{folder}/checkpoints",
        Env.JOB_UID: "uid",
        Env.CACHE_DIR: str(folder / "cache"),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n", process.communicate()[1]
    process.terminate()
    process.communicate(timeout=3 * WAIT_SECONDS_MAX)
    record, message = ((folder / name).read_text() for name in (EXIT_RECORD, "message"))
    return process.returncode, WorkerExit.model_validate_json(record), WorkerExit.model_validate_json(message)


@pytest.mark.parametrize(
    ("module", "stubs"),
    [
        ("muster.trainer.launch", {"pydantic/__init__.py": WAIT}),
        ("muster.trainer.launch.preflight", {"pydantic/__init__.py": WAIT}),
    ],
    ids=["launcher imports", "preflight imports"],
)
def test_a_worker_whose_ranks_have_not_begun_ends_when_asked(
    tmp_path: Path, module: str, stubs: dict[str, str]
) -> None:
    code, record, message = stopped(tmp_path, module, stubs)
    assert code == ExitCode.PREEMPTED_NO_COMMIT
    assert (record.exit_code, record.message) == (code, "asked to stop before the ranks were started")
    assert message == record


def test_a_rank_that_has_not_met_the_others_ends_when_asked(tmp_path: Path) -> None:
    code, record, message = stopped(tmp_path, "muster.trainer.launch", {"torch/__init__.py": WAIT})
    assert code == ExitCode.PREEMPTED_NO_COMMIT
    assert (record.exit_code, record.rank) == (code, 0)
    assert record.message == "asked to stop in phase init, before any new step"
    assert message.message == record.message


def test_the_names_are_those_of_the_contract() -> None:
    """It can't import them."""
    assert early_stop.PREEMPTED_NO_COMMIT == ExitCode.PREEMPTED_NO_COMMIT
    assert (early_stop.WORKER_DIR, early_stop.TERMINATION_LOG) == (Env.WORKER_DIR, Env.TERMINATION_LOG)
    assert early_stop.EXIT_RECORD == EXIT_RECORD


def test_a_launcher_whose_disks_are_full_ends_with_its_true_code(tmp_path: Path) -> None:
    """Neither its log nor the exit record can be written."""
    (tmp_path / EXIT_RECORD).mkdir()
    environ = {
        Env.WORKER_DIR: str(tmp_path),
        Env.TERMINATION_LOG: str(tmp_path / "message"),
        Env.CONFIG: json.dumps({"training": {**TRAINING, "seed": "seventeen"}, "checkpoint": {}}),
    }
    with open("/dev/full", "w") as full:
        code = subprocess.call(
            [sys.executable, "-m", "muster.trainer.launch"], env={**os.environ, **environ}, stdout=full, stderr=full
        )
    assert code == ExitCode.USER_ERROR
    end = WorkerExit.model_validate_json((tmp_path / "message").read_text())
    assert end.exit_code == code
    assert "training.seed: must be a whole number" in end.message


def test_the_first_failure_is_reported_with_what_the_rank_said_of_it(tmp_path: Path) -> None:
    others = "; the other ranks here are asked to stop, and have 15 s"
    killed = ProcessEnd(1, -signal.SIGKILL, 7.0)
    assert first_failure(tmp_path, killed, 5.0) == f"rank 1 was killed by SIGKILL{others}"
    failure = RankFailure(rank=1, exit_code=82, at=6.0, step=3, message="the loss at step 4 is nan")
    (tmp_path / RANK_FAILURE.format(rank=1)).write_text(dump_json(failure))
    said = "rank 1 ended with exit code 82: the loss at step 4 is nan"
    assert first_failure(tmp_path, ProcessEnd(1, 82, 7.0), 5.0) == said + others
