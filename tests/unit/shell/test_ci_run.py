""".ci/run fails when any step fails, runs the others all the same, and repeats pytest's closing line."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CLOSING_LINE = "===== 12 passed, 1 skipped in 3.45s ====="

STEPS = ["test", "test-long", "lint", "types", "generated"]

FAKE_MAKE = f"""#!/bin/sh
echo "$1" >> steps
[ "$1" = test ] && echo "{CLOSING_LINE}"
case " $FAILING " in *" $1 "*) exit 2;; esac
exit 0
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose `make` only notes what it was asked for."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(FAKE_MAKE)
    make.chmod(0o755)
    return tmp_path


def run(checkout: Path, failing: str = "") -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{checkout}/bin:{os.environ['PATH']}",
        "FAILING": failing,
        "KUBEBUILDER_ASSETS": f"{checkout}/assets",
    }
    return subprocess.run(
        [checkout / ".ci" / "run"], cwd="/", env=environment, capture_output=True, text=True, check=False
    )


def test_all_steps_run_and_the_closing_line_comes_again(checkout: Path) -> None:
    result = run(checkout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (checkout / "steps").read_text().split() == STEPS
    assert result.stdout.splitlines()[-2:] == [CLOSING_LINE, "All steps passed."]
    assert f"cluster-tests: not run, for no control plane is in {checkout}/assets" in result.stdout


def test_a_control_plane_that_is_there_is_tested_on(checkout: Path) -> None:
    (checkout / "assets").mkdir()
    for name in ("etcd", "kube-apiserver"):
        shutil.copy(checkout / "bin" / "make", checkout / "assets" / name)
    assert run(checkout).returncode == 0
    assert (checkout / "steps").read_text().split() == [*STEPS, "test-cluster"]
    assert run(checkout, "test-cluster").stdout.splitlines()[-1] == "FAILED: cluster-tests"


@pytest.mark.parametrize("failing", ["test", "test-long", "lint", "types", "generated", "test types"])
def test_any_failing_step_fails_the_run_after_all_steps(checkout: Path, failing: str) -> None:
    result = run(checkout, failing)
    assert result.returncode == 1
    assert (checkout / "steps").read_text().split() == STEPS
    names = " ".join({"test": "tests", "test-long": "long-tests"}.get(step, step) for step in failing.split())
    assert result.stdout.splitlines()[-2:] == [CLOSING_LINE, f"FAILED: {names}"]
