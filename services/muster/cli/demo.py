"""`muster demo`: recovery shown in a few minutes, on a temporary platform.

Start the platform as a user would, submit a job over HTTP, kill one of its ranks, watch it come back, let it finish,
generate text from the best commit, and check by the API's own records that all of it really happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.cli import processes, up
from muster.cli.demo_checks import DemoEvidence, DemoKill, slowest_start_seconds
from muster.cli.errors import CliError, ExitStatus, usage
from muster.cli.output import say
from muster.client.address import Server, own_token
from muster.client.errors import MusterError
from muster.documents.examples import examples_folder
from muster.words.names import HEARTBEAT, heartbeat_rank
from muster.words.signals import Heartbeat
from muster.words.state_folder import StateFolder

if TYPE_CHECKING:
    from muster.cli.follow import JobMoment
    from muster.client.connection import Connection

START_SECONDS_MAX = up.READY_SECONDS_MAX + 10.0  # by then `muster up` has said itself why it does not answer
STOP_SECONDS_MAX = 50.0
LEFT_SECONDS_MAX = 20.0  # until the last process is gone; on a quiet machine none is left when the platform is gone
# On a busy machine all takes longer by one factor, which a job's start shows: most of it is importing torch. On a quiet
# one a start takes 5 s, the whole job 60 to 90 s, and a text 10 s.
DEMO_SECONDS_MAX, DEMO_STARTS_MAX = 900.0, 60.0
GENERATE_SECONDS_MAX, GENERATE_STARTS_MAX = 120.0, 15.0
# So many steps after the commit, so that the report has lost steps to show.
STEPS_AFTER_COMMIT = 8
PROMPT = "def "
SAMPLE_TOKENS = 240
EXAMPLE = "examples/pretrain-stdlib.yaml"


@dataclass(frozen=True)
class DemoPlatform:
    server: Server
    state: StateFolder


def run(job_file: Path, state: Path | None, keep: bool) -> DemoEvidence:
    """The demo. Leaves nothing running, however it ends. Raises CliError when it can't be done at all."""
    end_on_signals()
    folder = state_folder(state)
    gathered: DemoEvidence | None = None
    left: list[processes.FoundProcess] = []
    try:
        try:
            with platform(folder) as running:
                gathered = submit_and_watch(running, job_file)
        finally:
            left = sweep(folder)
        return replace(gathered, left_running=tuple(f"{each.pid} {each.what}" for each in left))
    finally:
        if keep:
            say(f"Everything is kept in {folder} (logs, checkpoints, database)")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def submit_and_watch(platform: DemoPlatform, job_file: Path, kills: bool = True, sample: bool = True) -> DemoEvidence:
    """Submit the job, and return its records once it has ended.

    If `kills`, a rank is killed on the way. If `sample`, text is generated from the best commit.
    """
    from muster.cli.submit import prepare, request_plan, send
    from muster.client.connection import Connection

    with Connection(platform.server) as client:
        document = prepare(str(job_file), None, [], local=True)
        request_plan(client, document)
        job = send(client, document)
        say(f"Submitted {job['metadata']['name']} to {platform.server.url} ({job['id']})", "bold")
        try:
            kill = _watch_and_kill(client, job, platform.state, kills)
        except BaseException:
            _cancel(client, job["id"])
            raise
        return _gather(client, platform, job["id"], kill, sample)


def _watch_and_kill(client: Connection, job: dict[str, Any], state: StateFolder, kills: bool) -> DemoKill | None:
    """Watch to the end; on the way, once there is something to lose, kill a rank, if asked to."""
    from muster.cli.follow import MomentDisplay, moments

    kill: DemoKill | None = None
    due: int | None = None  # a few steps after the first commit; later ones may come sooner than so many steps
    began, seconds_max = time.monotonic(), DEMO_SECONDS_MAX
    started = False
    with MomentDisplay(job["metadata"]["name"]) as display:
        for moment in moments(client, job["id"]):
            display.show(moment)
            if kills and kill is None and (commit := moment.status.get("checkpoint")) and commit["step"] > 0:
                due = due or commit["step"] + STEPS_AFTER_COMMIT
                kill = _kill_a_rank(job["id"], moment, state, max(due, commit["step"] + 1))
            passed = time.monotonic() - began
            if not started and (moment.status.get("progress") or {}).get("step"):
                started, seconds_max = True, max(DEMO_SECONDS_MAX, DEMO_STARTS_MAX * passed)
            if passed > seconds_max:
                raise CliError(f"the job did not end within {seconds_max:.0f} s: {moment.status['because']}")
    return kill


