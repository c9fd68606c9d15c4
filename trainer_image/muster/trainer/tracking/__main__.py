"""A tracker's process, `python -m muster.trainer.tracking wandb`: tells it what stands in the step log.

It is done when its standard input ends, which is when the launcher says so or is gone. A call that takes too long ends
the process from outside of the interpreter, so that a library which hangs in C is ended too.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from muster.trainer.config import WorkerRun, read_run
from muster.trainer.tracking.processes import FINISH_SECONDS, fault_file
from muster.trainer.tracking.step_log import StepLogReader
from muster.trainer.tracking.tracker import RunTracker
from muster.words.names import STEP_LOG
from muster.words.redaction import redact

CALL_SECONDS_MAX: Final = 120.0
LOOK_SECONDS: Final = 1.0
# A tracker's server may be away for a while: the step log waits. After this long without an answer it is given up.
PATIENCE_SECONDS: Final = 900.0
PAUSE_SECONDS_MAX: Final = 60.0
LIBRARIES: Final = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


@dataclass(frozen=True)
class TimeLimits:
    """Time limits of a tracker's process, in seconds."""

    call: float = CALL_SECONDS_MAX
    patience: float = PATIENCE_SECONDS
    look: float = LOOK_SECONDS


def main(kind: str) -> int:
    os.nice(10)
    ended = threading.Event()
    threading.Thread(target=_wait_for_the_end, args=(ended,), daemon=True).start()
    run = read_run()
    try:
        tell(run, lambda: make(kind, run), ended)
    except Exception as error:
        words = redact(f"{type(error).__name__}: {error}").strip().replace("\n", " ")[:500]
        with suppress(OSError):
            fault_file(run.worker_dir, kind).write_text(words)
        return 1
    return 0


def tell(
    run: WorkerRun, start: Callable[[], RunTracker], ended: threading.Event, limits: TimeLimits = TimeLimits()
) -> None:
    """Tell a tracker all that is in the step log, until it ends. Raises what the tracker raised when patience is over,
    or when the run is."""
    reader = StepLogReader(run.worker_dir / STEP_LOG, run.attempt)
    tracker: RunTracker | None = None
    failing_since: float | None = None
    pause = limits.look
    while True:
        last = ended.is_set()  # before the look: what was written until then is seen by it
        try:
            with _within(FINISH_SECONDS if last else limits.call):
                tracker = tracker or start()
                while records := reader.next():
                    tracker.write(records)
                    reader.took()
                if not last:
                    tracker.write([])  # time passes for it
            failing_since, pause = None, limits.look
        except ImportError:
            raise
        except Exception:
            failing_since = failing_since or time.monotonic()
            if last or time.monotonic() - failing_since >= limits.patience:
                raise
            pause = min(2 * pause, PAUSE_SECONDS_MAX)
        if last:
            break
        ended.wait(pause)
    if tracker is not None:
        with _within(FINISH_SECONDS):
            tracker.close()


def make(kind: str, run: WorkerRun) -> RunTracker:
    """Raises ImportError where the tracker's library is not installed."""
    library = importlib.util.find_spec(LIBRARIES[kind])
    if library is None or library.origin is None:  # a folder of that name is no library
        raise ImportError(f"it is not installed here; build the image with `pip install 'muster-train[{kind}]'`")
    if kind == "tensorboard":
        from muster.trainer.tracking.to_tensorboard import TensorBoard

        return TensorBoard(run)
    if kind == "wandb":
        from muster.trainer.tracking.to_wandb import WeightsAndBiases

        assert run.tracking.wandb is not None, "a process is started for what is asked for"
        return WeightsAndBiases(run, run.tracking.wandb)
    from muster.trainer.tracking.to_mlflow import MLflow

    assert run.tracking.mlflow is not None, "a process is started for what is asked for"
    return MLflow(run, run.tracking.mlflow.url, run.tracking.mlflow.experiment)


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """End the process where the block takes longer; by a thread that needs no interpreter."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _wait_for_the_end(ended: threading.Event) -> None:
    while sys.stdin.buffer.read(1):
        pass
    ended.set()


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stderr.flush()
    os._exit(code)  # a library's threads may hang in the interpreter's teardown
