"""One program, run by different launchers: as a job of a Muster operator, by plain torchrun, and by dlrover-run. The
ranks of each run note their steps in files (`hooks/sitecustomize.py`), from which losses and delays are counted."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tests.drills.checkpoint.faulty_proxy import Plan
from tests.integration.local.house import House
from tests.polling import eventually
from tests.processes import command_of, environment_of, kill, others

from muster.agent.announced import announce
from muster.local.cluster import StatusChange
from muster.operator.core.conditions import TRAINING_CONDITIONS
from muster.words.names import KEEPER_STATE, LOG
from muster.words.status import JobStatus, Phase

PROGRAM = Path(__file__).parents[3] / "examples" / "programs" / "plain.py"
HOOKS = Path(__file__).parent / "hooks"
RANKS, STEPS, SAVED_EVERY, FAULT_AT = 2, 160, 10, 30
FOLDER, STATE = "out", "state.pt"  # the example saves to its working directory
HUNG_SECONDS = 15  # `hang.stepSeconds` of all jobs; by itself Muster waits for half an hour
GRACE_SECONDS = 5.0  # after SIGTERM, in place of 90
END_SECONDS_MAX = 240.0


@dataclass(frozen=True)
class Step:
    """A step as a rank noted it."""

    pid: int
    step: int
    at: float


@dataclass
class Run:
    """One run of the program. `folder` holds its orders and the notes of its ranks."""

    name: str
    folder: Path

    def steps(self, rank: int = 0) -> list[Step]:
        path = self.folder / f"steps-{rank}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        parts = (line.split() for line in lines if line.endswith("\n"))
        return [Step(int(pid), int(step), float(at)) for pid, step, at in parts]

    def order(self, rank: int, kind: str, **details: Any) -> float:
        """Have a rank do something to itself after its next step; return when it began to."""
        new = self.folder / "order.part"
        new.write_text(json.dumps({"kind": kind, "details": details}))
        new.rename(self.folder / f"rank-{rank}.json")
        done = self.folder / f"rank-{rank}.done"
        eventually(done.exists, f"rank {rank} to take the order {kind}", 60)
        return float(done.read_text())

    def rank(self, rank: int) -> psutil.Process:
        return psutil.Process(self.steps(rank)[-1].pid)

    def launcher(self) -> psutil.Process:
        """The launcher of rank 1."""
        raise NotImplementedError

    def await_training(self) -> None:
        """Wait until a fault may come: there is a checkpoint to resume from, and there are steps to lose."""
        eventually(lambda: self.has_begun() and self.steps(0)[-1].step % SAVED_EVERY == 5, f"{self.name} to train", 240)

    def has_begun(self) -> bool:
        """Raises RuntimeError where it has ended before."""
        return bool(self.steps(0)) and self.steps(0)[-1].step >= FAULT_AT

    def log(self) -> str:
        raise NotImplementedError

    def weights(self) -> str:
        """Return the digest of the final weights, which the program prints; empty if it did not get there."""
        found = re.findall(r"weights ([0-9a-f]{16})", self.log())
        return str(found[-1]) if found else ""

    def lost_steps(self) -> int:
        """Return the number of steps that rank 0 took again."""
        steps = [each.step for each in self.steps(0)]
        return len(steps) - len(set(steps))

    def next_step_after(self, at: float) -> float | None:
        """Return when rank 0's first step of another process was done, in seconds after the fault."""
        before = {each.pid for each in self.steps(0) if each.at <= at}
        return next((each.at - at for each in self.steps(0) if each.at > at and each.pid not in before), None)


