"""`muster up`: API, operator and agent of one machine as children of one process, until it is told to stop.

Jobs outlive it. Workers are sessions of their own, so stopping the platform stops no training; the next `muster up` on
the same state folder adopts the gangs that run and starts the next attempt of those that have died meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from muster.cli import running
from muster.cli.errors import CliError, ExitStatus, usage
from muster.cli.output import json_wanted, print_json_line, say
from muster.cli.supervise import ChildProcess, how_it_ended
from muster.local import gpus, sandbox
from muster.words.names import Env
from muster.words.notices import MACHINE
from muster.words.state_folder import StateFolder
from muster.words.text import plural

READY_SECONDS_MAX = 180.0  # on a machine with other work; a child that dies is reported at once
STILL_STARTING_SECONDS = 15.0
ORPHAN_SECONDS_MAX = 5.0
# The operator gives gangs 30 s to commit where it stops them too.
STOP_SECONDS_MAX = 45.0
POLL_SECONDS = 0.05
DEFAULT_NODES = 4  # the operator's, muster.operator.settings
# What each extra brings and the platform can't start without; found without importing it.
NEEDED = {"fastapi": "api", "psutil": "operator", "torch": "trainer"}


@dataclass(frozen=True)
class PlatformOptions:
    """Options of `muster up`."""

    state: StateFolder
    host: str = "127.0.0.1"
    port: int = 8642
    nodes: int | None = None  # None: the operator's default
    gpus_per_node: int | None = None  # None: the operator's default
    stop_jobs: bool = False
    parent_pid: int | None = None  # stop when this process is gone; for programs that start a platform
    prometheus_url: str | None = None
    operator_port: int | None = None

    @property
    def url(self) -> str:
        """Return the address as seen from this machine: nobody can connect to an address that means all of them."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)  # noqa: S104 - it is looked for
        return f"http://{host}:{self.port}"

    def command(self) -> list[str]:
        """The same options as a command line, for --detach."""
        arguments = [sys.executable, "-m", "muster.cli", "up", "--state", str(self.state.root)]
        arguments += ["--host", self.host, "--port", str(self.port)]
        arguments += ["--nodes", str(self.nodes)] if self.nodes is not None else []
        arguments += ["--gpus-per-node", str(self.gpus_per_node)] if self.gpus_per_node is not None else []
        arguments += self.monitoring()
        return arguments + (["--stop-jobs"] if self.stop_jobs else [])

    def monitoring(self, port: str = "--operator-port") -> list[str]:
        """The options about monitoring. `port` is the name of the option that has the operator's port."""
        arguments = ["--prometheus-url", self.prometheus_url] if self.prometheus_url is not None else []
        return arguments + ([port, str(self.operator_port)] if self.operator_port is not None else [])


def run(options: PlatformOptions) -> None:
    """Start the platform, watch over it, stop it. Returns when it has been told to stop.

    Raises CliError: exit 2 when it can't start here, exit 1 when a part of it doesn't come up.
    """
    refuse_missing_extras()
    options = with_own_gpus(options)
    refuse_absent_gpus(options)
    lock = running.StateLock(options.state)
    stop = _StopSignals(options.parent_pid)
    # Children of a platform that was killed notice it within a second; until then they hold port and folder.
    patience = ORPHAN_SECONDS_MAX if lock.crashed_before else 0.0
    try:
        options = replace(options, port=free_port(options.host, options.port, patience))
        children = _children(options)
        try:
            _bring_up(options, children[:2], stop, patience)  # the agent is not waited for: `_watch` starts it
            if not stop.asked:
                lock.write(running.RunningPlatform(os.getpid(), options.url, time.time()))
                _welcome(options)
                _watch(children, stop)
                _farewell(options)
        finally:
            _stop_all(children, stop)
    finally:
        lock.release()
        stop.restore()


