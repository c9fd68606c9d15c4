"""The examples of docs/programs.md, with and without muster.run: stopped and resumed they end with the same weights."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ports import free_port
from tests.unit.programs.gang_of_keepers import Bench, surroundings

import muster.run
from muster.storage.small_files import write_whole
from muster.trainer.programs import WorkerOrders
from muster.trainer.programs.prepare import prepare
from muster.words.names import STOP, Env

EXAMPLES = Path(__file__).parents[3] / "examples" / "programs"
SOURCES = Path(muster.run.__file__).parents[1]  # `import muster.run` as an image has it that knows no other Muster


def started(script: str, ranks: int, folder: Path, **environment: str) -> list[subprocess.Popen[str]]:
    """The ranks of a program, as the launcher starts them."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / script)],
            cwd=folder,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")},
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", **environment,
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def weights(ranks: list[subprocess.Popen[str]]) -> str:
    """Wait for the ranks, and return what the first says of its weights."""
    said = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), said
    found = re.search(r"weights ([0-9a-f]{16})", said[0])
    assert found is not None, said
    return found[1]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "changed", "ranks", "steps"),
    [
        ("plain", "plain_with_muster", 2, 30),
        ("plain", "plain_with_save", 2, 30),
        ("trainer", "trainer_with_muster", 1, 12),
    ],
)
def test_stopped_and_resumed_it_ends_with_the_same_weights(
    tmp_path: Path, name: str, changed: str, ranks: int, steps: int
) -> None:
    (tmp_path / "whole").mkdir()
    whole = started(f"{name}.py", ranks, tmp_path / "whole", STEPS=str(steps))
    first = Bench(tmp_path, ranks=ranks)
    write_whole(first.around.worker_dir / STOP, "{}")  # it is asked to stop before its first step is over
    asked = environment(first.around) | {"STEPS": str(steps)}
    stopped = started(f"{changed}.py", ranks, first.around.worker_dir, **asked)
    weights(stopped)
    first.ended(*(rank.returncode for rank in stopped))
    assert first.keeper.run() == 0
    assert first.steps() == (1,)
    around = surroundings(tmp_path, ranks=ranks, attempt="2", resume_step="1")
    prepared = prepare(around, lambda words: None)
    more = {Env.RESUME_DIR: str(prepared["resumeDir"]), Env.RESUME_STEP: "1", "STEPS": str(steps)}
    resumed = started(f"{changed}.py", ranks, around.worker_dir, **environment(around), **more)
    assert weights(resumed) == weights(whole)


def environment(around: WorkerOrders) -> dict[str, str]:
    return {
        "PYTHONPATH": str(SOURCES),
        Env.WORKER_DIR: str(around.worker_dir),
        Env.CHECKPOINT_DIR: str(around.watched),
        Env.STOP_FILE: str(around.worker_dir / STOP),
    }
