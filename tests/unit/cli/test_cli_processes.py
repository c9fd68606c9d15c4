"""Which processes belong to a state folder: a mistake here would end somebody else's work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from muster.cli.processes import belongs_to, end, is_of_state, of_state

ROOT = Path("/home/ada/state")


@pytest.mark.parametrize(
    ("command", "environ", "ours"),
    [
        (["python", "-m", "muster.api", "--state", "/home/ada/state"], {}, True),
        (["python", "-m", "muster.trainer.launch"], {"MUSTER_WORKER_DIR": "/home/ada/state/jobs/x"}, True),
        (["python", "-c", "from multiprocessing.spawn …"], {"MUSTER_WORKER_DIR": "/home/ada/state/jobs/x"}, True),
        (["python", "-m", "muster.api", "--state", "/home/ada/state-2"], {}, False),
        (["python", "-m", "muster.trainer"], {"MUSTER_WORKER_DIR": "/home/ada/state-2/jobs/x"}, False),
        (["tail", "-f", "/home/ada/state/logs/api.log"], {}, False),
        (["vim", "/home/ada/state"], {}, False),
        (["timeout", "60", "muster", "demo", "--state", "/home/ada/state"], {}, False),
        ([], {}, False),
    ],
)
def test_what_belongs_to_a_folder(command: list[str], environ: dict[str, str], ours: bool) -> None:
    assert is_of_state(command, environ, ROOT) is ours


def test_a_worker_is_found_and_ended_and_we_are_not(tmp_path: Path) -> None:
    environ = {**os.environ, "MUSTER_WORKER_DIR": f"{tmp_path}/jobs/1", "MUSTER_JOB_UID": "u", "MUSTER_ATTEMPT": "2"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environ) as worker:
        found = of_state(tmp_path)
        assert [process.pid for process in found] == [worker.pid]
        assert belongs_to(worker.pid, "u", 2)
        assert not belongs_to(worker.pid, "u", 1)
        assert not belongs_to(worker.pid, "v", 2)
        end(found)
        assert worker.wait() == -9
    assert of_state(tmp_path) == []
    assert not belongs_to(worker.pid, "u", 2)
    end(found)  # again does no harm


def test_whoever_started_us_is_spared(tmp_path: Path) -> None:
    """A shell or `make` above us may name the folder, even with a word that looks like ours."""
    ask = (
        f"from pathlib import Path; from muster.cli.processes import of_state; print(of_state(Path({str(tmp_path)!r})))"
    )
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}])"
    command = [sys.executable, "-c", start, "muster.demo", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