def _kill_a_rank(job_id: str, moment: JobMoment, state: StateFolder, step: int) -> DemoKill | None:
    """Send SIGKILL to the last rank of the last worker once it has trained that step, as a machine that loses power
    would.

    There is a commit to come back to then, and there are steps after it that must be trained again. Returns None if it
    has not trained that far yet.
    """
    commit, attempt = moment.status["checkpoint"], moment.status["attempt"]
    worker = moment.status["gang"]["wanted"] - 1
    if moment.phase != "Running":
        return None
    beat = _last_rank(state.worker(job_id, attempt, worker))
    if beat is None or beat.attempt != attempt or beat.step < step:
        return None
    if not processes.belongs_to(beat.pid, job_id, attempt):
        return None
    at = time.time()
    os.kill(beat.pid, signal.SIGKILL)
    whom = f"rank {beat.rank} (pid {beat.pid}) at step {beat.step}"
    say(f"SIGKILL to {whom}; the newest checkpoint is of step {commit['step']}", "bold red")
    return DemoKill(at, beat.pid, worker, beat.rank, attempt, beat.step, commit["step"])


def _last_rank(folder: Path) -> Heartbeat | None:
    """The heartbeat of the worker's highest rank."""
    ranks = [rank for path in folder.iterdir() if (rank := heartbeat_rank(path.name)) is not None]
    return Heartbeat.model_validate_json((folder / HEARTBEAT.format(rank=max(ranks))).read_text()) if ranks else None


def _gather(
    client: Connection, platform: DemoPlatform, job_id: str, kill: DemoKill | None, wants_sample: bool
) -> DemoEvidence:
    """The API's records of the ended job, once the database mirrors all of them."""
    from muster.cli.watch import all_events

    job = client.get(f"jobs/{job_id}")
    attempts = client.get(f"jobs/{job_id}/attempts")["items"]
    metrics = client.get(f"jobs/{job_id}/metrics", points=10_000)
    sample = DemoSample()
    if wants_sample and job["status"]["phase"] == "Succeeded":
        folder = client.get(f"jobs/{job_id}/checkpoints")["uri"]
        start = slowest_start_seconds(attempts, metrics["points"])
        sample = generate(folder, max(GENERATE_SECONDS_MAX, GENERATE_STARTS_MAX * start), start)
    return DemoEvidence(
        server=platform.server.url,
        job=job,
        attempts=tuple(attempts),
        events=tuple(all_events(client, job_id)),
        metrics=metrics,
        kill=kill,
        sample=sample.text,
        sample_fault=sample.fault,
        sample_skipped=sample.skipped,
        left_running=(),
        report=_report(client, job_id),
    )


def _report(client: Connection, job_id: str) -> str:
    """Write the job's `muster report` to a file that stays when the platform's folder goes, and return its path; empty
    if it can't be written."""
    from muster.cli.report import make_report

    try:
        page = make_report(client, job_id)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="muster-demo-", suffix=".html", delete=False
        ) as file:
            file.write(page)
    except (MusterError, OSError) as error:
        say(f"The report could not be written: {error}", "red")
        return ""
    return file.name


@dataclass(frozen=True)
class DemoSample:
    """Text that the best commit generated, or why there is none."""

    text: str = ""
    fault: str = ""
    skipped: str = ""


