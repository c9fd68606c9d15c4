"""Launcher of a program of the user's own: `python -m muster.worker`, the first process of its worker.

Its life in order: pass the fence; start the ranks; write their heartbeats while they run, and pass on a wish to stop;
when all are gone, end what they left running and wait for the keeper to publish what is complete; write exit.json.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from muster.worker import exit_record
from muster.worker.early_stop import STOP_SIGNALS, end_now
from muster.worker.fence import SECONDS_MAX, FenceUnreachable, StaleAttempt, pass_fence
from muster.worker.files import read_document, write_document
from muster.worker.heartbeats import HeartbeatWriter
from muster.worker.names import (
    AFTER_CRASH_SECONDS_MAX,
    EXIT_RECORD,
    KEEPER_STATE,
    RANK_ERROR,
    RANKS_ENDED,
    RESULTS,
    SAVER,
    STOP,
    UNEVEN_END_SECONDS,
    ExitCode,
    WorkerVariables,
)
from muster.worker.notices import watch_notices
from muster.worker.orders import (
    BadOrders,
    WorkerOrders,
    command_line,
    link_image_files,
    program_environment,
    read_orders,
    results_path,
)
from muster.worker.output import RankOutput
from muster.worker.process_tree import (
    adopt_orphans,
    children_of,
    die_with_this_process,
    is_alive,
    kill_all_but,
    reap_orphans,
)
from muster.worker.ranks import SHUTDOWN_SECONDS, ProcessEnd, RankProcesses, read_layout, signal_name
from muster.worker.reports import metrics_page, serve_reports, write_termination_message
from muster.worker.results import read_results
from muster.worker.trainer_status import StatusServer

# A pod that is asked to stop is killed after 120 s (kubernetes/render.py), and so is a worker of one machine. The ranks
# get what leaves the keeper time to upload what they saved last; a program that saves more in that time than the keeper
# can send loses it, and resumes from the checkpoint before.
GRACE_SECONDS = 90.0
KEEPER_STOP_SECONDS = 25.0
# The keeper itself gives up after 300 s (programs/keeper.py).
KEEPER_SECONDS = 330.0
KEEPER_START_SECONDS = 30.0  # for a keeper of which nothing is seen yet
KEEPER_LOOK_SECONDS = 0.5  # steps that are taken without a keeper are taken again
ORPHANS_LOOK_SECONDS = 5.0  # a look at all processes of the machine
LAST_WORDS_SECONDS = 0.5  # for a rank that has failed to be read to its end, before its failure is reported
SAVER_FILE = re.compile(SAVER.format(rank="[0-9]+").replace(".", "[.]"))


def main() -> int:
    """Run the worker to its end, and return its exit code."""
    directory = os.path.abspath(os.environ.get(WorkerVariables.WORKER_DIR) or ".")
    os.makedirs(directory, exist_ok=True)
    tail = ""
    try:
        orders = read_orders()
        worker = ProgramWorker(orders)
        end = worker.run()
        tail = worker.tail
        if not end["exitCode"]:
            end = {**end, **_results_of(orders)}
    except BadOrders as error:
        end = exit_record.record(ExitCode.USER_ERROR, str(error))
    except StaleAttempt as error:
        end = exit_record.record(ExitCode.STALE_ATTEMPT, str(error))
    except FenceUnreachable as error:
        words = f"the fence did not answer for {SECONDS_MAX:g} s: {error}"
        end = exit_record.record(ExitCode.PREFLIGHT_FAILED, words)
    except Exception as error:  # the rendezvous' port is taken, or no process can be started
        traceback.print_exc()
        words = f"the ranks could not be started or watched: {type(error).__name__}: {error}"
        end = exit_record.record(ExitCode.PREFLIGHT_FAILED, words)
    end["message"] = end["message"][:2_000]
    if end["exitCode"]:
        end["logTail"] = tail
        say(f"worker ends with exit code {end['exitCode']}: {end['message']}")
    try:
        write_document(os.path.join(directory, EXIT_RECORD), end)
    except OSError as error:
        say(f"can't write {EXIT_RECORD}: {error}")
    write_termination_message(end, directory)
    return int(end["exitCode"])


def _clear(orders: WorkerOrders) -> None:
    """Make the working directory, and remove the results of a worker that was here before."""
    os.makedirs(orders.work, exist_ok=True)
    if os.environ.get(WorkerVariables.POD_IP):  # in a pod, this process starts in the image's own working directory
        link_image_files(orders, os.getcwd())
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(orders.directory, RESULTS))


def _results_of(orders: WorkerOrders) -> dict[str, Any]:
    """Return what the exit record says of the numbers that the program left."""
    results, fault = read_results(results_path(orders, os.environ))
    if fault:
        say(f"the program's results are left out: {fault}")
    return {"results": results or None, "resultsFault": fault[:400] or None}


def say(words: str) -> None:
    """Write a line into the worker's log."""
    with contextlib.suppress(OSError, ValueError):
        print(f"muster: {words}", file=sys.stderr, flush=True)


