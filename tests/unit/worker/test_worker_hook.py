"""The hook that counts a program's optimizer steps: in a real interpreter, with the smallest torch that it can meet."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import muster.trainer

HOOK = Path(muster.trainer.__file__).parents[1] / "worker" / "hook" / "sitecustomize.py"

# As much of torch's optimizers as the hook touches; the real ones are met below.
OPTIMIZER = """
hooks = []
def register_optimizer_step_post_hook(hook): hooks.append(hook)
class Optimizer:
    def step(self):
        for hook in hooks: hook(self, (), {})
"""
STEPS = "from torch.optim.optimizer import Optimizer; o = Optimizer(); [o.step() for _ in range(7)]"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder of modules, as an image would have them."""
    (tmp_path / "image" / "torch" / "optim").mkdir(parents=True)
    (tmp_path / "image" / "torch" / "__init__.py").write_text("")
    (tmp_path / "image" / "torch" / "optim" / "__init__.py").write_text("from . import optimizer")
    (tmp_path / "image" / "torch" / "optim" / "optimizer.py").write_text(OPTIMIZER)
    return tmp_path / "image"


def run(image: Path, program: str, **variables: str) -> tuple[int, str]:
    """Run a program as a rank; its exit code, and what it wrote."""
    environ = {
        "PYTHONPATH": f"{HOOK.parent}{os.pathsep}{image}",
        "MUSTER_WORKER_DIR": str(image.parent),
        "RANK": "3",
    }
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    return found.returncode, found.stdout


def progress(image: Path, rank: int = 3) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((image.parent / f"rank-{rank}.progress.json").read_text())
    return found


def test_steps_are_counted_from_where_the_attempt_resumes(image: Path) -> None:
    assert run(image, STEPS, MUSTER_RESUME_STEP="100") == (0, "")
    found = progress(image)
    assert (found["step"], found["source"]) == (107, "optimizer")
    assert found["progressedAt"] <= found["at"]
    assert [path.name for path in image.parent.iterdir() if path.is_file()] == ["rank-3.progress.json"]


def test_a_gan_has_the_steps_of_its_first_optimizer(image: Path) -> None:
    program = (
        "from torch.optim.optimizer import Optimizer as O; a, b = O(), O(); [(a.step(), b.step()) for _ in range(4)]"
    )
    assert run(image, program) == (0, "")
    assert progress(image)["step"] == 4


def test_a_second_phase_goes_on_where_the_first_ended(image: Path) -> None:
    program = "from torch.optim.optimizer import Optimizer as O; a = O(); a.step(); del a; b = O(); b.step()"
    assert run(image, program) == (0, "")
    assert progress(image)["step"] == 2


def test_the_images_own_module_runs_in_its_place(image: Path) -> None:
    (image / "sitecustomize.py").write_text("import builtins; builtins.own = __file__")
    program = f"import sitecustomize; assert sitecustomize.__file__ == own; print(own); {STEPS}"
    assert run(image, program) == (0, f"{image / 'sitecustomize.py'}\n")
    assert progress(image)["step"] == 7


def test_an_image_whose_own_module_fails_says_so_and_runs_all_the_same(image: Path) -> None:
    (image / "sitecustomize.py").write_text("raise ValueError('own fault')")
    code, words = run(image, STEPS)
    assert code == 0
    assert "own fault" in words
    assert progress(image)["step"] == 7


def test_it_is_silent_where_there_is_no_torch_no_rank_or_no_such_hook(image: Path) -> None:
    assert run(image, "print('done')") == (0, "done\n")
    assert run(image, STEPS, RANK="x") == (0, "")
    (image / "torch" / "optim" / "optimizer.py").write_text("class Optimizer:\n    def step(self): pass")
    assert run(image, STEPS) == (0, "")
    assert not list(image.parent.glob("rank-*"))


@pytest.mark.parametrize("kind", ["file", "missing"])
def test_a_folder_that_can_not_be_written_costs_the_program_nothing(image: Path, kind: str) -> None:
    folder = image / "torch" / "__init__.py" if kind == "file" else image / "missing"
    assert run(image, STEPS, MUSTER_WORKER_DIR=str(folder)) == (0, "")


