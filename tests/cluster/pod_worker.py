"""A worker without a model, for pods: fence, heartbeats, commits and exit record as `muster.trainer.launch` has them.

QUICK_STEP_SECONDS   how long a step takes
QUICK_EXIT           `attempt:worker:step:code`: that worker ends there with that code
QUICK_HOLD           `step:file`: each worker stands still after that step until the file is there, and reports on
QUICK_CLOCK_SECONDS  how far the worker's clock is off
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from muster.trainer.launch.report import serve_reports, write_termination_message
from muster.words.base import dump_json
from muster.words.checkpoint import Commit, DataCursor, sealed
from muster.words.names import ExitCode
from muster.words.signals import Heartbeat, StepRecord, TrainerPhase, WorkerExit
from muster.worker.fence import FenceUnreachable, StaleAttempt, confirm

FOLDER = Path(os.environ["MUSTER_WORKER_DIR"])
ATTEMPT, WORKER, INCARNATION = (int(os.environ[f"MUSTER_{name}"]) for name in ("ATTEMPT", "WORKER", "INCARNATION"))
JOB = Path(os.environ["MUSTER_CHECKPOINT_URI"].removeprefix("file://"))
STARTED = time.time()


def write_whole(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def beat(phase: TrainerPhase, step: int, committed: int | None) -> None:
    at = time.time() + float(os.environ.get("QUICK_CLOCK_SECONDS", "0"))
    told = Heartbeat(
        attempt=ATTEMPT, rank=WORKER, pid=os.getpid(), phase=phase, step=step, at=at, progressed_at=at,
        started_at=STARTED, last_commit_step=committed, incarnation=INCARNATION,
    )  # fmt: skip
    write_whole(FOLDER / f"rank-{WORKER}.json", dump_json(told))


def record(step: int) -> str:
    return dump_json(
        StepRecord(
            attempt=ATTEMPT, step=step, at=time.time(), loss=1 / step, grad_norm=1.0, lr=0.1, tokens=64,
            tokens_per_second=640.0, step_seconds=0.1, data_wait_seconds=0.0, memory_bytes=1,
        )
    )  # fmt: skip


def pass_fence() -> None:
    """As the trainer does it: while nobody can tell, wait, and don't commit."""
    while True:
        try:
            return confirm(os.environ["MUSTER_FENCE"], os.environ["MUSTER_JOB_UID"], ATTEMPT, WORKER, INCARNATION)
        except FenceUnreachable:
            time.sleep(0.1)  # not a wait: the fence is asked again


def commit(step: int) -> int:
    if WORKER == 0:
        pass_fence()
        (JOB / "commits").mkdir(parents=True, exist_ok=True)
        made = Commit(
            job=os.environ["MUSTER_JOB"], job_uid=os.environ["MUSTER_JOB_UID"], folder=JOB.name, attempt=ATTEMPT,
            step=step, committed_at=time.time(), world_size=1, files=(), tensors={},
            cursor=DataCursor(seed=0, epoch=0, sample=step), config={}, architecture={},
        )  # fmt: skip
        write_whole(JOB / "commits" / f"step-{step:08d}.json", sealed(made).decode())
    return step


def train() -> int:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    pass_fence()
    step, committed = int(os.environ["MUSTER_RESUME_STEP"]), None
    steps = json.loads(os.environ["MUSTER_CONFIG"])["training"]["length"]["steps"]
    told = [int(part) for part in os.environ.get("QUICK_EXIT", "0:0:0:0").split(":")]
    held_at, _, gate = os.environ.get("QUICK_HOLD", "0:").partition(":")
    beat(TrainerPhase.INIT, step, committed)
    with open(JOB.parent / f"trace-{JOB.name}", "a") as trace:
        while step < steps:
            time.sleep(float(os.environ.get("QUICK_STEP_SECONDS", "0.1")))  # not a wait: the work itself
            step += 1
            trace.write(f"{ATTEMPT} {WORKER} {step} {time.time()}\n")
            trace.flush()
            if WORKER == 0:
                print(record(step), flush=True)
            if step % 5 == 0:
                committed = commit(step)
            beat(TrainerPhase.STEP, step, committed)
            if told[:3] == [ATTEMPT, WORKER, step]:
                return told[3]
            while step == int(held_at) and not asked and not Path(gate).exists():
                time.sleep(0.1)  # not a wait: it is asked again
                beat(TrainerPhase.STEP, step, committed)
            if asked:
                commit(step)
                return ExitCode.PREEMPTED_COMMITTED
    commit(step)
    beat(TrainerPhase.DONE, step, step)
    return 0


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    serve_reports(FOLDER)
    try:
        code, words = train(), ""
    except StaleAttempt as stale:
        code, words = int(ExitCode.STALE_ATTEMPT), str(stale)
    if code:
        words = words or f"worker {WORKER} was told to end with {code}"
    write_termination_message(
        WorkerExit(exit_code=int(code), at=time.time(), rank=WORKER if code else None, message=words)
    )
    sys.exit(int(code))
