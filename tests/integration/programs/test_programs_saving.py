"""`run.save` and `run.load`: Muster's own checkpoints in a program's own loop."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.integration.programs.loop import run_loops
from tests.unit.programs.gang_of_keepers import Bench
from torch import nn

import muster.run as run
from muster.storage.commits import refuse_program
from muster.storage.file_store import FileStore
from muster.trainer.checkpoint import DamagedCommit
from muster.trainer.checkpoint.commits import commit_in
from muster.trainer.programs.loop_saver import load as load_folder
from muster.words.base import UserError
from muster.words.names import Env

STEPS = 16


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*"))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shard", ["ddp", "fsdp"])
def test_killed_in_a_save_and_between_two_it_ends_as_one_run(tmp_path: Path, shard: str) -> None:
    whole = {"world": 2, "shard": shard, "steps": STEPS, "every": 100}
    folders = [tmp_path / f"run-{number}" for number in range(6)]

    def of(run: int, step: int) -> str:
        return str(folders[run] / "checkpoints" / f"step-{step:08d}")

    said = run_loops(
        tmp_path,
        whole,
        whole | {"every": 10, "kill": 10},  # its checkpoint is on its way
        whole | {"kill": 13, "resume": of(1, 10)},  # step 13 is in memory alone
        whole | {"resume": of(2, 13)},
        whole | {"world": 1, "resume": of(3, STEPS), "resave": True},  # other sizes of the gang: no step is taken
        whole | {"resume": of(4, STEPS)},
    )
    assert [newest(folder).name for folder in folders[:5]] == [f"step-{step:08d}" for step in (16, 10, 13, 16, 16)]
    assert [one["begun"] for one in said if one] == [0, 13, 16, 16]
    assert [one["samples"] for one in said if one] == [4 * STEPS] * 4
    assert len({one["digest"] for one in said if one}) == 1
    assert {tuple(one["rates"]) for one in said if one} == {(0.001 / 32, 0.02 / 32)}


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    for name in [name for name in os.environ if name.startswith(("MUSTER_", "LOCAL_", "RANK"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(run, "_savers", [])
    monkeypatch.setattr(run, "_steps", None)
    monkeypatch.setattr(run, "_stopping", False)
    made = Bench(tmp_path)
    monkeypatch.setenv(Env.WORKER_DIR, str(made.around.worker_dir))
    monkeypatch.setenv(Env.CHECKPOINT_DIR, str(made.folder))
    return made


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2).requires_grad_(False))
    return model, torch.optim.AdamW(model[0].parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3)).sum().backward()
    optimizer.step()


def test_what_is_saved_is_published_as_a_folder_that_loads(bench: Bench, tmp_path: Path) -> None:
    model, optimizer = build()
    bench.write("step-00000000/state.pt")  # the program's own
    bare = {"epoch": 3, "order": torch.arange(4)}
    for step in range(1, 7):
        train(model, optimizer)
        run.save(step, model, optimizer, every=2, data=bare)
        run._savers[0]._saver._wait(float("inf"))
    draws = torch.rand(3)
    run._savers[0].finish()
    on_node = sorted(path.name for path in bench.folder.glob("[!.]*"))
    assert on_node == ["step-00000000", "step-00000004", "step-00000006"]
    bench.settle()
    assert bench.steps()[-1] == 6
    assert bench.commit(6).kind == "folder"
    fresh = tmp_path / "fresh"
    bench.loaded(6, fresh)
    inner = commit_in(FileStore(fresh), 6)
    assert (inner.kind, inner.trainer, inner.version, inner.step) == ("tensors", "program", 2, 6)
    assert (
        not {"config", "architecture", "cursor", "tokenizer"}
        & json.loads((fresh / "commits" / "step-00000006.json").read_text()).keys()
    )
    with pytest.raises(UserError, match="holds the tensors of a program"):
        refuse_program(inner, "file:///x")
    other, its_optimizer = build()
    held: dict[str, object] = {}
    assert run.load(other, its_optimizer, folder=fresh, data=held) == 6
    assert torch.equal(torch.rand(3), draws)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert held["epoch"] == 3
    with pytest.raises(UserError, match="saved with data, and is loaded with nothing beside model and optimizer"):
        load_folder(str(fresh), other, its_optimizer, {})
    shard = next(fresh.glob("step-00000006/*/shard-*"))
    shard.write_bytes(shard.read_bytes()[:-8] + b"damaged!")
    with pytest.raises(DamagedCommit):
        load_folder(str(fresh), other, its_optimizer, {"data": held})


def test_what_can_not_be_read_back_is_refused_at_the_first_save(bench: Bench) -> None:
    model, optimizer = build()
    train(model, optimizer)
    with pytest.raises(UserError, match="tensors, and lists and dicts of them"):
        run.save(1, model, optimizer, data={"file": Path("x")})
    with pytest.raises(UserError, match="epoch is a int; give a dict, or what has state_dict"):
        run.save(1, model, optimizer, epoch=3)
    run._savers[0].finish()
    (bench.folder / "own").mkdir()
    with pytest.raises(UserError, match=r"holds no checkpoint of run\.save"):
        run.load(model, optimizer, folder=bench.folder / "own")
    assert run.load(model, optimizer) == 0


def test_without_the_engine_it_is_said_in_a_sentence(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "muster.trainer.programs.loop_saver", None)
    with pytest.raises(RuntimeError, match=r"pip install 'muster-train\[trainer\]'; run\.checkpoint needs this file"):
        run.load(None, None, folder="x")


STOPPED = """
import os, signal, sys
from muster import run
print(run.should_stop(), flush=True)
sys.stdin.readline()
print(run.should_stop(), flush=True)
sys.stdin.readline()
"""


def test_a_program_that_asks_outlives_the_signal_of_a_wish_to_stop_and_no_other(tmp_path: Path) -> None:
    stop = tmp_path / "stop.json"
    program = subprocess.Popen(
        [sys.executable, "-c", STOPPED],
        env={**os.environ, "MUSTER_STOP_FILE": str(stop)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    assert program.stdout.readline() == "False\n"
    stop.write_text("{}")
    program.send_signal(signal.SIGTERM)
    program.stdin.write("\n")
    program.stdin.flush()
    assert program.stdout.readline() == "True\n"
    stop.unlink()
    program.send_signal(signal.SIGTERM)
    assert program.wait() == -signal.SIGTERM
