"""A worker's first process, `python -m muster.trainer.launch`: what torchrun does, with truthful exit codes.

The order is the point: confirm the fence, only then start ranks, which meet by themselves. When the ranks are gone, and
what they left in memory is committed, exit.json says how this worker ended, and the process ends with the same code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from muster.local.sandbox import ADVICE, Sandbox, enter
from muster.storage.small_files import write_whole
from muster.trainer.config import WorkerRun, read_run
from muster.trainer.errors import UserError
from muster.trainer.launch.limits import ProcessLimits, limit_tasks, processes_max
from muster.trainer.launch.process_control import LAUNCHER
from muster.trainer.launch.program import NotPrepared, run_program, runs_program
from muster.trainer.launch.report import serve_reports, write_termination_message
from muster.trainer.launch.stack_dumps import dump, record_flights
from muster.trainer.launch.verdict import (
    any_rank_began,
    hung_ranks,
    is_unexplained,
    log_tail,
    oom_kills,
    read_end,
    worker_exit,
)
from muster.trainer.tracking.processes import TrackerProcesses, commands
from muster.words.base import dump_json
from muster.words.names import EXIT_RECORD, Env, ExitCode
from muster.words.redaction import redact
from muster.words.signals import WorkerExit
from muster.worker.cores import share_cores
from muster.worker.early_stop import STOP_SIGNALS, end_now
from muster.worker.fence import SECONDS_MAX as FENCE_SECONDS_MAX
from muster.worker.fence import FenceUnreachable, StaleAttempt, pass_fence
from muster.worker.names import AFTER_CRASH_SECONDS_MAX
from muster.worker.notices import watch_notices
from muster.worker.process_tree import adopt_orphans
from muster.worker.ranks import SHUTDOWN_SECONDS, ProcessEnd, RankProcesses, read_layout

# What the kernel answers where a worker may not read or write.
DENIALS = ("permission denied", "read-only file system", "file system is read-only")


def main() -> int:
    started = time.time()
    directory = Path(os.environ.get(Env.WORKER_DIR) or ".")
    directory.mkdir(parents=True, exist_ok=True)
    sandbox = read_sandbox()
    fence = enter(sandbox) if sandbox is not None else None  # first of all: only later threads are held to it
    kept_apart = fence is not None and fence.keeps_files
    for gap in fence.gaps if fence is not None else ():
        print(f"a job of this machine {gap}", file=sys.stderr, flush=True)
    take_variables()
    try:
        if sandbox is not None and sandbox.refused:
            raise UserError(sandbox.refused)
        if kept_apart:
            check_python_path()
        if runs_program(os.environ):
            run_program()
        stop = StopRelay(directory, started)
        serve_reports(directory)
        watch_notices(leave_node)
        run = read_run()
        pass_fence(run.fence, run.job_uid, run.attempt, run.worker, run.incarnation)
        end = launch(run, stop, started, sandbox)
    except UserError as error:
        end = _before_ranks(ExitCode.USER_ERROR, str(error))
    except NotPrepared as error:
        end = _before_ranks(error.exit_code, str(error))
    except StaleAttempt as error:
        end = _before_ranks(ExitCode.STALE_ATTEMPT, str(error))
    except FenceUnreachable as error:
        end = _before_ranks(ExitCode.PREFLIGHT_FAILED, f"the fence did not answer for {FENCE_SECONDS_MAX:g} s: {error}")
    except Exception as error:  # the rendezvous' port is taken, or no process can be started
        traceback.print_exc()
        message = f"the ranks could not be started or watched: {type(error).__name__}: {error}"
        end = _before_ranks(ExitCode.PREFLIGHT_FAILED, message)
    if kept_apart and any(words in end.message.lower() for words in DENIALS):
        end = end.model_copy(update={"message": f"{end.message} ({ADVICE})"})
    if end.exit_code and end.message:
        print(f"worker ends with exit code {end.exit_code}: {redact(end.message)}", file=sys.stderr, flush=True)
    end = end.model_copy(update={"log_tail": log_tail(directory) if end.exit_code else ""})
    try:
        write_whole(directory / EXIT_RECORD, dump_json(end))
    except OSError as error:
        print(f"can't write {EXIT_RECORD}: {error}; the exit code says the same", file=sys.stderr, flush=True)
    write_termination_message(end)
    return end.exit_code


def read_sandbox() -> Sandbox | None:
    """Return the sandbox, which says what this worker may reach; None where there is none (a pod, a run by hand)."""
    text = os.environ.get(Env.SANDBOX)
    return Sandbox.model_validate_json(text) if text else None


def take_variables() -> None:
    """Set the job's own variables, for this process from now on and for the ranks. Some name what libraries load, so on
    a shared machine they come under other names, and count once this process has given up its rights. In a pod they
    are set from the first."""
    for name in [name for name in os.environ if name.startswith(Env.OWN_PREFIX)]:
        os.environ[name.removeprefix(Env.OWN_PREFIX)] = os.environ.pop(name)


def check_python_path() -> None:
    """Raise UserError for a folder of PYTHONPATH that may not be read: Python would pass over it without a word."""
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        try:
            if os.path.isabs(folder):
                os.close(os.open(folder, os.O_RDONLY))
        except PermissionError as error:
            raise UserError(f"PYTHONPATH names {folder}, which can't be read: permission denied") from error
        except OSError:  # not there, and Python needs none of them
            continue


def leave_node(words: str) -> None:
    """Send ourselves SIGTERM when the node announces its end: what follows is the same, whoever asks."""
    print(f"the node announces its end: {words}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


class StopRelay:
    """Passes the wish to stop on to the ranks, each once, also to those that are only just being started. Where no rank
    has begun yet, the worker ends at once.

    The ranks lead sessions of their own: a signal to our group does not reach them. Ranks
    that hang can't agree on a step any more, so nothing is gained by waiting for them: they leave their stacks and die.
    """

    def __init__(self, directory: Path, started: float) -> None:
        self.requested = False
        self.ranks_may_exist = False
        self.helpers: set[int] = set()  # children that are no ranks
        self.hung = ""  # which ranks did not move any more when we were told to stop
        self._directory, self._started = directory, started
        self._notified_ranks: set[int] = set()
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.requested = True
        if not self.ranks_may_exist:
            end_now()
        threading.Thread(target=self._signal_ranks, daemon=True).start()

    def _signal_ranks(self) -> None:
        # A rank that is started at this very moment dies with us.
        if not any_rank_began(self._directory, self._started) and not (set(children()) - self.helpers):
            end_now()
        self._give_up_on_the_hung()
        while True:
            for pid in children():
                if pid not in self._notified_ranks:
                    self._notified_ranks.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
            time.sleep(0.05)

    def _give_up_on_the_hung(self) -> None:
        hung = hung_ranks(self._directory, self._started)
        if not hung:
            return
        pids = children()
        dump(self._directory, {rank.rank: rank.pid for rank in hung if rank.pid in pids and not rank.stopped})
        self.hung = "; ".join(rank.words for rank in hung)
        print(f"the ranks hang and are killed: {self.hung}", file=sys.stderr, flush=True)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children() -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process().children()]


def wait_for_uploads() -> None:
    """Wait for upload processes that outlived their ranks, for as long as an upload after a crash may take."""
    import psutil

    left = psutil.Process().children()
    _, slow = psutil.wait_procs(left, timeout=AFTER_CRASH_SECONDS_MAX)
    for process in slow:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def first_failure(directory: Path, end: ProcessEnd, since: float) -> str:
    """Return the line of the log on a rank that failed while others here still ran."""
    message = read_end(directory, end.rank, end.exit_code, end.at, since).message
    words = f"{end.words}: {message}" if message else end.words
    return redact(f"{words}; the other ranks here are asked to stop, and have {SHUTDOWN_SECONDS:.0f} s")


def launch(run: WorkerRun, stop: StopRelay, started: float, sandbox: Sandbox | None) -> WorkerExit:
    """Run `-m muster.trainer` in every rank until all are gone, and judge how they ended. With a sandbox, on a machine
    that others use too, they are held to what they may take of it."""
    layout = read_layout()
    share_cores(layout.ranks_per_node)
    os.environ[LAUNCHER] = str(os.getpid())
    adopt_orphans()
    record_flights(run.worker_dir)
    limits = ProcessLimits(sandbox.memory_bytes if sandbox else None, processes_max())
    if sandbox is not None:
        limit_tasks()
        limits.watch()
    trackers = TrackerProcesses(run.worker_dir, commands(run))
    stop.helpers = set(children())
    memory_kills = oom_kills()
    command = [sys.executable, "-u", "-m", "muster.trainer"]
    ranks = RankProcesses(layout, command, os.environ, run_id=f"{run.job_uid}-{run.attempt}")
    stop.ranks_may_exist = True

    def report(end: ProcessEnd, stopped_others: bool) -> None:
        if stopped_others and not stop.requested:
            print(first_failure(run.worker_dir, end, started), file=sys.stderr, flush=True)

    try:
        ranks.start()
        ends = [end for end in ranks.wait(report) if end.exit_code]
    finally:
        trackers.finish()
        wait_for_uploads()
    if not ends:
        return WorkerExit(exit_code=ExitCode.DONE, at=time.time())
    if limits.exceeded is not None:
        return limits.exceeded
    if stop.hung:
        return WorkerExit(exit_code=ExitCode.HUNG, at=time.time(), message=f"killed while hanging: {stop.hung}")
    read = [read_end(run.worker_dir, end.rank, end.exit_code, end.at, started) for end in ends]
    end = worker_exit(read, stop.requested, SHUTDOWN_SECONDS)
    return end.model_copy(update={"unexplained": is_unexplained(end, memory_kills, oom_kills())})


def _before_ranks(code: int, message: str) -> WorkerExit:
    return WorkerExit(exit_code=int(code), at=time.time(), message=message)
