"""tests/conftest.py notices a process that a test leaves behind, also one whose parent is dead."""

import subprocess
import sys
from pathlib import Path

from tests.polling import eventually
from tests.processes import others

ORPHAN = """
import subprocess, sys
from pathlib import Path

def test_leaves_an_orphan():
    # The shell dies as soon as its child is up; the child lives on as somebody else's.
    here = Path(__file__).parent
    start = f"{sys.executable} -m muster.planted & echo $! > pid; until [ -e up ]; do sleep 0.02; done"
    subprocess.run(start, shell=True, check=True, cwd=here)
"""


def test_an_orphan_fails_the_module_and_is_ended(tmp_path: Path) -> None:
    conftest = Path(__file__).parents[2] / "conftest.py"
    text, grace = conftest.read_text(), "GRACE_SECONDS = 60.0\n"
    assert grace in text
    (tmp_path / "conftest.py").write_text(text.replace(grace, "GRACE_SECONDS = 1.0\n"))
    (tmp_path / "test_orphan.py").write_text(ORPHAN)
    (tmp_path / "muster").mkdir()
    (tmp_path / "muster" / "planted.py").write_text("import signal\nopen('up', 'w')\nsignal.pause()\n")

    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", tmp_path, "-p", "no:cacheprovider", tmp_path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    pid = int((tmp_path / "pid").read_text())
    assert result.returncode == 1, result.stdout
    assert "left 1 processes running" in result.stdout
    assert f"{pid}: " in result.stdout
    assert "muster.planted" in result.stdout
    eventually(lambda: pid not in {process.pid for process in others()}, "the orphan's end")
