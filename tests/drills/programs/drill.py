"""make drill-programs: every kind of fault against a program that knows nothing of Muster, and what became of it.

    python -m tests.drills.programs.drill [--only KIND,KIND] [--compare torchrun,dlrover] [--lanes N]
                                          [--healthy MINUTES] [--results FILE] [--write docs/scorecard-programs.md]

The program is examples/programs/plain.py, untouched: two ranks of DistributedDataParallel that save every ten steps. A
run without a fault comes first: each later one must end with its weights, bit for bit. Faults that another launcher can
be given are done under that launcher, too. --dlrover names the dlrover-run of an environment that has it. Each lane has
an operator of its own and does one fault after the other; other launchers' runs are spread over the lanes.
Exit status 1 when a job of Muster's did not end as it ought to.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.drills.checkpoint.faulty_proxy import Plan, faulty_proxy
from tests.drills.programs.kinds import KINDS, Kind, is_hang
from tests.drills.programs.runs import END_SECONDS_MAX, RANKS, MusterRun, Site, launch
from tests.drills.programs.scorecard import HealthyRun, LauncherOutcome, Outcome, Results, other_figures
from tests.polling import eventually
from tests.s3_servers import BUCKET, KEYS, moto_server

from muster.words.status import Phase

NOTICE_SECONDS_MAX = 90.0
HANG_SECONDS_MAX = 60.0  # gloo gives a collective half an hour; another launcher waits for that
WEIGHTS_SECONDS_MAX = 600.0
ENDLESS_STEPS = 10_000_000
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
WORDS = ["--nnodes=1", f"--nproc-per-node={RANKS}", "--max-restarts=3"]
PORTS = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]


def inject(site: Site, kind: Kind, weights: Future[str]) -> Outcome:
    """Do one fault to a job of its own, and judge what came of it. `weights`: those of the run without a fault."""
    run = site.submit(kind.name, kind.command, f"s3://{BUCKET}/drill" if kind.on_s3 else None)
    try:
        at = time.time()
        if kind.inject is not None:
            run.await_training()
            at = kind.inject(run)
        if kind.cause is not None:
            with contextlib.suppress(AssertionError):
                eventually(lambda: run.detected(at) is not None, "the end of the attempt", NOTICE_SECONDS_MAX)
        with contextlib.suppress(AssertionError):
            eventually(lambda: run.status.phase.terminal, f"the end of {run.name}", END_SECONDS_MAX)
        return judge(kind, run, at, weights.result(WEIGHTS_SECONDS_MAX))
    except (AssertionError, RuntimeError, psutil.Error) as error:  # the drill goes on with the next kind
        return Outcome(
            kind.name, kind.description, str(kind.cause or "none"), deviations=[f"{type(error).__name__}: {error}"]
        )
    finally:
        run.heal()
        site.house.set_spec(run.uid, cancel=True)
        eventually(lambda: run.status.phase.terminal, f"{run.name} to be cancelled", 180)


def judge(kind: Kind, run: MusterRun, at: float, weights: str) -> Outcome:
    """Return the outcome after the job's end, or after the drill's patience with it."""
    status = run.status
    first = status.attempts[0].cause if status.attempts else None
    last = status.last_failure
    # A program that ends at once is judged by its second end.
    assigned = last.cause if last is not None and (kind.inject is None or first is None) else first
    outcome = Outcome(
        kind.name,
        kind.description,
        injected=str(kind.cause or "none"),
        assigned=str(assigned or "none"),
        detected=run.detected(at) if kind.cause is not None else None,
        recovered=run.next_step_after(at),
        lost_steps=run.lost_steps(),
        attempts=status.attempt,
        phase=str(status.phase),
        message=last.message if last is not None else "",
    )
    if outcome.assigned != outcome.injected:
        outcome.deviations.append(f"the cause is {outcome.assigned}, not {outcome.injected}")
    if status.phase is not kind.final_phase:
        outcome.deviations.append(f"the job is {status.phase}, not {kind.final_phase}: {status.because}")
    elif status.phase is Phase.SUCCEEDED and run.weights() != weights:
        outcome.deviations.append(f"it ends with other weights than without a fault: {run.weights() or 'none'}")
    if kind.attempts not in (None, status.attempt):
        outcome.deviations.append(f"{status.attempt} attempts, not {kind.attempts}")
    if left := run.left():
        outcome.deviations.append(f"{left} processes outlived the job")
    return outcome


def inject_elsewhere(
    command: list[str], root: Path, launcher: str, kind: Kind, weights: Future[str]
) -> LauncherOutcome:
    """Do the same fault to a run of another launcher."""
    assert kind.inject_elsewhere is not None
    run = launch(command, root, f"{launcher}-{kind.name}")
    try:
        run.await_training()
        at = kind.inject_elsewhere(run)
        patience = HANG_SECONDS_MAX if is_hang(kind) else NOTICE_SECONDS_MAX
        with contextlib.suppress(AssertionError):
            eventually(
                lambda: run.next_step_after(at) is not None or run.process.poll() is not None, "a step", patience
            )
        recovered = run.next_step_after(at)
        code = run.end(END_SECONDS_MAX if recovered is not None else 0.1)
        if code == 0:
            same = run.weights() == weights.result(WEIGHTS_SECONDS_MAX)
            how = (
                "done"
                if same
                else "done, with other weights"
                if run.weights()
                else "exit code 0, not trained to its end"
            )
        else:
            how = f"no step in {patience:.0f} s" if code is None else f"ended with {code}"
        return LauncherOutcome(launcher, kind.name, recovered, run.lost_steps(), how)
    except (AssertionError, RuntimeError, psutil.Error) as error:
        return LauncherOutcome(launcher, kind.name, None, 0, f"not done: {error}"[:300])
    finally:
        run.end(0.1)


def train_unharmed(site: Site) -> str:
    """Return the weights of a run without a fault. Raises RuntimeError where that does not end well."""
    began, run = time.monotonic(), site.submit("unharmed")
    eventually(lambda: run.status.phase.terminal, "the run without a fault", 240)
    status = run.status
    if status.phase is not Phase.SUCCEEDED or status.attempt != 1 or not run.weights():
        raise RuntimeError(f"without a fault the job is {status.phase}: {status.because}\n{run.log()[-3000:]}")
    print(f"{'unharmed':<16} weights {run.weights()}, {time.monotonic() - began:.0f} s", flush=True)
    return run.weights()


def watch_healthy(minutes: float, step_seconds: float) -> HealthyRun:
    """Let a job train for so long, and return what was said against it."""
    with tempfile.TemporaryDirectory(prefix="muster-healthy-") as folder:
        site = Site(Path(folder), {}, Plan())
        try:
            pace = {"DRILL_STEP_SECONDS": str(step_seconds)}
            run, loads = site.submit("healthy", steps=ENDLESS_STEPS, env=pace), []
            eventually(run.has_begun, "the healthy run to train", 240)
            until = time.monotonic() + minutes * 60
            while time.monotonic() < until and not run.status.phase.terminal:
                loads.append(os.getloadavg()[0])
                time.sleep(1)  # not a wait: so long it trains
            return HealthyRun(minutes, len(run.steps()), sum(loads) / len(loads), run.alarms())
        finally:
            site.close()


@dataclass
class Lanes:
    """Threads that take tasks until there are none, each with an operator of its own. They die with this process."""

    root: Path
    tasks: queue.SimpleQueue[Callable[[Site], None]]
    needs_s3: bool
    error: BaseException | None = None

    def run(self, lanes: int) -> None:
        """Do all tasks. Raises what a task raised; the other lanes end at their next task."""
        threads = [threading.Thread(target=self._lane, args=(number,), daemon=True) for number in range(lanes)]
        with contextlib.ExitStack() as self._stack:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)  # a signal is heard in between
        if self.error is not None:
            raise self.error

    def _lane(self, number: int) -> None:
        try:
            plan, store = Plan(), {}
            if self.needs_s3:
                server = self._stack.enter_context(moto_server())
                proxy = self._stack.enter_context(faulty_proxy(server.url, plan))
                store = {**KEYS, "AWS_ENDPOINT_URL": proxy, "AWS_EC2_METADATA_DISABLED": "true"}
            site = Site(self.root / f"lane-{number}", store, plan)
            self._stack.callback(site.close)
            while self.error is None:
                self.tasks.get_nowait()(site)
        except queue.Empty:
            return
        except BaseException as error:
            self.error = error


def drill(kinds: Sequence[Kind], others: dict[str, list[str]], results: Results, lanes: int = 1) -> None:
    """Do all of them; a fault under other launchers right after the same fault under Muster."""
    tasks: queue.SimpleQueue[Callable[[Site], None]] = queue.SimpleQueue()
    weights: Future[str] = Future()
    with tempfile.TemporaryDirectory(prefix="muster-programs-") as folder:
        elsewhere = Path(folder) / "elsewhere"
        elsewhere.mkdir()
        tasks.put(lambda site: weights.set_result(train_unharmed(site)))
        for kind in kinds:
            tasks.put(lambda site, kind=kind: results.add(inject(site, kind, weights)))  # type: ignore[misc]
            for launcher, command in others.items() if kind.inject_elsewhere is not None else ():
                tasks.put(
                    lambda site, kind=kind, launcher=launcher, command=command: results.add_elsewhere(  # type: ignore[misc]
                        inject_elsewhere(command, elsewhere, launcher, kind, weights)
                    )
                )
        Lanes(Path(folder), tasks, needs_s3=any(kind.on_s3 for kind in kinds)).run(lanes)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kinds, with commas between; `none`: only write the page")
    parser.add_argument("--compare", default="torchrun", help="other launchers, with commas between; empty: none")
    parser.add_argument("--dlrover", default="dlrover-run")
    parser.add_argument("--lanes", type=int, default=1, help="number of faults at a time")
    parser.add_argument("--healthy", type=float, default=0, help="minutes of a run without a fault, after the others")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="pace of that run")
    parser.add_argument("--results", type=Path, help="a JSON file to which this run's outcomes are added")
    parser.add_argument("--write", type=Path, help="the scorecard, of all that the file of results holds")
    parser.add_argument("--note", default="", help="a sentence for the page, such as what else the machine did")
    chosen = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whoever ends us early gets a clean machine too
    named = [name for name in chosen.only.split(",") if name]
    if unknown := set(named) - {"none", *(kind.name for kind in KINDS)}:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(k.name for k in KINDS)}")
    launchers = {"torchrun": [*TORCHRUN, *WORDS, *PORTS], "dlrover": [chosen.dlrover, "--standalone", *WORDS]}
    if unknown := {name for name in chosen.compare.split(",") if name} - set(launchers):
        parser.error(f"no such launcher: {', '.join(sorted(unknown))}; there are {', '.join(launchers)}")
    others = {name: launchers[name] for name in chosen.compare.split(",") if name}
    results = Results(chosen.results)
    if named != ["none"]:
        drill([kind for kind in KINDS if not named or kind.name in named], others, results, chosen.lanes)
    if chosen.healthy:
        results.add_healthy(watch_healthy(chosen.healthy, chosen.step_seconds))
    print(results.figures())
    if chosen.write:
        others_page = other_figures(chosen.write.read_text()) if chosen.write.exists() else ""
        chosen.write.write_text(results.page(chosen.note) + others_page)
    return 0 if results.good else 1


if __name__ == "__main__":
    sys.exit(main())
