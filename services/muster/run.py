"""Calls of Muster for a training program of one's own: one file of the standard library, in any image with Python 3.9.

    import muster.run as run

    if run.resume_dir():                          # the newest checkpoint that verified, as a folder
        state = torch.load(f"{run.resume_dir()}/state.pt")
    for step in range(run.resume_step() + 1, 1001):
        ...
        run.step(step, loss=loss, tokens=n)       # progress, at most one small file a second
        stop = run.should_stop()                  # the same answer on every rank at the same step
        if step % 100 == 0 or stop:
            with run.checkpoint(step) as folder:  # complete at the end of the block, never before
                torch.save(state, folder / "state.pt")
        if stop:
            break

Or, with Muster's own engine (which needs more than this file: an image made on Muster's trainer image):

    for step in range(run.load(model, optimizer, scheduler=scheduler) + 1, 1001):     # on any number of ranks
        ...
        stop = run.should_stop()
        run.save(step, model, optimizer, scheduler=scheduler, every=100)     # kept in memory at each step
        if stop:
            break

Without Muster around it the program runs as it did: nothing asks it to stop, nothing is reported, and a checkpoint is a
plain folder below `checkpoints/`. Every rank makes the same calls in the same order.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "HuggingFaceCallback",
    "LightningCallback",
    "checkpoint",
    "checkpoint_dir",
    "load",
    "resume_dir",
    "resume_step",
    "save",
    "should_stop",
    "step",
]

# A report costs a tenth of a millisecond, and the launcher reads them once a second.
REPORT_SECONDS = 1.0
# For the other ranks of this node, where torch.distributed does not let them agree. A rank that is this much later than
# the others is hung, and Muster finds that by other means.
PEERS_SECONDS_MAX = 600.0


def resume_dir() -> str | None:
    """Return the folder of the checkpoint to resume from, None for a fresh start."""
    return os.environ.get("MUSTER_RESUME_DIR") or None


def resume_step() -> int:
    """Return the steps that the checkpoint to resume from has, 0 for a fresh start."""
    return _number("MUSTER_RESUME_STEP", 0) if resume_dir() else 0


def checkpoint_dir(default: str = "checkpoints") -> str:
    """Return the folder whose checkpoints Muster keeps, for programs that write them by another library; without
    Muster, `default`."""
    return _prepared().get("checkpointDir") or os.environ.get("MUSTER_CHECKPOINT_DIR") or default


def step(number: int, loss: Any = None, tokens: int | None = None, steps: int | None = None, **values: Any) -> None:
    """Report a finished step. `loss` and `values` are numbers, or tensors of one: they are read once a second at most,
    so that no GPU is waited for at each step. `tokens` are those of this step, of all ranks; `steps` is how many the
    program will take. `evaluation_loss` decides which checkpoint is the best."""
    global _steps
    _steps = steps or _steps
    if (reporter := _reporter()) is not None:
        reporter.stepped(number, loss, tokens, steps, values)


def should_stop() -> bool:
    """Collective. Return whether the program should save and end: its node is taken away, or a person stops the job.

    Every rank gets the same answer at the same call: through torch.distributed where the program uses it, else through
    files of this node. Ranks on several nodes that do not use torch.distributed may differ by a step.
    """
    global _calls, _stopping
    _calls += 1
    _outlive_sigterm()
    asked = os.path.exists(os.environ.get("MUSTER_STOP_FILE") or "")
    group = _group()
    if group is not None:
        import torch

        flag = torch.tensor([float(asked)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)
        asked = bool(flag.item())
    elif _local_ranks() > 1:
        asked = _is_agreed(asked)
    _stopping = _stopping or asked
    return asked


@contextlib.contextmanager
def checkpoint(number: int) -> Iterator[Path]:
    """Collective. A folder that becomes the checkpoint of step `number` when the block ends, and vanishes when it
    raises. All ranks of a node get the same one."""
    global _saves
    _saves += 1
    root = Path(checkpoint_dir())
    partial, final = root / f".step-{number:08d}.partial", root / f"step-{number:08d}"
    is_first, old = _local_rank() == 0, root / f".step-{number:08d}.old"
    if _group() is not None or _local_ranks() == 1:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
        _barrier(f"begin-{_saves}")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        yield partial
    except BaseException:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if is_first:  # nodes may share the folder: whoever comes second finds it moved
        with contextlib.suppress(OSError):
            final.rename(old)
    _barrier(f"end-{_saves}")
    if is_first:
        with contextlib.suppress(FileNotFoundError):
            partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        _request(number, final)


def save(number: int, model: Any, optimizer: Any, every: int = 1, **state: Any) -> None:
    """Collective, to be called at each step. Keep the state after step `number` in memory, so that a crash costs no
    step that is over, and make a checkpoint of it in the background: at each `every`th step, at the last one that
    `step` knows, and once `should_stop` has said so.

    Model and optimizer are torch's, also sharded by FSDP2. `state` are dicts, or what has `state_dict` and
    `load_state_dict` (a scheduler, a data loader), of each rank; the random generators belong to it. Without Muster,
    nothing is kept in memory, and the checkpoints are folders below `checkpoints/`.
    """
    if not _savers:
        where = (Path(checkpoint_dir()), _local_rank(), _local_ranks())
        _savers.append(_engine().LoopSaver(*where, model, optimizer))
        atexit.register(_savers[0].finish)
    is_last = _stopping or number == _steps
    _savers[0].save(number, model, optimizer, state, is_due=number % every == 0, is_last=is_last)


def load(model: Any, optimizer: Any, folder: Any = None, **state: Any) -> int:
    """Collective. Load what `save` has left in `folder`, by default the one to resume from, into model, optimizer and
    `state`, and return its step; 0 where there is nothing to resume from. On as many ranks as saved it, training goes
    on bit for bit; on another number each takes its part of the tensors, and rank 0's `state`."""
    folder = resume_dir() if folder is None else folder
    return 0 if folder is None else int(_engine().load(str(folder), model, optimizer, state))