def free_port(host: str, port: int, patience_seconds: float = 0.0) -> int:
    """The port itself if it can be had, any free one for 0. Raises CliError (exit 2) naming what to do."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return _bind(host, port)
        except OverflowError:
            raise usage(f"there is no port {port}", code="bad-port") from None
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                continue
            in_use = error.errno == errno.EADDRINUSE
            reason = "is in use" if in_use else f"can't be had: {(error.strerror or str(error)).lower()}"
            other = port + 1 if port < 65535 else 8642
            raise usage(
                f"port {port} on {host} {reason}",
                f"choose another: muster up --port {other}, or --port 0 for any free one",
                "port-in-use" if in_use else "bad-port",
            ) from None


def _bind(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host.strip("[]"), port))
        return int(probe.getsockname()[1])


def refuse_missing_extras() -> None:
    missing = sorted({extra for module, extra in NEEDED.items() if importlib.util.find_spec(module) is None})
    if missing:
        raise usage(
            f"`muster up` runs the whole platform here, and the extras {', '.join(missing)} are not installed",
            "pip install 'muster-train[all]'",
            "extras-missing",
        )


def with_own_gpus(options: PlatformOptions, environ: Mapping[str, str] = os.environ) -> PlatformOptions:
    """Return the options with the GPUs of this machine divided over the nodes, as far as they leave that open."""
    if gpus.pretends(environ) or any(f"MUSTER_OPERATOR_{name}" in environ for name in ("NODES", "GPUS_PER_NODE")):
        return options
    if options.gpus_per_node is not None and options.nodes is not None:
        return options
    there = gpus.own_gpu_count(environ)
    if options.gpus_per_node is None and there:
        nodes = options.nodes or 1
        return replace(options, nodes=nodes, gpus_per_node=there // nodes)
    if options.gpus_per_node and there >= options.gpus_per_node:
        return replace(options, nodes=there // options.gpus_per_node)
    return options


def describe_gpus(options: PlatformOptions) -> str:
    """Return the line about the GPUs that jobs may have."""
    nodes, per_node = options.nodes or DEFAULT_NODES, options.gpus_per_node or 0
    there = gpus.gpu_count() or 0
    if there and not per_node:
        return f"No job gets the {plural(there, 'GPU')} of this machine; `muster up --nodes 1` gives them away"
    if not per_node:
        return f"No GPU is given away: {plural(nodes, 'node')} for jobs with gang.gpusPerNode: 0"
    model = gpus.gpu_model()
    given = f"{nodes * per_node} × {model}" if model else plural(nodes * per_node, "GPU")
    return f"{given}: {plural(nodes, 'node')} of {per_node} (--nodes and --gpus-per-node divide them otherwise)"


def refuse_absent_gpus(options: PlatformOptions) -> None:
    """Raise CliError (exit 2) where this machine has fewer GPUs than it would give away: their jobs could only fail."""
    requested = (DEFAULT_NODES if options.nodes is None else options.nodes) * (options.gpus_per_node or 0)
    there = gpus.gpu_count() if requested else None
    if there is None or there >= requested or gpus.pretends(os.environ):
        return
    present = f"{plural(there, 'GPU')} {'is' if there == 1 else 'are'} here" if there else "no GPU is here"
    driver = f"driver {gpus.driver_version()}" if gpus.driver_version() else "no NVIDIA driver is loaded"
    nodes = DEFAULT_NODES if options.nodes is None else options.nodes
    asked = f"{plural(nodes, 'node')} with {plural(options.gpus_per_node or 0, 'GPU')} each"
    instead = (
        f"muster up --nodes 1 --gpus-per-node {there}" if there else "muster up, for jobs with gang.gpusPerNode: 0"
    )
    raise usage(
        f"{asked} are asked for, and {present} ({driver})",
        f"{instead}; or {Env.PRETEND_GPUS}=1 to try out queues with GPUs that are not there",
        "too-few-gpus",
    )


def _children(options: PlatformOptions) -> tuple[ChildProcess, ...]:
    state = ["--state", str(options.state.root)]
    api = ["--host", options.host, "--port", str(options.port)]
    operator = ["--world", "local", *state]
    operator += ["--nodes", str(options.nodes)] if options.nodes is not None else []
    operator += ["--gpus-per-node", str(options.gpus_per_node)] if options.gpus_per_node is not None else []
    operator += ["--stop-workers"] if options.stop_jobs else []
    operator += options.monitoring(port="--port")
    agent = ["--node", MACHINE, "--folder", str(options.state.notices), "--disks", str(options.state.root)]
    agent += ["--host", "127.0.0.1", "--port", "0"]
    return (
        ChildProcess("the API", "muster.api", [*state, *api], options.state.logs / "api.log"),
        ChildProcess("the operator", "muster.operator", operator, options.state.logs / "operator.log"),
        ChildProcess("the agent", "muster.agent", agent, options.state.logs / "agent.log"),
    )


class _StopSignals:
    """SIGINT and SIGTERM while the platform runs: the first asks, the second insists. A parent's end asks too."""

    def __init__(self, parent_pid: int | None) -> None:
        self.signals = 0
        self.parent_pid = parent_pid
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._take) for number in numbers}

    def _take(self, number: int, _frame: object) -> None:
        self.signals += 1

    @property
    def asked(self) -> int:
        orphaned = self.parent_pid is not None and os.getppid() != self.parent_pid
        return self.signals or int(orphaned)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _bring_up(
    options: PlatformOptions, children: tuple[ChildProcess, ...], stop: _StopSignals, patience_seconds: float
) -> None:
    """Start all and wait for the first answer. A child that dies meanwhile is tried again only within patience."""
    began = time.monotonic()
    said_at = began
    for child in children:
        child.start()
    while not stop.asked and not _ready(options.host, options.port):
        now = time.monotonic()
        for child in children:
            if not child.alive and child.process is not None and now - began > patience_seconds:
                raise _not_started(child, how_it_ended(child.process.returncode))
            child.watch(now, say)
        if now - said_at >= STILL_STARTING_SECONDS:
            said_at = now
            say(f"{children[0].name} is still starting after {now - began:.0f} s; its log is {children[0].log}")
        if now - began > READY_SECONDS_MAX:
            raise _not_started(children[0], f"did not answer within {READY_SECONDS_MAX:g} s")
        time.sleep(POLL_SECONDS)


