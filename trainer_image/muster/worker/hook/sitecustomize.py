"""Counts the optimizer steps of a program that knows nothing of Muster.

Python imports a module of this name at its start, before the program, wherever PYTHONPATH names this folder. It waits
for the program to import torch's optimizers, registers torch's own hook for finished steps, and reports their number in
`rank-N.progress.json` of MUSTER_WORKER_DIR, at most once a second, and at the end. Then the `sitecustomize` that the
image has itself, which this one hides, is run in its place. A program without torch pays for one comparison of names at
each import.

Standard library only, Python 3.9 or newer: it runs in any image. It never raises into the program: what it can't do is
left out, and the launcher then says that nothing is known of the program's steps.

The first optimizer that finishes a step is the one whose steps count: a program with two of them (a GAN) would else be
twice as fast as it is. Where several processes of one rank step (a program that starts its own), the one that came
first reports, and when it is gone, the next one. `muster.run` reports more than this can; it silences it by
`sys.modules["_muster_hook"].silence()`. Nothing else does for good: a counter that fell silent after its first report
would look like a program that hangs. A report that fails (a full disk) is tried again a second later.
"""

from __future__ import annotations

import _thread
import atexit
import importlib.machinery
import importlib.util
import os
import sys
import time
import weakref

TYPE_CHECKING = False  # of the typing module, which every Python of the image would pay for at its start
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.machinery import ModuleSpec
    from typing import Any

OPTIMIZERS = "torch.optim.optimizer"
# Ten reports a second would tell nobody more, for the launcher reads once a second; one in ten seconds would show a
# short program's progress when it is over. A thread writes them, not the step itself: so a step waits for no disk, and
# the last of many quick steps is reported, too, though the next one may take an hour to come.
REPORT_SECONDS = 1.0


class StepCounter:
    """Counter of a rank's steps, which it reports."""

    def __init__(self, path: str, resume_step: int) -> None:
        self._path, self._resume_step, self._silent = path, resume_step, False
        self._writing = _thread.allocate_lock()
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._steps = self._reported = 0
        self._stepped_at = 0.0
        self._is_reporting = False
        self._optimizer: Callable[[], object] | None = None

    def stepped(self, optimizer: object, args: object, kwargs: object) -> None:
        """Note a finished step. torch calls it with the optimizer and its step's arguments."""
        if self._silent:
            return
        try:
            if self._steps == 0 and _makes_state():
                return
            counted = self._optimizer() if self._optimizer is not None else None
            if counted is None:
                self._optimizer = weakref.ref(optimizer)
            elif counted is not optimizer:
                return
            self._steps += 1
            self._stepped_at = time.time()
            if not self._is_reporting:
                self._is_reporting = True
                _thread.start_new_thread(self._report_again_and_again, (self._pid,))
        except Exception:  # no thread could be started: the next step tries again
            self._is_reporting = False

    # Read by torch.compile: to trace this function would break the program's graph.
    stepped._torchdynamo_disable = True  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Report the steps since the last report, if there are any."""
        try:
            with self._writing:
                if not self._silent and self._steps > self._reported and self._pid == os.getpid():
                    self._report()
        except Exception:  # a full disk: the next second tries again
            return

    def _report_again_and_again(self, pid: int) -> None:
        while not self._silent and self._pid == pid:
            self.finish()
            time.sleep(REPORT_SECONDS)

    def before_fork(self) -> None:
        """Wait for a report that is being written: its child would find the file half open."""
        self._writing.acquire()

    def after_fork(self) -> None:
        """Go on in the parent."""
        self._writing.release()

    def silence(self) -> None:
        """Report no more: somebody who knows more of this program reports now."""
        self._silent = True

    def forked(self) -> None:
        """Begin anew in a child process, which may or may not take steps of its own."""
        self._writing.release()
        self._begin()

    def _report(self) -> None:
        import json  # not before it is needed: most processes of an image never train

        if not self._reported and self._is_anothers():
            return
        progress = {
            "pid": self._pid,
            "step": self._resume_step + self._steps,
            "at": time.time(),
            "progressedAt": self._stepped_at,
            "source": "optimizer",
        }
        new = f"{self._path}.{self._pid}.new"
        with open(new, "w") as file:
            json.dump(progress, file)
        os.replace(new, self._path)
        self._reported = self._steps

    def _is_anothers(self) -> bool:
        """Return whether another living process reports for this rank, or `muster.run` in this one. The report of an
        earlier process that is gone may lie there, too."""
        import json

        try:
            with open(self._path) as file:
                report = json.load(file)
            if int(report["pid"]) == self._pid:
                return bool(report.get("source") != "optimizer")
            os.kill(int(report["pid"]), 0)
        except PermissionError:  # it lives, as another user
            return True
        except Exception:  # there is none, or it is gone
            return False
        return True


def _makes_state() -> bool:
    """Return whether torch.distributed.checkpoint takes this step, with gradients of zero, to make the state of a new
    optimizer into which it then loads. It trains nothing, and would leave a resumed program one step ahead."""
    frame = sys._getframe(1)
    for _ in range(8):  # torch's own wrappers and a scheduler's lie between
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name == "_init_optim_state":
            return True
    return False


class OptimizerFinder:
    """Finder of modules that waits for torch's optimizers, and finds nothing itself."""

    def __init__(self, counter: StepCounter) -> None:
        self._counter = counter

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != OPTIMIZERS:
            return None
        try:
            sys.meta_path.remove(self)
            for finder in sys.meta_path:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._register_after(spec.loader)
                    return spec
        except Exception:  # torch is then imported without us
            self._counter.silence()
        return None

    def _register_after(self, loader: Any) -> None:
        execute, counter = loader.exec_module, self._counter

        def execute_and_register(module: Any) -> None:
            execute(module)
            try:
                module.register_optimizer_step_post_hook(counter.stepped)
            except Exception:  # torch has this hook since 2.1
                counter.silence()

        loader.exec_module = execute_and_register


def install(environ: Mapping[str, str]) -> None:
    """Count the steps of this process, if it belongs to a rank of a program's."""
    directory, rank = environ.get("MUSTER_WORKER_DIR"), environ.get("RANK") or environ.get("MUSTER_WORKER")
    resumed = environ.get("MUSTER_RESUME_STEP") or "0"
    if not directory or not rank or not rank.isdigit() or OPTIMIZERS in sys.modules:
        return
    path = os.path.join(directory, f"rank-{rank}.progress.json")
    counter = StepCounter(path, int(resumed) if resumed.isdigit() else 0)
    sys.modules["_muster_hook"] = counter  # type: ignore[assignment]
    sys.meta_path.insert(0, OptimizerFinder(counter))
    atexit.register(counter.finish)
    os.register_at_fork(before=counter.before_fork, after_in_parent=counter.after_fork, after_in_child=counter.forked)


def run_hidden() -> None:
    """Run the `sitecustomize` that Python would have found without this one. What it raises is its own: Python says
    so, as it does without Muster."""
    here = os.path.dirname(os.path.realpath(__file__))
    others = [folder for folder in sys.path if os.path.realpath(folder or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    try:
        install(os.environ)
    except Exception as error:
        sys.stderr.write(f"muster: the program's steps are not counted: {error}\n")
    run_hidden()