def _engine() -> Any:
    try:
        return importlib.import_module("muster.trainer.programs.loop_saver")
    except ImportError as error:
        raise RuntimeError(
            f"run.save and run.load need Muster's engine, which this Python lacks ({error}): use an image made on "
            "Muster's trainer image, or pip install 'muster-train[trainer]'; run.checkpoint needs this file alone"
        ) from error


def HuggingFaceCallback() -> Any:
    """Return a callback for transformers.Trainer: it reports steps, losses and evaluations, has the Trainer save and
    stop when it should, and says when a checkpoint is complete on all ranks."""
    from transformers import TrainerCallback

    class Callback(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.values: dict[str, Any] = {}

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            names = {"eval_loss": "evaluation_loss"}
            self.values.update({names.get(name, name): value for name, value in (logs or {}).items()})

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            more = {name: v for name, v in self.values.items() if name not in ("loss", "steps", "tokens", "number")}
            step(state.global_step, loss=self.values.get("loss"), steps=state.max_steps, **more)
            if should_stop():
                control.should_save = control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            _warn_of_another_folder(folder.parent)
            _barrier(f"save-{state.global_step}")
            if _local_rank() == 0:
                _request(state.global_step, folder)

    return Callback()


def LightningCallback(every: int | None = None) -> Any:
    """Return a callback for Lightning: it reports steps, saves every so many of them and when it should stop, as
    `lightning.ckpt` in the checkpoint's folder."""
    try:
        from lightning.pytorch import Callback as Base  # type: ignore[import-not-found]
    except ImportError:
        from pytorch_lightning import Callback as Base  # type: ignore[import-not-found]

    class Callback(Base):  # type: ignore[misc]
        saved = 0

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            number = trainer.global_step
            if number <= self.saved:  # a batch whose gradient is accumulated
                return
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            step(number, loss=loss, steps=trainer.max_steps if trainer.max_steps > 0 else None)
            stop = should_stop()
            if stop or (every and number % every == 0):
                self.saved = number
                with checkpoint(number) as folder:
                    trainer.save_checkpoint(folder / "lightning.ckpt")
            if stop:
                trainer.should_stop = True

    return Callback()


# --- progress ---


class _ProgressReporter:
    """Writer of this rank's progress file."""

    def __init__(self, path: str) -> None:
        self._path, self._pid = path, os.getpid()
        self._newest: dict[str, Any] = {}
        self._written, self._next = -1, 0.0
        self._tokens = int(_prepared().get("resumeTokens") or 0)
        hook = sys.modules.get("_muster_hook")
        if hook is not None:
            hook.silence()
        atexit.register(self.finish)

    def stepped(self, number: int, loss: Any, tokens: int | None, steps: int | None, values: dict[str, Any]) -> None:
        self._tokens += tokens or 0
        self._newest = {"step": int(number), "progressedAt": time.time(), "steps": steps}
        self._numbers = {**values, "loss": loss}
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REPORT_SECONDS
            self._write()

    def finish(self) -> None:
        """Report the last step, as the process ends."""
        if self._pid == os.getpid() and self._newest and self._newest["step"] != self._written:
            self._write()

    def _write(self) -> None:
        numbers = {name: _as_number(value) for name, value in self._numbers.items()}
        values = {name: value for name, value in numbers.items() if value is not None}
        loss = values.pop("loss", None)
        document = {
            **self._newest,
            "pid": self._pid,
            "at": time.time(),
            "source": "run",
            "loss": loss,
            "values": values,
        }
        if self._tokens:
            document["tokens"] = self._tokens
        with contextlib.suppress(OSError):  # a full disk is no reason to end a training
            _write_whole(self._path, document)
            self._written = self._newest["step"]


_calls = _saves = 0  # of should_stop and checkpoint; the same on every rank
_asked_at: int | None = None  # call of should_stop at which this rank saw that it should stop, without torch
_steps: int | None = None  # that the program will take
_stopping = False  # whether should_stop has said so
_savers: list[Any] = []  # of run.save: none, or the one
_reporters: dict[str, _ProgressReporter] = {}
_groups: list[Any] = []
_warned: set[str] = set()


def _reporter() -> _ProgressReporter | None:
    folder = os.environ.get("MUSTER_WORKER_DIR")
    if not folder:
        return None
    path = os.path.join(folder, f"rank-{os.environ.get('RANK') or os.environ.get('MUSTER_WORKER') or 0}.progress.json")
    if path not in _reporters:
        _reporters[path] = _ProgressReporter(path)
    return _reporters[path]


def _as_number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


# --- agreement ---


def _outlive_sigterm() -> None:
    """Let a program that asks go on to save when its launcher wants it to stop, which it says by this signal too. For
    any other reason the signal ends the program, as it did."""
    path = os.environ.get("MUSTER_STOP_FILE")
    if not path or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    if threading.current_thread() is not threading.main_thread():
        return

    def on_signal(number: int, frame: Any) -> None:
        if not os.path.exists(path):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, on_signal)


