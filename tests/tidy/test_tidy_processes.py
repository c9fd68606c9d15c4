"""Tests read other processes by tests/processes.py: any of them may end between being listed and being read."""

import ast
from pathlib import Path

import pytest
from tests.tidy.repository import ROOT, expect_none, parse, plant, python_files

# psutil's, which raise for a process that is gone and for one that nobody has collected yet.
RAISING = {"process_iter", "cmdline", "environ"}
EXCUSED = ("tests/processes.py", "tests/conftest.py")  # the latter is copied alone, by tests of its own


def rash_readings(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{call.lineno}: {call.func.attr}() raises for a process that ends meanwhile; "
        "read it by tests.processes"
        for path in python_files(root, "tests")
        if path.relative_to(root).as_posix() not in EXCUSED
        for call in ast.walk(parse(path))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in RAISING
    ]


def test_no_test_fails_because_a_process_ended_meanwhile() -> None:
    expect_none(rash_readings(ROOT))


@pytest.mark.parametrize("body", ["process.cmdline()", "psutil.process_iter()", "psutil.Process(1).environ()"])
def test_a_rash_reading_is_found(tmp_path: Path, body: str) -> None:
    plant(tmp_path, {"tests/unit/test_rash.py": f"import os\n\nos.environ.get('HOME')\n{body}\n"})
    assert len(rash_readings(tmp_path)) == 1
