"""muster.run: one file of the standard library, harmless without Muster, and one answer for all ranks with it."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from tests.polling import eventually
from tests.unit.programs.gang_of_keepers import Bench

import muster.run
from muster.words.names import PREPARED, PROGRESS, SAVE_REQUEST, STOP, Env

FILE = Path(muster.run.__file__)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as a program imports it that nobody has started, in an empty folder."""
    for name in [name for name in os.environ if name.startswith(("MUSTER_", "LOCAL_", "RANK"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    for name, value in {"_reporters": {}, "_calls": 0, "_asked_at": None, "_stopping": False}.items():
        monkeypatch.setattr(muster.run, name, value)
    monkeypatch.setattr(muster.run, "REPORT_SECONDS", 0.0)
    return muster.run


@pytest.fixture
def bench(run: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path)
    monkeypatch.setenv(Env.WORKER_DIR, str(made.around.worker_dir))
    monkeypatch.setenv(Env.CHECKPOINT_DIR, str(made.folder))
    monkeypatch.setenv(Env.STOP_FILE, str(made.around.worker_dir / STOP))
    return made


def test_it_is_one_file_that_any_image_can_import() -> None:
    tree = ast.parse(FILE.read_text(), feature_version=(3, 9))
    imported = {
        alias.name.partition(".")[0] for node in tree.body if isinstance(node, ast.Import) for alias in node.names
    } | {str(node.module).partition(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names
    assert len(muster.run.__all__) <= 10


def test_without_muster_it_changes_nothing(run: ModuleType, tmp_path: Path) -> None:
    assert (run.resume_dir(), run.resume_step(), run.should_stop(), run.checkpoint_dir("out")) == (
        None,
        0,
        False,
        "out",
    )
    run.step(1, loss=2.0)
    with run.checkpoint(5) as folder:
        (folder / "state").write_text("x")
        assert not (tmp_path / "checkpoints" / "step-00000005").exists()
    assert (tmp_path / "checkpoints" / "step-00000005" / "state").read_text() == "x"
    with run.checkpoint(5) as folder:  # again, in its place
        (folder / "state").write_text("y")
    with pytest.raises(ZeroDivisionError), run.checkpoint(6) as folder:
        raise ZeroDivisionError
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]
    assert (tmp_path / "checkpoints" / "step-00000005" / "state").read_text() == "y"


def test_a_step_is_reported_with_its_numbers(run: ModuleType, bench: Bench) -> None:
    (bench.around.worker_dir / PREPARED).write_text(json.dumps({"resumeTokens": 100}))
    run.step(7, loss=2.5, tokens=8, steps=9, evaluation_loss=2.25, note="text", broken=float("nan"))
    found = json.loads((bench.around.worker_dir / PROGRESS.format(rank=0)).read_text())
    assert time.time() - found.pop("at") < 60
    assert time.time() - found.pop("progressedAt") < 60
    assert found == {
        "step": 7, "steps": 9, "pid": os.getpid(), "source": "run", "loss": 2.5, "tokens": 108,
        "values": {"evaluation_loss": 2.25},
    }  # fmt: skip


def test_a_checkpoint_is_published_with_its_step(run: ModuleType, bench: Bench, tmp_path: Path) -> None:
    run.step(12, loss=2.5)
    with run.checkpoint(12) as folder:
        (folder / "state").write_text("x")
        bench.settle()
        assert bench.steps() == ()
    assert (bench.around.worker_dir / SAVE_REQUEST.format(step=12)).exists()
    bench.settle()
    assert bench.loaded(12, tmp_path / "fresh") == {"state": b"x"}
    assert bench.commit(12).metrics == {"loss": 2.5}


def test_it_stops_when_the_launcher_asks(run: ModuleType, bench: Bench) -> None:
    assert run.should_stop() is False
    (bench.around.worker_dir / STOP).write_text("{}")
    assert run.should_stop() is True


RANK = """
import sys, time
sys.path.insert(0, sys.argv[1])
import run
rank = int(sys.argv[2])
for step in range(1, 10_000):
    time.sleep(0.001 * (1 + rank))      # nothing holds these ranks together, but that they wait for each other's step
    open(f"{sys.argv[3]}/{rank}-{step}", "w").close()
    while not all(__import__("os").path.exists(f"{sys.argv[3]}/{each}-{step}") for each in range(3)):
        time.sleep(0.0005)
    if run.should_stop():
        with run.checkpoint(step) as folder:
            (folder / f"rank-{rank}").write_text("x")
        break
print(step)
"""


LATE = """
import os, sys
sys.path.insert(0, sys.argv[1])
import run
print(run.should_stop(), flush=True)   # the other rank has seen by now that it should stop
sys.stdin.readline()                   # needs the other rank, as a collective does
print(run.should_stop(), run.should_stop(), flush=True)
"""


def test_a_rank_without_torch_that_saw_nothing_yet_is_not_waited_for_at_that_call(
    run: ModuleType, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOCAL_RANK", "0"), ("RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    late = subprocess.Popen(
        [sys.executable, "-c", LATE, str(FILE.parent)],
        env={**os.environ, "LOCAL_RANK": "1", "RANK": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert late.stdin is not None
    assert late.stdout is not None
    try:
        assert late.stdout.readline() == "False\n"
        (bench.around.worker_dir / STOP).write_text("{}")
        assert run.should_stop() is False  # it took part in the other's second step, so to say
        late.stdin.write("\n")
        late.stdin.close()
        assert run.should_stop() is False  # the other saw it at this call
        assert run.should_stop() is True
        assert late.stdout.read() == "False True\n"
    finally:
        late.kill()
        late.wait()
        late.stdout.close()


def test_ranks_without_torch_stop_at_one_step_and_save_together(run: ModuleType, bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(FILE.parent), str(rank), str(tmp_path / "steps")],
            env={**os.environ, "LOCAL_RANK": str(rank), "RANK": str(rank), "LOCAL_WORLD_SIZE": "3"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        eventually((tmp_path / "steps" / "2-5").exists, "the ranks to take steps")
        (bench.around.worker_dir / STOP).write_text("{}")
        said = {rank.communicate()[0].strip() for rank in ranks}
    finally:
        for rank in ranks:
            rank.kill()
    assert len(said) == 1
    step = int(said.pop())
    bench.settle()
    assert bench.loaded(step, tmp_path / "fresh") == {f"rank-{rank}": b"x" for rank in range(3)}