def _group() -> Any:
    """A group of all ranks on the CPU, so that no GPU is waited for; None where torch.distributed is not in use."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if distributed.get_world_size() == 1:
        return None
    world = distributed.group.WORLD
    if not _groups or _groups[0] is not world:  # the program may have begun its groups anew
        own = world if distributed.get_backend() == "gloo" else distributed.new_group(backend="gloo")
        _groups[:] = [world, own]
    return _groups[1]


def _barrier(name: str) -> None:
    """Wait for all ranks, or, without torch.distributed, for those of this node."""
    group = _group()
    if group is not None:
        sys.modules["torch"].distributed.barrier(group=group)
    elif _local_ranks() > 1 and os.environ.get("MUSTER_WORKER_DIR"):
        _arrivals(name, 0)


def _is_agreed(asked: bool) -> bool:
    """Return whether all ranks of this node stop at this call of should_stop: the one after the latest call at which a
    rank saw that it should.

    A rank that sees it does not wait for the others yet. One of them may have come past that call just before, and need
    this rank for its next step; it can't come past the next call, at which this rank waits, without seeing it too.
    """
    global _asked_at
    if _asked_at is None:
        if asked:
            _asked_at = _calls
            _leave("stop", _calls)
        return False
    return _calls > max(_arrivals("stop", _asked_at))


def _meeting(name: str) -> list[str]:
    """Files by which the ranks of this node meet, by rank; none where there is no folder for them."""
    folder = os.environ.get("MUSTER_WORKER_DIR")
    return [os.path.join(folder, f"meet-{name}-{rank}.json") for rank in range(_local_ranks())] if folder else []


def _leave(name: str, value: int) -> None:
    """Leave a value for the other ranks of this node, once."""
    paths = _meeting(name)
    if paths and not os.path.exists(paths[_local_rank()]):
        _write_whole(paths[_local_rank()], {"value": value})


def _arrivals(name: str, value: int) -> list[int]:
    """Leave a value for the other ranks of this node, and wait for theirs."""
    _leave(name, value)
    paths = _meeting(name)
    if not paths:
        return [value]
    deadline = time.monotonic() + PEERS_SECONDS_MAX
    while time.monotonic() < deadline:
        arrivals = [_read(path) for path in paths]
        if all("value" in one for one in arrivals):
            return [int(one["value"]) for one in arrivals]
        time.sleep(0.01)
    raise RuntimeError(
        f"{os.path.dirname(paths[0])}: not all ranks of this node came to {name} within {PEERS_SECONDS_MAX:.0f} s"
    )


# --- files ---


def _request(number: int, folder: Path) -> None:
    """Say that a folder is complete on this node."""
    worker_dir = os.environ.get("MUSTER_WORKER_DIR")
    if worker_dir:
        path = os.path.join(worker_dir, f"checkpoint-{number}.request.json")
        _write_whole(path, {"step": number, "folder": str(folder.absolute()), "at": time.time()})


def _warn_of_another_folder(folder: Path) -> None:
    kept = checkpoint_dir("")
    if kept and os.path.realpath(folder) != os.path.realpath(kept) and kept not in _warned:
        _warned.add(kept)
        sys.stderr.write(
            f"muster: checkpoints are written to {folder}, and Muster keeps those in {kept} alone; give the program "
            "output_dir=run.checkpoint_dir(), or name its folder in checkpoint.folder\n"
        )


def _prepared() -> dict[str, Any]:
    return _read(os.path.join(os.environ.get("MUSTER_WORKER_DIR") or "", "prepared.json"))


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path) as file:
            document = json.load(file)
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _write_whole(path: str, document: dict[str, Any]) -> None:
    new = f"{path}.{os.getpid()}.new"
    with open(new, "w") as file:
        json.dump(document, file)
    os.replace(new, path)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name) or ""
    return int(text) if text.isdigit() else default


def _local_rank() -> int:
    return _number("LOCAL_RANK", 0)


def _local_ranks() -> int:
    return _number("LOCAL_WORLD_SIZE", 1)
