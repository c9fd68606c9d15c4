"""An operator as its own process over a folder, with one job: what the tests of this folder do things to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from tests.polling import WAIT_SECONDS_MAX, eventually

from muster.local.cluster import LocalCluster, NotFound
from muster.operator.local import processes
from muster.recipe.document import parse_job
from muster.words.state_folder import StateFolder
from muster.words.status import JobStatus, Phase

FAKE = (sys.executable, "-S", str(Path(__file__).with_name("fake_worker.py")))


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file that another process writes, without the one that it may be in the middle of."""
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


class House:
    def __init__(self, root: Path, worker_command: tuple[str, ...] | None = FAKE, *options: str) -> None:
        self.state = StateFolder(Path(os.path.realpath(root)))
        self.cluster = LocalCluster(self.state.cluster)
        self.options = options
        self.environment = dict(os.environ)
        if worker_command:
            self.environment["MUSTER_OPERATOR_WORKER_COMMAND"] = json.dumps(worker_command)
        self.operator: subprocess.Popen[bytes] | None = None

    # --- the operator ---

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        with open(self.state.root / "operator.log", "ab") as log:
            self.operator = subprocess.Popen(
                [sys.executable, "-m", "muster.operator", "--state", str(self.state.root), *self.options, *options],
                env=self.environment,
                stderr=log,
                stdout=log,
            )
        return self.operator

    def signal(self, number: signal.Signals) -> int:
        """Send it and return how the operator ended."""
        assert self.operator is not None
        self.operator.send_signal(number)
        return self.operator.wait(WAIT_SECONDS_MAX)

    def close(self) -> None:
        """End everything, whatever state it is in."""
        if self.operator is not None and self.operator.poll() is None:
            self.operator.kill()
            self.operator.wait()
        eventually(self._sweep, "every process of the house to be gone")

    def _sweep(self) -> bool:
        left = [member.process for member in processes.scan(self.state)]
        processes.kill_all(left)
        return not left

    @property
    def log(self) -> str:
        return (self.state.root / "operator.log").read_text()

    # --- jobs ---

    def submit(
        self, name: str = "tiny", steps: int = 30, nodes: int = 2, env: dict[str, str] | None = None, **spec: Any
    ) -> str:
        document = {
            "training": {
                "model": {"preset": "muster-1m"},
                "data": {"train": [{"source": "x.txt"}]},
                "batch": {"tokensPerStep": 2048},
                "length": {"steps": steps},
            },
            "gang": {"nodes": nodes},
            "recovery": {"backoffSeconds": 0.1, "excludeNodeAfter": 1000, "stopAfterNoProgress": 20},
            "runtime": {"env": [{"name": name, "value": value} for name, value in (env or {}).items()]},
        } | spec  # fmt: skip
        document = {key: value for key, value in document.items() if value is not None}
        submission = parse_job({"metadata": {"name": name}, "spec": document})
        return self.cluster.create(name, "default", submission.spec, {}).metadata.uid

    def status(self, uid: str) -> JobStatus:
        return self.cluster.get(uid).status

    def becomes(self, uid: str, *phases: Phase, timeout: float = 2 * WAIT_SECONDS_MAX) -> JobStatus:
        """The status once the job is in one of the phases; fails at once when it ends in another."""

        def there() -> JobStatus | None:
            status = self.status(uid)
            if status.phase.terminal and status.phase not in phases:
                raise RuntimeError(f"{status.phase}: {status.because}\n{self.log[-4000:]}")
            return status if status.phase in phases else None

        try:
            return eventually(there, f"{uid} to be {' or '.join(phases)}", timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}; its status: {self.status(uid).because}\n{self.log[-4000:]}") from None

    def set_spec(self, uid: str, **updates: Any) -> None:
        self.cluster.write_spec(uid, self.cluster.get(uid).spec.model_copy(update=updates))

    def is_gone(self, uid: str) -> bool:
        try:
            self.cluster.get(uid)
        except NotFound:
            return True
        return False

    # --- its processes ---

    def trees(self, uid: str) -> dict[tuple[int, int], list[psutil.Process]]:
        """(attempt, worker) → live processes, launcher first."""
        trees: dict[tuple[int, int], list[psutil.Process]] = {}
        for member in processes.scan(self.state):
            if member.key.job_uid == uid:
                trees.setdefault((member.key.attempt, member.key.worker), []).append(member.process)
        for tree in trees.values():
            top = processes.top_of(tree)
            tree.sort(key=lambda process: (process != top, process.pid))
        return trees

    def steps(self, uid: str) -> list[dict[str, Any]]:
        """What the fake ranks noted, in the order in which it happened."""
        path = self.job_folder(uid) / "trace.jsonl"
        return [json.loads(line) for line in whole_lines(path)]

    def newest_step(self, uid: str) -> int:
        """Rank 0's, who commits."""
        return max((noted["step"] for noted in self.steps(uid) if noted["rank"] == 0), default=0)

    def reaches(self, uid: str, step: int) -> None:
        def there() -> bool:
            return self.newest_step(uid) >= step

        eventually(there, f"step {step} of {uid}")

    def stands_at(self, uid: str, step: int) -> None:
        """Wait until the whole fake gang has come to FAKE_HOLD_AT, where it stands until `goes_on`."""

        def there() -> bool:
            return [noted["step"] for noted in self.steps(uid)].count(step) == 2

        eventually(there, f"both ranks of {uid} to be at step {step}")

    def goes_on(self, uid: str) -> None:
        (self.job_folder(uid) / "go").touch()

    def never_two(self, uid: str) -> bool:
        return not (self.job_folder(uid) / "double").exists()

    def job_folder(self, uid: str) -> Path:
        return self.state.checkpoints / uid
