"""A whole platform (`muster up`: API, operator, torchrun, ranks) for a drill, and one job on it to do things to."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tests.drills.faults.watchers import Agent, Prometheus
from tests.polling import eventually
from tests.ports import free_port
from tests.processes import command_of, others, send

from muster.cli import processes as platform_processes
from muster.client.address import Server, own_token
from muster.client.connection import Connection
from muster.client.errors import Conflict
from muster.local.cluster import LocalCluster, StatusChange
from muster.operator.local import processes
from muster.operator.local.processes import WorkerKey
from muster.words.names import HEARTBEAT, STEP_LOG
from muster.words.signals import Heartbeat, StepRecord
from muster.words.state_folder import StateFolder
from muster.words.status import JobStatus

HOOKS = Path(__file__).parent / "hooks"
NODES, SPARES = 2, 2
STEPS, COMMIT_EVERY = 120, 20
SHAPE = {"dim": 64, "layers": 2, "heads": 2, "kvHeads": 1, "ffnDim": 128, "vocabSize": 260, "maxPositions": 128}
START_SECONDS_MAX = 300.0
END_SECONDS_MAX = 600.0
GONE_SECONDS_MAX = 60.0


class Platform:
    """environment: on top of this process's own, for the platform and, through it, its workers."""

    def __init__(self, root: Path, environment: dict[str, str]) -> None:
        self.state = StateFolder(Path(os.path.realpath(root)))
        self.environment = dict(environment)
        self.state.root.mkdir(parents=True, exist_ok=True)
        self.orders = Path(tempfile.mkdtemp(prefix="muster-drill-", dir="/dev/shm"))  # ranks rename the orders in it
        self.texts = self.state.root.parent / "texts"  # several documents, so that some can be held out
        self.texts.mkdir(exist_ok=True)
        for path in sorted(Path(json.__file__).parent.glob("*.py")):
            (self.texts / f"{path.stem}.txt").write_text(path.read_text() * 4)
        self.process: subprocess.Popen[bytes] | None = None
        self.agents: list[Agent] = []
        operator_port = free_port()
        self.prometheus = Prometheus(self.state.root / "prometheus", operator_port)
        self.environment |= {
            "MUSTER_OPERATOR_PORT": str(operator_port),
            "MUSTER_OPERATOR_PROMETHEUS_URL": self.prometheus.url,
            # Workers inherit these; a job itself may not say what a process of this machine loads.
            "PYTHONPATH": str(HOOKS),
            "DRILL_ORDERS": str(self.orders),
            "MUSTER_OPERATOR_WORKER_ENV": json.dumps(["DRILL_ORDERS"]),
        }

    def start(self) -> None:
        self.prometheus.start()
        command = [sys.executable, "-m", "muster.cli", "up", "--state", str(self.state.root), "--port", "0"]
        command += ["--nodes", str(NODES + SPARES), "--stop-jobs", "--parent-pid", str(os.getpid()), "--json"]
        with (self.state.root / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], START_SECONDS_MAX)
        line = self.process.stdout.readline() if readable else b""
        if not line:
            raise RuntimeError(f"the platform did not start: {(self.state.root / 'up.log').read_text()[-2000:]}")
        self.client = Connection(Server(json.loads(line)["url"], "the drill", own_token(self.state)))
        self.cluster = LocalCluster(self.state.cluster)

    def stop(self) -> list[str]:
        """Stop all; what had to be swept away."""
        self._forget_agents()
        self.prometheus.kill()
        if self.process is not None:
            self.client.close()
            send(self.processes(), signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(START_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        deadline = time.monotonic() + GONE_SECONDS_MAX
        while (left := platform_processes.of_state(self.state.root)) and time.monotonic() < deadline:
            time.sleep(0.1)
        platform_processes.end(left)
        shutil.rmtree(self.orders, ignore_errors=True)
        return [found.what for found in left]

    def agent(self, node: str) -> Agent:
        self.agents.append(Agent(self.state.notices, node))
        return self.agents[-1]

    def heal(self) -> None:
        """What was broken beside the jobs is whole again."""
        self._forget_agents()
        self.prometheus.start()

    def _forget_agents(self) -> None:
        while self.agents:
            self.agents.pop().forget()

    def processes(self) -> list[psutil.Process]:
        """All of it: platform, launchers, ranks and what they started."""
        pids = {found.pid for found in platform_processes.of_state(self.state.root)}
        return [process for process in others() if process.pid in pids]

    def part(self, module: str) -> psutil.Process:
        """The process of one part, such as muster.operator."""

        def there() -> psutil.Process | None:
            found = (each for each in self.processes() if f"-m {module} " in f"{' '.join(command_of(each))} ")
            return next(found, None)

        return eventually(there, f"{module} to run", START_SECONDS_MAX)

    def submit(self, name: str, **changes: Any) -> Job:
        (self.orders / name).mkdir()
        document = self.document(name, **changes)
        job = Job(self, name, str(self.client.submit(document)["id"]), document)
        eventually(job.exists, f"{name} to come from the API's database into the cluster", START_SECONDS_MAX)
        return job

    def document(self, name: str, **changes: Any) -> dict[str, Any]:
        """changes: replace top-level keys of the spec; those of `training` are merged one level deep."""
        training = {
            "model": {"architecture": SHAPE},
            "data": {"train": [{"source": str(self.texts)}], "sequenceLength": 128},
            "optimizer": {"lr": 1e-3},
            "batch": {"tokensPerStep": 1024, "microBatch": 4},
            "parallel": {"shard": "fsdp"},
            "length": {"steps": STEPS},
            "seed": 7,
            "deterministic": True,
        } | changes.pop("training", {})  # fmt: skip
        environment = {"OMP_NUM_THREADS": "1"} | changes.pop("env", {})
        spec = {
            "training": training,
            "gang": {"nodes": NODES},
            "checkpoint": {"every": COMMIT_EVERY},
            "runtime": {"env": [{"name": key, "value": value} for key, value in environment.items()]},
        } | changes
        return {"metadata": {"name": name}, "spec": spec}


@dataclass
class Job:
    """One job of the platform, seen as a bystander sees it: files, processes, and the status's history."""

    platform: Platform
    name: str
    uid: str
    document: dict[str, Any]
    _version: int = 0
    _changes: list[StatusChange] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return int(self.document["spec"]["training"]["length"]["steps"])

    def exists(self) -> bool:
        return self.uid in self.platform.cluster.written_after(0)

    def status(self) -> JobStatus:
        return self.platform.cluster.get(self.uid).status

    def created_at(self) -> float:
        return self.platform.cluster.get(self.uid).metadata.creation_timestamp

    def changes(self) -> list[StatusChange]:
        """Every status that was ever written, oldest first."""
        while new := self.platform.cluster.changes(self._version):
            self._version = new[-1].version
            self._changes += [change for change in new if change.uid == self.uid]
        return self._changes

    def folder(self, attempt: int, worker: int) -> Path:
        return self.platform.state.worker(self.uid, attempt, worker)

    def records(self, attempt: int) -> list[StepRecord]:
        path = self.folder(attempt, 0) / STEP_LOG
        lines = path.read_text().splitlines() if path.exists() else []
        return [StepRecord.model_validate_json(line) for line in lines if line.endswith("}")]

    def heartbeat(self, attempt: int, rank: int) -> Heartbeat | None:
        try:
            return Heartbeat.model_validate_json(
                (self.folder(attempt, rank) / HEARTBEAT.format(rank=rank)).read_bytes()
            )
        except (OSError, ValueError):
            return None

    def trains_at(self, step: int, commit: int, attempt: int = 1) -> None:
        """Wait until that step is done and that commit exists."""

        def there() -> bool:
            status, beat = self.status(), self.heartbeat(attempt, 0)
            if status.phase.terminal:
                raise RuntimeError(f"{self.name} is {status.phase}: {status.because}")
            return beat is not None and beat.step >= step and (beat.last_commit_step or 0) >= commit

        eventually(there, f"step {step} of {self.name}", END_SECONDS_MAX)

    def first_step_after(self, attempt: int) -> float | None:
        """When the first step of any later attempt was done."""
        for later in range(attempt + 1, self.status().attempt + 1):
            if records := self.records(later):
                return records[0].at
        return None

    def tree(self, attempt: int, worker: int) -> list[psutil.Process]:
        """Live processes of one worker, its launcher first."""
        tree = processes.members(processes.scan(self.platform.state), WorkerKey(self.uid, attempt, worker))
        top = processes.top_of(tree)
        return sorted(tree, key=lambda process: (process != top, process.pid))

    def rank(self, attempt: int, rank: int) -> psutil.Process:
        beat = eventually(lambda: self.heartbeat(attempt, rank), f"a heartbeat of rank {rank}")
        return psutil.Process(beat.pid)

    def order(self, rank: int, kind: str, **more: Any) -> float:
        """Have a rank do something to itself in its next step; when it began to."""
        done = self.leave_order(rank, kind, **more).with_suffix(".done.json")
        eventually(done.exists, f"rank {rank} to take the order {kind}", START_SECONDS_MAX)
        return float(json.loads(done.read_text())["at"])

    def leave_order(self, rank: int, kind: str, **more: Any) -> Path:
        folder = self.platform.orders / self.name
        (folder / "order.part").write_text(json.dumps({"kind": kind, **more}))
        return (folder / "order.part").rename(folder / f"rank-{rank}.json")

    def ends(self, seconds: float = END_SECONDS_MAX) -> JobStatus:
        """Its status once it has ended, or as it is when the time is over."""
        with contextlib.suppress(AssertionError):
            eventually(lambda: self.status().phase.terminal, f"the end of {self.name}", seconds)
        return self.status()

    def cancel(self) -> None:
        members = processes.scan(self.platform.state)
        send((member.process for member in members if member.key.job_uid == self.uid), signal.SIGCONT)
        with contextlib.suppress(Conflict):  # it may end by itself at the same moment
            self.platform.client.post(f"jobs/{self.uid}:cancel")
        eventually(lambda: self.status().phase.terminal, f"{self.name} to be cancelled: {self.status().because}", 180)

    def left_running(self) -> int:
        """Processes of the job that outlive it."""
        deadline = time.monotonic() + GONE_SECONDS_MAX
        while (left := self._living()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def _living(self) -> int:
        return sum(member.key.job_uid == self.uid for member in processes.scan(self.platform.state))

    def losses(self) -> dict[int, float]:
        """By step, as the attempt saw it that trained it last."""
        found: dict[int, float] = {}
        for attempt in range(1, self.status().attempt + 1):
            for record in self.records(attempt):
                found[record.step] = record.loss
        found.pop(0, None)  # what was evaluated before the first step
        return found


@contextlib.contextmanager
def platform(root: Path, environment: dict[str, str]) -> Iterator[Platform]:
    house = Platform(root, environment)
    try:
        house.start()
        yield house
    finally:
        house.stop()