def _not_started(child: ChildProcess, how: str) -> CliError:
    tail = child.log_tail()
    return CliError(
        f"{child.name} {how} while starting{':' if tail else ''}\n{tail}".rstrip(),
        ExitStatus.FAILED,
        "not-started",
        next_step=f"the whole log is in {child.log}",
    )


def _ready(host: str, port: int) -> bool:
    connection = HTTPConnection(host.strip("[]"), port, timeout=10)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _welcome(options: PlatformOptions) -> None:
    if json_wanted():
        print_json_line({"url": options.url, "pid": os.getpid(), "state": str(options.state.root)})
    say(f"Muster is up at {options.url} (state: {options.state.root})", "bold green")
    say(f"  Every request needs a token: yours is in {options.state.admin_token}, where `muster` finds it")
    say(f"  {_what_jobs_reach()}")
    if not gpus.pretends(os.environ):
        say(f"  {describe_gpus(options)}")
    elif options.gpus_per_node:
        say(
            f"  {Env.PRETEND_GPUS} is set: the GPUs of these nodes are pretended, and their jobs train on the CPU",
            "yellow",
        )
    say("  muster submit examples/pretrain-stdlib.yaml --follow    train something, in another terminal")
    say("  muster ls                                               what is here")
    say(f"  {options.url + '/jobs':<56}the same in a browser (`muster open`)")
    say(f"  {options.url + '/docs':<56}the documents; the REST API is at /api/v1/docs")
    say("  Ctrl-C stops the platform; jobs go on and are adopted by the next `muster up` (--stop-jobs stops them too)")


def _what_jobs_reach() -> str:
    if not (gaps := sandbox.gaps()):
        return "A job is code that runs as you; Landlock and seccomp keep it to its own folders and to what it names"
    return f"A job is code that runs as you. It {'; it '.join(gaps)}. Let only people submit whom you trust so far"


