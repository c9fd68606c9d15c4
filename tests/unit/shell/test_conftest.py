"""The tests' own settings: those of the machine never reach a test, and the longest files are dealt out first."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.tidy.repository import ROOT


def test_only_settings_for_the_tests_reach_a_test() -> None:
    program = "import os, tests.conftest; print(os.environ.get('MUSTERTESTS_CRDS'), os.environ.get('MUSTER_API_TOKEN'))"
    environment = os.environ | {"MUSTERTESTS_CRDS": "/schemas", "MUSTER_API_TOKEN": "secret"}
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["/schemas", "None"]


SUITE = """
import time
import pytest

@pytest.mark.parametrize("number", range(3))
def test_quick(number):
    assert number < 3

@pytest.mark.long
def test_long():
    time.sleep({seconds})  # not a wait: what takes long
"""


def house(root: Path) -> Path:
    """A folder of tests with nothing but our settings."""
    shutil.copy(ROOT / "pyproject.toml", root)
    tests = root / "tests"
    tests.mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    return tests


def test_the_longest_files_come_first_and_a_run_writes_down_what_each_took(tmp_path: Path) -> None:
    tests = house(tmp_path)
    recorded = {
        "quick": {"tests/test_a.py": 2, "tests/test_b.py": 9, "tests/test_gone.py": 7},
        "long": {"tests/test_a.py": 60},
    }
    (tests / "durations.json").write_text(json.dumps(recorded))
    for name, seconds in (("a", 0), ("b", 0), ("new", 1.0)):
        (tests / f"test_{name}.py").write_text(SUITE.format(seconds=seconds))

    def order(*words: str) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "1",
            "--dist",
            "loadfile",
            "--no-loadscope-reorder",
            "-v",
            *words,
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        files = [line.split("::")[0].split("/")[-1] for line in done.stdout.splitlines() if "PASSED" in line]
        return list(dict.fromkeys(files))

    assert order("-m", "not long") == ["test_new.py", "test_b.py", "test_a.py"]
    assert order("-m", "long", "--record-durations") == ["test_new.py", "test_a.py", "test_b.py"]
    written = json.loads((tests / "durations.json").read_text())
    assert written["quick"] == {"tests/test_a.py": 2, "tests/test_b.py": 9}, "what did not run stays, unless it is gone"
    assert written["long"]["tests/test_new.py"] >= 1
    assert written["long"].get("tests/test_a.py", 0) < 60


def test_a_run_of_long_tests_imports_only_files_that_say_they_have_some(tmp_path: Path) -> None:
    tests = house(tmp_path)
    (tests / "test_long.py").write_text(SUITE.format(seconds=0))
    (tests / "test_quick.py").write_text("raise RuntimeError('imported')\n")

    def collect(marks: str, *words: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", marks, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    assert "1/4 tests collected" in collect("long")
    assert "RuntimeError: imported" in collect("long", "tests/test_quick.py"), "it is named"
    (tests / "marks.py").write_text("import pytest\nLENGTHY = getattr(pytest.mark, 'long')\n")
    words = "from tests.marks import LENGTHY\n\n@LENGTHY\ndef test_it(): ...\n"
    (tests / "test_quick.py").write_text(words)
    assert "test_quick.py::test_it is long, and no text of its file says so" in collect("not long")