class StopWish:
    """Wish that the program save and end: the ranks hear of it by SIGTERM and by $MUSTER_STOP_FILE, once, and are
    killed when the grace is over. Before there are ranks, the worker ends at once."""

    def __init__(self, directory: str, grace_seconds: float = GRACE_SECONDS) -> None:
        self.asked_at: float | None = None
        self.reason = ""
        self.killed = False
        """Whether ranks had to be killed, for they did not end in time."""
        self._path, self._grace_seconds = os.path.join(directory, STOP), grace_seconds
        self._ranks: RankProcesses | None = None
        self._lock = threading.Lock()
        with contextlib.suppress(OSError):
            os.unlink(self._path)  # of a worker that was there before
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    @contextlib.contextmanager
    def starting(self, ranks: RankProcesses) -> Iterator[None]:
        """Note that there are ranks from now on, which are asked first; a wish that comes while they are started waits
        until all of them are."""
        with self._lock:
            self._ranks = ranks
            yield

    def _on_signal(self, number: int, frame: object) -> None:
        if self._ranks is None:
            end_now()
        # A signal handler may not wait for a lock that the interrupted code holds.
        threading.Thread(target=self.ask, args=(signal_name(number),), daemon=True).start()

    def ask(self, reason: str) -> None:
        """Ask the ranks to stop, once."""
        with self._lock:
            if self.asked_at is not None:
                return
            self.asked_at, self.reason = time.time(), reason
        say(f"the program is asked to stop ({reason}); it has {self._grace_seconds:.0f} s to save and end")
        document = {"reason": reason, "at": self.asked_at, "graceSeconds": self._grace_seconds}
        try:
            write_document(self._path, document)
        except OSError as error:
            say(f"can't write {self._path}: {error}; the ranks have SIGTERM alone")
        if self._ranks is None:
            end_now()
        else:
            self._ranks.signal(signal.SIGTERM)
            timer = threading.Timer(self._grace_seconds, self._kill)
            timer.daemon = True
            timer.start()

    def seconds_left(self) -> float:
        """Return what is left of the ranks' grace, and a few seconds in any case, once they are asked to stop."""
        passed = time.time() - self.asked_at if self.asked_at is not None else 0.0
        return max(self._grace_seconds - passed, 5.0)

    def _kill(self) -> None:
        if self._ranks is not None and self._ranks.pids():
            self.killed = True
            say(f"the ranks {sorted(self._ranks.pids())} did not end within {self._grace_seconds:.0f} s: killed")
            self._ranks.signal(signal.SIGKILL)


