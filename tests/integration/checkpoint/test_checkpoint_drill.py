"""A drill that is ended early leaves nothing behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.polling import WAIT_SECONDS_MAX, eventually
from tests.processes import is_alive

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_drill_that_is_ended_leaves_no_process_and_no_file(tmp_path: Path, number: signal.Signals) -> None:
    drill = psutil.Popen(
        [sys.executable, "-m", "tests.drills.checkpoint.drill", "--rounds", "1", "--store", "folder"],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    seen: set[psutil.Process] = set()

    def uploads() -> bool:
        seen.update(drill.children(recursive=True))
        return len({process.pid for process in seen}) >= 4 and any(
            _name(process) == "muster-upload" for process in seen
        )

    eventually(uploads, "a nursery, two ranks and an upload process")
    drill.send_signal(number)
    assert drill.wait(WAIT_SECONDS_MAX) == 128 + number
    # Those that end with it are told so by the kernel, each at its own time.
    eventually(lambda: not any(map(is_alive, seen)), "the end of all its processes")
    assert [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")] == []  # torch's cache


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""