def test_what_torch_raises_reaches_the_program(image: Path) -> None:
    (image / "torch" / "optim" / "optimizer.py").write_text("raise RuntimeError('broken torch')")
    code, words = run(image, STEPS)
    assert code == 1
    assert words.strip().endswith("RuntimeError: broken torch")


def test_the_process_that_came_first_reports_for_the_rank(image: Path) -> None:
    """A program's own workers have its environment. Its later life replaces the report of the one before."""
    assert run(image, STEPS) == (0, "")
    child = STEPS.replace("7", "2")
    program = f"{STEPS}; import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    assert run(image, program.replace("7", "5")) == (0, "")
    assert progress(image)["step"] == 5


def test_when_the_process_that_came_first_is_gone_the_next_one_reports(image: Path) -> None:
    """A trial of some steps in a process of its own, and then the training."""
    path = image.parent / "rank-3.progress.json"
    trial = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        path.write_text(json.dumps({"pid": trial.pid, "step": 2, "source": "optimizer"}))
        program = f"{STEPS}; c = sys.modules['_muster_hook']; c.finish(); print(json.load(open({str(path)!r}))['step'])"
        program = f"import json, os, sys, time; {program}; os.kill({trial.pid}, 9)\n"
        program += f"while json.load(open({str(path)!r}))['step'] < 7: time.sleep(0.01)"
        reaper = threading.Thread(target=trial.wait)
        reaper.start()
        assert run(image, program) == (0, "2\n")
        reaper.join()
    finally:
        trial.kill()
    assert progress(image)["step"] == 7


def test_a_report_that_fails_is_tried_again(hook: Any, tmp_path: Path) -> None:
    """The disk is full for a moment: that its steps are not counted any more would look like a hang."""
    folder = tmp_path / "folder"
    counter = hook.StepCounter(str(folder / "rank-0.progress.json"), 0)
    counter.stepped(counter, (), {})
    counter.finish()
    folder.mkdir()
    counter.finish()
    counter.silence()  # its thread ends with it
    assert json.loads((folder / "rank-0.progress.json").read_text())["step"] == 1


def test_a_forked_child_is_not_taken_for_its_parent(image: Path) -> None:
    program = f"import os; {STEPS}; os.fork() or o.step() or os._exit(0); os.wait()"
    assert run(image, program) == (0, "")
    assert progress(image)["step"] == 7


def test_muster_run_silences_it(image: Path) -> None:
    assert run(image, f"import sys; sys.modules['_muster_hook'].silence(); {STEPS}") == (0, "")
    assert not list(image.parent.glob("rank-*"))


@pytest.fixture
def hook() -> Any:
    spec = importlib.util.spec_from_file_location("hook_of_this_test", HOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_last_of_quick_steps_is_reported_while_the_next_is_awaited(image: Path) -> None:
    """Within a second, and not only when the process ends."""
    path = str(image.parent / "rank-3.progress.json")
    awaited = f"import json, time\nwhile json.load(open({path!r}))['step'] < 7: time.sleep(0.01)"
    program = f"{STEPS}\nimport time, os\nwhile not os.path.exists({path!r}): time.sleep(0.01)\n{awaited}\nos._exit(0)"
    assert run(image, program) == (0, "")


def test_real_optimizers_are_counted(hook: Any, tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import _init_optim_state
    from torch.optim.optimizer import register_optimizer_step_post_hook

    path = tmp_path / "rank-0.progress.json"
    counter = hook.StepCounter(str(path), 0)
    handle = register_optimizer_step_post_hook(counter.stepped)
    try:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([weight])
        _init_optim_state(optimizer)  # as torch.distributed.checkpoint does before it loads: no step of the program's
        weight.grad = torch.ones(2)
        for _ in range(25):
            optimizer.step()
    finally:
        handle.remove()
    counter.finish()
    counter.silence()  # its thread ends with it
    assert json.loads(path.read_text())["step"] == 25
