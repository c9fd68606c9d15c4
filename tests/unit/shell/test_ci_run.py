""".ci/run fails when any step fails, runs the others all the same, and ends with what failed and why."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.polling import WAIT_SECONDS_MAX, eventually
from tests.processes import is_alive

ROOT = Path(__file__).parents[3]
CLOSING_LINE = "===== 12 passed, 1 skipped in 3.45s ====="

STEPS = ["test", "test-long"]
CHECKS = ["lint", "types", "generated"]  # run beside the steps

FAKE_MAKE = f"""#!/bin/sh
echo "$1" >> steps
[ "$1" = test ] && [ -n "$SUITE" ] && exec {sys.executable} -m pytest -ra -p no:cacheprovider "$SUITE"
[ "$1" = test ] && echo "{CLOSING_LINE}"
[ "$1" = types ] && echo "a.py:1: error: no type"
case " $FAILING " in *" $1 "*) exit 2;; esac
exit 0
"""

SUITE = """
import sys
import pytest

@pytest.fixture
def broken():
    raise RuntimeError("no fixture")

@pytest.mark.parametrize("name", ["one", "two"])
def test_that_is_skipped(name):
    pytest.skip("no device")

@pytest.mark.skip("no cluster")
def test_that_is_skipped_too(): ...

def test_that_fails():
    for number in range(50):
        print(f"line {number}")
    assert {"phase": "Failed"} == {"phase": "Succeeded"}

def test_without_its_fixture(broken): ...

def test_that_passes(): ...
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose `make` only notes what it was asked for."""
    (tmp_path / ".ci").mkdir()
    for name in ("run", "summary.py"):
        shutil.copy(ROOT / ".ci" / name, tmp_path / ".ci" / name)
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(FAKE_MAKE)
    make.chmod(0o755)
    return tmp_path


def run(checkout: Path, failing: str = "", suite: str | Path = "") -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{checkout}/bin:{os.environ['PATH']}",
        "FAILING": failing,
        "SUITE": str(suite),
        "KUBEBUILDER_ASSETS": f"{checkout}/assets",
    }
    return subprocess.run(
        [checkout / ".ci" / "run"], cwd="/", env=environment, capture_output=True, text=True, check=False
    )


def steps_of(checkout: Path) -> tuple[list[str], list[str]]:
    """The steps and the checks that ran, each in its order."""
    made = (checkout / "steps").read_text().split()
    return [name for name in made if name not in CHECKS], [name for name in made if name in CHECKS]


def test_all_steps_run_and_the_closing_line_comes_again(checkout: Path) -> None:
    result = run(checkout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert steps_of(checkout) == (STEPS, CHECKS)
    assert result.stdout.splitlines()[-2:] == [CLOSING_LINE, "All steps passed."]
    assert f"cluster-tests: not run, for no control plane is in {checkout}/assets" in result.stdout


def test_a_control_plane_that_is_there_is_tested_on(checkout: Path) -> None:
    (checkout / "assets").mkdir()
    for name in ("etcd", "kube-apiserver"):
        shutil.copy(checkout / "bin" / "make", checkout / "assets" / name)
    assert run(checkout).returncode == 0
    assert steps_of(checkout) == ([*STEPS, "test-cluster"], CHECKS)
    assert run(checkout, "test-cluster").stdout.splitlines()[-1] == "FAILED: cluster-tests"


@pytest.mark.parametrize("failing", ["test", "test-long", "lint", "types", "generated", "test types"])
def test_any_failing_step_fails_the_run_after_all_steps(checkout: Path, failing: str) -> None:
    result = run(checkout, failing)
    assert result.returncode == 1
    assert steps_of(checkout) == (STEPS, CHECKS)
    names = " ".join({"test": "tests", "test-long": "long-tests"}.get(step, step) for step in failing.split())
    assert result.stdout.splitlines()[-2:] == [CLOSING_LINE, f"FAILED: {names}"]


def test_the_end_of_the_output_names_what_failed_and_why(checkout: Path) -> None:
    suite = checkout / "test_suite.py"
    suite.write_text(SUITE)
    result = run(checkout, "types", suite)
    assert result.returncode == 1
    steps, end = result.stdout.split("=== skipped: 3 tests\n")
    assert "SKIPPED [" not in steps
    lines = end.splitlines()
    assert lines[:2] == ["    2 no device", "    1 no cluster"]
    errors = [" ".join(line.split()) for line in lines if line.startswith("E ")]
    assert errors[0] == "E RuntimeError: no fixture"
    assert errors[1] == "E AssertionError: assert {'phase': 'Failed'} == {'phase': 'Succeeded'}"
    assert [line for line in lines if line.startswith("=== ")] == [
        "=== tests: ERROR at setup of test_without_its_fixture",
        "=== tests: test_that_fails",
        "=== types failed; its last lines:",
    ]
    assert [line for line in lines if line.startswith("line ")] == [f"line {number}" for number in range(38, 50)]
    assert "a.py:1: error: no type" in lines
    failed = [line.split(" - ")[0].split("::")[-1] for line in lines if line.startswith(("FAILED test", "ERROR test"))]
    assert failed == ["test_without_its_fixture", "test_that_fails"]
    assert "1 failed, 1 passed, 3 skipped, 1 error in" in lines[-2]
    assert lines[-1] == "FAILED: tests types"


def test_a_worker_that_crashed_and_many_failures_fit_into_the_end(tmp_path: Path) -> None:
    crash = ["___ tests/test_x.py::test_a ___", "[gw0] linux", "worker 'gw0' crashed while running 'test_a'"]
    many = [line for number in range(30) for line in (f"___ test_{number} ___", f"E   AssertionError: {'x' * 1_000}")]
    words = ["=== FAILURES ===", *crash, *many, "=== short test summary info ===", "FAILED test_29 - x"]
    (tmp_path / "tests").write_text("\n".join(words))
    command = [sys.executable, ROOT / ".ci" / "summary.py", tmp_path, "tests"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[:3] == ["=== tests: tests/test_x.py::test_a", *crash[1:]]
    assert lines[4] == f"E   AssertionError: {'x' * 380} ... (620 characters more)"
    assert lines[-2:] == ["=== tests: 6 more failures are named below", "FAILED test_29 - x"]


def test_what_a_check_writes_is_shown_once_and_its_processes_end_with_the_run(checkout: Path) -> None:
    """The checks run out of sight; a run that is ended leaves none of them behind."""
    assert run(checkout, "types").stdout.count("a.py:1: error: no type") == 2, "its output, and the summary at the end"
    make = checkout / "bin" / "make"
    make.write_text('#!/bin/sh\nmkdir -p lives\necho $$ > lives/$1\n[ "$1" = test ] && exit 0\nexec sleep 600\n')
    environment = {"PATH": f"{checkout}/bin:{os.environ['PATH']}"}
    command = subprocess.Popen([checkout / ".ci" / "run"], env=environment, stdout=subprocess.DEVNULL)
    lives = {name: checkout / "lives" / name for name in ("lint", "test-long")}
    eventually(lambda: all(path.exists() and path.read_text() for path in lives.values()), "both to run")
    check, step = (psutil.Process(int(path.read_text())) for path in lives.values())
    assert check.nice() == 19
    command.send_signal(signal.SIGTERM)
    step.terminate()  # bash hears the signal when what it waits for is over
    command.wait(WAIT_SECONDS_MAX)
    eventually(lambda: not is_alive(check), "the check to end")