def generate(folder: str, seconds_max: float, start_seconds: float) -> DemoSample:
    """Return text from the best checkpoint in `folder`; a machine too busy to write it in time says nothing about the
    checkpoint."""
    say("Generating text from the best checkpoint …", "dim")
    command = [sys.executable, "-m", "muster.trainer.convert.generate", "--checkpoint", folder, "--step", "best"]
    command += ["--prompt", PROMPT, "--tokens", str(SAMPLE_TOKENS), "--seed", "7"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=seconds_max, check=False)
    except subprocess.TimeoutExpired:
        busy = f", where a worker's start took {start_seconds:.0f} s: this machine is busy"
        return DemoSample(skipped=f"generating took longer than {seconds_max:.0f} s{busy if start_seconds else ''}")
    if result.returncode:
        words = result.stderr.strip()[-1500:] or f"it ended with exit code {result.returncode} and said nothing"
        say(f"The text could not be generated:\n{words}", "red")
        return DemoSample(fault=words.splitlines()[-1])
    return DemoSample(result.stdout)


def _cancel(client: Connection, job_id: str) -> None:
    """Cancel the job, so that its workers end by themselves before the platform does; those that remain are swept."""
    with contextlib.suppress(MusterError, KeyboardInterrupt):
        client.exchange.patience_seconds = 2
        client.post(f"jobs/{job_id}:cancel")
        deadline = time.monotonic() + 15
        while client.get(f"jobs/{job_id}")["status"]["phase"] != "Cancelled" and time.monotonic() < deadline:
            time.sleep(0.2)


# -- a platform of its own ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def platform(folder: Path) -> Iterator[DemoPlatform]:
    """Run `muster up` on the folder and any free port, and stop it at the end."""
    command = [sys.executable, "-m", "muster.cli", "up", "--state", str(folder), "--port", "0", "--nodes", "2"]
    # Should the demo itself be killed, `up` notices and takes everything with it.
    command += ["--stop-jobs", "--parent-pid", str(os.getpid()), "--json"]
    log = folder / "up.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
    try:
        began = time.monotonic()
        url = _read_url(process, log)
        say(f"The platform answers at {url} after {time.monotonic() - began:.1f} s", "bold green")
        yield DemoPlatform(Server(url, "muster demo", own_token(StateFolder(folder))), StateFolder(folder))
    finally:
        _stop(process)


def _read_url(process: subprocess.Popen[bytes], log: Path) -> str:
    import select

    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], START_SECONDS_MAX)
    line = process.stdout.readline() if readable else b""
    try:
        return str(json.loads(line)["url"])
    except (ValueError, KeyError):
        _stop(process)
        words = log.read_text(errors="replace").strip()[-1500:]
        raise CliError(f"the platform did not start:\n{words}", code="not-started") from None


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def sweep(folder: Path) -> list[processes.FoundProcess]:
    """Return the processes that still run a moment after everything was stopped. They are ended here and reported."""
    deadline = time.monotonic() + LEFT_SECONDS_MAX
    while (left := processes.of_state(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    processes.end(left)
    return left


def state_folder(state: Path | None) -> Path:
    if state is None:
        return Path(tempfile.mkdtemp(prefix="muster-demo-")).resolve()
    if state.exists() and any(state.iterdir()):
        raise usage(f"{state} is not empty, and the demo wants a state folder of its own", "choose a new folder")
    state.mkdir(parents=True, exist_ok=True)
    return state.resolve()


def end_on_signals() -> None:
    """Make SIGTERM and SIGHUP end the demo as Ctrl-C does: by way of every `finally`."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)


def find_example(given: Path | None) -> Path:
    """--job, else the example of the checkout. Raises CliError (exit 2) where there is none."""
    if given is not None:
        return given
    if (Path.cwd() / EXAMPLE).is_file():
        return Path.cwd() / EXAMPLE
    if (folder := examples_folder()) is not None:
        return folder / Path(EXAMPLE).name
    raise CliError(
        f"{EXAMPLE} is not here",
        ExitStatus.USAGE,
        "no-example",
        next_step="run it in a checkout, or give a file: --job FILE",
    )