@dataclass
class MusterRun(Run):
    """A job of two workers with a rank each."""

    site: Site
    uid: str
    _announced: str = ""  # node with a spot notice
    _version: int = 0
    _changes: list[StatusChange] = field(default_factory=list)

    @property
    def status(self) -> JobStatus:
        return self.site.house.status(self.uid)

    def has_begun(self) -> bool:
        if self.status.phase.terminal:
            raise RuntimeError(f"{self.name} is {self.status.phase}: {self.status.because}")
        return super().has_begun() and self.status.checkpoint is not None

    def launcher(self) -> psutil.Process:
        return self.tree(1)[0]

    def tree(self, worker: int) -> list[psutil.Process]:
        """Return the processes of a worker of the first attempt, the launcher first."""
        return self.site.house.trees(self.uid)[1, worker]

    def keeper(self) -> psutil.Process:
        return next(each for each in self.tree(0) if "muster.trainer.programs.keeper" in command_of(each))

    def keeper_state(self) -> dict[str, Any]:
        path = self.site.house.state.worker(self.uid, 1, 0) / KEEPER_STATE
        state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return state

    def checkpoints(self) -> Path:
        """The folder that worker 0 writes to in the first attempt."""
        return self.site.house.state.worker(self.uid, 1, 0) / "work" / FOLDER

    def log(self) -> str:
        path = self.site.house.state.worker(self.uid, self.status.attempt, 0) / LOG
        return path.read_text(errors="replace") if path.exists() else ""

    def detected(self, at: float) -> float | None:
        """Return when the operator wrote down that the first attempt ends, in seconds after the fault."""
        self._read_changes()
        ending = (Phase.RESTARTING, Phase.STOPPING)
        moments = (c.at - at for c in self._changes if c.status.attempt == 1 and c.status.phase in ending)
        return next((seconds for seconds in moments if seconds >= 0), None)

    def _read_changes(self) -> None:
        while new := self.site.house.cluster.changes(self._version):
            self._version = new[-1].version
            self._changes += [change for change in new if change.uid == self.uid]

    def alarms(self) -> list[str]:
        """Return what was ever said against the job: ended attempts, and conditions of the training."""
        self._read_changes()
        ended = [f"attempt {each.number}: {each.cause}" for each in self.status.attempts if each.cause is not None]
        conditions = (each for change in self._changes for each in change.status.conditions if each.status == "True")
        return ended + sorted({each.type for each in conditions} & set(TRAINING_CONDITIONS))

    def announce_spot(self, node: str) -> None:
        """Announce that the node will be taken back."""
        announce(self.site.house.state.notices, node, "spot", {})
        self._announced = node

    def heal(self) -> None:
        """Undo what was broken around the job."""
        self.site.plan.rates, self.site.plan.late_seconds = {}, 0.05
        if self._announced:
            announce(self.site.house.state.notices, self._announced, "clear", {})

    def left(self) -> int:
        """Return the number of processes that outlive the job."""
        try:
            eventually(lambda: not self.site.house.trees(self.uid), f"the processes of {self.name} to be gone", 15)
        except AssertionError:
            return sum(map(len, self.site.house.trees(self.uid).values()))
        return 0


class Site:
    """An operator of one machine with four nodes. `store` holds the variables of an S3 server, which does to
    each request what `plan` says."""

    def __init__(self, root: Path, store: dict[str, str], plan: Plan) -> None:
        (root / "state").mkdir(parents=True)
        self.plan = plan
        self.orders = Path(tempfile.mkdtemp(prefix="muster-drill-", dir="/dev/shm"))  # ranks write there
        self.source = root / "source.tar.gz"
        with tarfile.open(self.source, "w:gz") as archive:
            archive.add(PROGRAM, PROGRAM.name)
            archive.add(HOOKS / "sitecustomize.py", "sitecustomize.py")
        self.house = House(root / "state", worker_command=None)
        self.house.environment |= store | {
            "DRILL_ORDERS": str(self.orders),
            "MUSTER_GRACE_SECONDS": str(GRACE_SECONDS),
            "MUSTER_OPERATOR_WORKER_ENV": json.dumps(["DRILL_ORDERS", "MUSTER_GRACE_SECONDS"]),
        }
        self.house.start("--nodes", "4")

    def submit(
        self,
        name: str,
        command: list[str] | None = None,
        checkpoint: str | None = None,
        steps: int = STEPS,
        env: dict[str, str] | None = None,
    ) -> MusterRun:
        (self.orders / name).mkdir()
        run = f"cd {FOLDER} && exec {sys.executable} ../{PROGRAM.name}"
        program = {
            "command": command or ["sh", "-c", run],
            "source": self.source.as_uri(),
            "hang": {"stepSeconds": HUNG_SECONDS},
            "steps": steps,
        }
        folder = {"folder": FOLDER} | ({"uri": checkpoint} if checkpoint else {})
        environment = {"STEPS": str(steps), "OMP_NUM_THREADS": "1"} | (env or {})
        uid = self.house.submit(
            name, nodes=RANKS, training=None, program=program, checkpoint=folder, env=environment
        )  # fmt: skip
        return MusterRun(name, self.orders / name, self, uid)

    def close(self) -> None:
        self.house.close()
        shutil.rmtree(self.orders, ignore_errors=True)


@dataclass
class LauncherRun(Run):
    """A run of another launcher, on one node with both ranks."""

    process: subprocess.Popen[bytes]

    def has_begun(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self.process.returncode}: {self.log()[-2000:]}")
        return super().has_begun()

    def launcher(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def end(self, seconds: float) -> int | None:
        """Return the exit code; None where it still runs after that time, and then end it."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            kill(process for process in others() if environment_of(process).get("RUN") == self.name)


def launch(command: list[str], root: Path, name: str) -> LauncherRun:
    """Start the program by another launcher, which is given its arguments; it saves to a folder of its own."""
    folder = root / name
    (folder / FOLDER).mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MUSTER_", "PET_"))}
    environment |= {
        "DRILL_ORDERS": str(root), "RUN": name, "PYTHONPATH": str(HOOKS), "STEPS": str(STEPS), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, str(PROGRAM)], cwd=folder / FOLDER, env=environment, stdout=log, stderr=log,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    return LauncherRun(name, folder, process)