class ProgramWorker:
    """One worker of a program."""

    def __init__(self, orders: WorkerOrders) -> None:
        self._orders = orders
        self.tail = ""
        """Last lines of the output of the rank whose end explains the worker's, once there are any."""
        self._stop = StopWish(orders.directory, float(os.environ.get("MUSTER_GRACE_SECONDS") or GRACE_SECONDS))
        self._helpers = children_of([os.getpid()])
        self._fault: dict[str, Any] | None = None  # how the worker ends by our own doing

    def run(self) -> dict[str, Any]:
        """Run the program in all ranks, and return the exit record. Raises BadOrders, StaleAttempt, FenceUnreachable,
        OSError."""
        orders = self._orders
        serve_reports(orders.directory)
        watch_notices(self._stop.ask)
        pass_fence(orders.fence, orders.job_uid, orders.attempt, orders.worker, orders.incarnation)
        try:
            layout = read_layout()
        except ValueError as error:
            raise BadOrders(str(error)) from None
        _clear(orders)
        environment = program_environment(orders, os.environ, layout.ranks_per_node)
        os.makedirs(environment[WorkerVariables.CHECKPOINT_DIR], exist_ok=True)
        command = command_line(orders, environment)
        output = RankOutput(layout.processes(orders.once))
        heartbeats: HeartbeatWriter | None = None

        def reported(status: dict[str, Any]) -> None:
            if heartbeats is not None:
                heartbeats.trainer_reported(status)

        status = StatusServer(orders.directory, reported, lambda: metrics_page(orders.directory))
        environment = {**status.start(), **environment}
        adopt_orphans()
        kills = exit_record.oom_kills()
        ranks = RankProcesses(
            layout,
            command,
            environment,
            run_id=environment["TORCHELASTIC_RUN_ID"],
            once=orders.once,
            directory=orders.work,
            output=output.writers,
            prepare=die_with_this_process(),
            error_file=self._error_file,
        )
        self._start(ranks, command[0])
        output.start()
        heartbeats = HeartbeatWriter(
            orders.directory, orders.attempt, orders.incarnation, ranks.started(), output, orders.hang, orders.steps,
            orders.resume_step, status.port,
        )  # fmt: skip
        heartbeats.start()
        watcher = WorkerWatcher(ranks, heartbeats, self._helpers, self._end_by)
        watcher.start()

        def ended(end: ProcessEnd, stopped_others: bool) -> None:
            watcher.ended(end)
            if stopped_others:
                words = exit_record.read_words(output.tail(end.rank, LAST_WORDS_SECONDS), self._recorded(end.rank))
                said = f": {words.text}" if words.text else ""
                say(f"{end.words}{said}; the other ranks here are asked to stop, and have {SHUTDOWN_SECONDS:.0f} s")

        ends = ranks.wait(ended, lambda: self._stop.asked_at is not None)
        watcher.finish()
        self._let_savers_finish()
        left = kill_all_but(self._helpers)
        output.finish()
        heartbeats.finish()
        if left:
            say(f"{left} processes that the program left running were ended with it")
        end = self._judge(ends, output, heartbeats, kills)
        kept = self._let_keeper_finish(ends)
        if not kept and not end["exitCode"] and self._stop.asked_at is None:
            words = "the process that keeps the program's checkpoints ended before it had published them; see the log"
            end = exit_record.record(ExitCode.STORAGE, words, step=end["step"])
        return self._as_stopped(end, ends, heartbeats)

    def _start(self, ranks: RankProcesses, name: str) -> None:
        try:
            with self._stop.starting(ranks):
                ranks.start()
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise BadOrders(f"program.command: {name} can't be started: {error}") from None
        except OSError as error:
            if error.errno == 8:  # ENOEXEC
                raise BadOrders(
                    f"program.command: {name} is no program for this machine; a script begins with #! and its "
                    "interpreter"
                ) from None
            raise

    def _end_by(self, record: dict[str, Any]) -> None:
        """Note how the worker ends; whoever calls this ends the ranks."""
        if self._fault is None:
            self._fault = record

    def _judge(
        self, ends: tuple[ProcessEnd, ...], output: RankOutput, heartbeats: HeartbeatWriter, kills: int | None
    ) -> dict[str, Any]:
        now = exit_record.oom_kills()
        out_of_memory = kills is not None and now is not None and now > kills
        steps = self._orders.steps
        end = exit_record.judge(ends, output.tail, heartbeats.step, steps, out_of_memory, self._recorded)
        if self._fault is not None and self._stop.asked_at is None:
            end = {**self._fault, "step": end["step"]}
        rank = end["rank"] if end["rank"] is not None else ends[0].rank
        self.tail = exit_record.log_tail(output.tail(rank))
        return end

    def _error_file(self, rank: int) -> str:
        return os.path.join(self._orders.directory, RANK_ERROR.format(rank=rank))

    def _recorded(self, rank: int) -> str:
        return exit_record.recorded_traceback(read_document(self._error_file(rank)))

    def _let_savers_finish(self) -> None:
        """Wait for processes that outlive their ranks to write the checkpoint that these left in memory (run.save)."""
        saved_by = [
            document["pid"]
            for name in os.listdir(self._orders.directory)
            if SAVER_FILE.fullmatch(name)
            and (document := read_document(os.path.join(self._orders.directory, name))) is not None
            and isinstance(document.get("pid"), int)
        ]
        deadline = time.monotonic() + AFTER_CRASH_SECONDS_MAX
        if self._stop.asked_at is not None:
            deadline = min(deadline, time.monotonic() + self._stop.seconds_left())
        while (living := children_of([os.getpid()]) & set(saved_by)) and time.monotonic() < deadline:
            reap_orphans(())
            if not any(map(is_alive, living)):
                return
            time.sleep(0.02)

    def _let_keeper_finish(self, ends: tuple[ProcessEnd, ...]) -> bool:
        """Tell the keeper of checkpoints that the ranks are gone, and wait until it has published what is complete.
        Return whether it did not die over that."""
        ranks = [{"rank": end.rank, "exitCode": end.exit_code} for end in ends]
        try:
            write_document(os.path.join(self._orders.directory, RANKS_ENDED), {"ranks": ranks})
        except OSError as error:
            say(f"can't write {RANKS_ENDED}: {error}; the keeper of checkpoints ends with this worker")
            return True
        if not self._orders.prepared and not self._helpers:
            return True  # a run by hand: nobody keeps checkpoints
        began = time.monotonic()
        patience = KEEPER_STOP_SECONDS if self._stop.asked_at is not None else KEEPER_SECONDS
        while time.monotonic() - began < patience:
            reap_orphans(())
            gone = bool(self._helpers) and not any(map(is_alive, self._helpers))
            state = self._keeper()  # its last word, if it is gone
            if state.get("state") == "done":
                return True
            if gone:
                return False
            if not state and time.monotonic() - began > KEEPER_START_SECONDS:
                say(f"the keeper of checkpoints was not there for {KEEPER_START_SECONDS:.0f} s; it is not waited for")
                return True
            time.sleep(0.1)
        say(f"the keeper of checkpoints did not end within {patience:.0f} s; what it had not published is lost")
        return True

    def _keeper(self) -> dict[str, Any]:
        return read_document(os.path.join(self._orders.directory, KEEPER_STATE)) or {}

    def _as_stopped(
        self, end: dict[str, Any], ends: tuple[ProcessEnd, ...], heartbeats: HeartbeatWriter
    ) -> dict[str, Any]:
        """Return the end of a worker that was asked to stop: by whether a checkpoint was published after that. A
        program that has taken all its steps is done all the same; one that ended or failed by itself before, has."""
        asked = self._stop.asked_at
        if asked is None or all(each.at < asked for each in ends):
            return end
        steps = self._orders.steps
        if not end["exitCode"] and steps is not None and all(heartbeats.step(each.rank) >= steps for each in ends):
            return end
        if any(each.exit_code and each.at < asked for each in ends):
            return end
        committed = self._keeper().get("committedAt")
        saved = isinstance(committed, (int, float)) and committed >= asked
        code = ExitCode.PREEMPTED_COMMITTED if saved else ExitCode.PREEMPTED_NO_COMMIT
        how = "a checkpoint was published after that" if saved else "no checkpoint was published after that"
        late = " and did not end in time" if self._stop.killed else ""
        return {**end, "exitCode": code, "message": f"asked to stop ({self._stop.reason}){late}; {how}", "signal": None}