def _watch(children: tuple[ChildProcess, ...], stop: _StopSignals) -> None:
    while not stop.asked:
        for child in children:
            child.watch(time.monotonic(), say)
        time.sleep(POLL_SECONDS)


def _farewell(options: PlatformOptions) -> None:
    """Say what becomes of the jobs that run."""
    names = _with_workers(options.state)
    if not names:
        say("Stopping. No job runs.")
        return
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    if options.stop_jobs:
        say(f"Stopping; these jobs save a checkpoint and stop too: {listed}. The next `muster up` resumes them.")
    else:
        say(f"Stopping. These jobs train on: {listed}. The next `muster up` on this state folder adopts them.")


def _stop_all(children: tuple[ChildProcess, ...], stop: _StopSignals) -> None:
    """Ask all, then wait for each; the second Ctrl-C waits no longer."""
    before = stop.signals
    for child in children:
        child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS_MAX
    while any(child.alive for child in children) and time.monotonic() < deadline:
        if stop.signals > max(before, 1):
            say("Stopping at once.")
            break
        time.sleep(POLL_SECONDS)
    for child in children:
        if child.alive:
            child.send_signal(signal.SIGKILL)
        child.reap()


def detach(options: PlatformOptions) -> None:
    """Run `muster up --detach`: start it in the background, and return when it answers. Raises CliError as `run`
    does."""
    refuse_missing_extras()
    options = with_own_gpus(options)
    refuse_absent_gpus(options)
    if (other := running.who(options.state)) is not None:
        raise running.already_running(options.state, other)
    running.StateLock(options.state).release()  # the folder can be written to
    free_port(options.host, options.port)
    log = options.state.logs / "up.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            options.command(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=options.state.root,
        )
    here = _wait_for_url(options.state, process, log)
    if json_wanted():
        print_json_line({"url": here.url, "pid": here.pid, "state": str(options.state.root)})
    say(f"Muster is up at {here.url} (pid {here.pid}, log: {log})", "bold green")
    if not gpus.pretends(os.environ):
        say(f"  {describe_gpus(options)}")
    say(f"  {running.stop_command(options.state)}    stops it")


def _wait_for_url(state: StateFolder, process: subprocess.Popen[bytes], log: Path) -> running.RunningPlatform:
    deadline = time.monotonic() + READY_SECONDS_MAX + 5
    while time.monotonic() < deadline:
        here = running.who(state)
        if here is not None and here.url and here.pid == process.pid:
            return here
        if process.poll() is not None:
            break
        time.sleep(POLL_SECONDS)
    tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-6:])
    raise CliError(
        f"`muster up` did not start:\n{tail}", ExitStatus.FAILED, "not-started", next_step=f"the log is in {log}"
    )


def down(state: StateFolder) -> None:
    """Stop the `muster up` of this folder, wherever it runs. Raises CliError when there is none, or it does not end."""
    here = running.who(state)
    if here is None:
        raise CliError(f"no `muster up` runs on {state.root}", ExitStatus.FAILED, "not-running", next_step="muster up")
    with contextlib.suppress(ProcessLookupError):
        os.kill(here.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS_MAX + 5
    while running.who(state) is not None:
        if time.monotonic() > deadline:
            raise CliError(
                f"`muster up` (pid {here.pid}) does not end", code="not-stopped", next_step=f"kill -9 {here.pid}"
            )
        time.sleep(POLL_SECONDS)
    names = _with_workers(state)
    if json_wanted():
        print_json_line({"stopped": True, "pid": here.pid, "jobsTrainingOn": names})
    say("Stopped." + (f" These jobs train on: {', '.join(names)}. The next `muster up` adopts them." if names else ""))


def _with_workers(state: StateFolder) -> list[str]:
    """Return the names of the jobs that have, or are about to have, workers on this machine: they outlive the
    platform."""
    from muster.local.cluster import LocalCluster
    from muster.words.names import Phase

    if not state.cluster.exists():
        return []
    phases = (Phase.STARTING, Phase.RUNNING, Phase.RESTARTING, Phase.STOPPING)
    return LocalCluster(state.cluster).names_in(phases)