class WorkerWatcher:
    """Looks for what no rank's end shows: a keeper that is gone, and ranks that run on, and do not move, long after
    others ended well."""

    def __init__(
        self,
        ranks: RankProcesses,
        heartbeats: HeartbeatWriter,
        helpers: set[int],
        end_by: Callable[[dict[str, Any]], None],
        uneven_seconds: float = UNEVEN_END_SECONDS,
    ) -> None:
        self._ranks, self._heartbeats, self._helpers, self._end_by = ranks, heartbeats, helpers, end_by
        self._uneven_seconds = uneven_seconds
        self._ended_well: dict[int, float] = {}
        self._over = threading.Event()

    def start(self) -> None:
        """Look in a thread of our own."""
        threading.Thread(target=self._run, name="watcher", daemon=True).start()

    def finish(self) -> None:
        """Look no more."""
        self._over.set()

    def ended(self, end: ProcessEnd) -> None:
        """Note the end of a rank."""
        if not end.exit_code:
            self._ended_well[end.rank] = end.at
            self._heartbeats.done(end.rank)

    def _run(self) -> None:
        reaped_at = time.monotonic()
        while not self._over.wait(KEEPER_LOOK_SECONDS):
            if time.monotonic() - reaped_at > ORPHANS_LOOK_SECONDS:
                reap_orphans(self._ranks.started().values())
                reaped_at = time.monotonic()
            fault = self.look(time.time())
            if fault is not None:
                self._end_by(fault)
                say(fault["message"])
                self._ranks.signal(signal.SIGTERM)
                if not self._over.wait(15.0):
                    self._ranks.signal(signal.SIGKILL)
                return

    def look(self, now: float) -> dict[str, Any] | None:
        """Return how the worker must end, where that is so."""
        gone = [pid for pid in self._helpers if not is_alive(pid)]
        if gone and len(gone) == len(self._helpers):
            return exit_record.record(
                ExitCode.STORAGE,
                "the process that keeps the program's checkpoints ended before the program; its log has the reason",
            )
        running = self._ranks.pids()
        if not self._ended_well or not running:
            return None
        rank, at = min(self._ended_well.items(), key=lambda each: each[1])
        since = max([*self._ended_well.values(), self._heartbeats.moved_at])
        if now - since < self._uneven_seconds:
            return None
        words = (
            f"rank {rank} ended with exit code 0 while rank {min(running)} ran on for {(now - at) / 60:.0f} min, and "
            f"nothing was seen of it for {(now - since) / 60:.0f}: a program is done when all its ranks have ended"
        )
        return exit_record.record(1, words, rank=min(running))
