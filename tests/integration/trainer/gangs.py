"""Real gangs for tests: a launcher as the operator starts it, or many short runs in one set of ranks."""

import json
import os
import random
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tests import torch_server
from tests.fork_server import ForkedProcess
from tests.integration.trainer import rank_pool, young_workers
from tests.polling import eventually
from tests.ports import free_port

from muster.words.names import EXIT_RECORD, HEARTBEAT, STEP_LOG, Env
from muster.words.signals import Heartbeat, StepRecord, WorkerExit

Launcher: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess"
ARCHITECTURE = {"dim": 32, "layers": 2, "heads": 4, "kvHeads": 2, "ffnDim": 64, "vocabSize": 260, "maxPositions": 32}
PATIENCE_SECONDS = 400.0
HOOKS = Path(__file__).with_name("hooks")


def write_corpus(folder: Path, documents: int = 60) -> str:
    """Files of made-up words with a pattern to learn, the same in every call; a source that matches them all."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(4)
    words = ["".join(dice.choices("abcdefghij", k=dice.randint(2, 7))) for _ in range(40)]
    for number in range(documents):
        text = " ".join(dice.choices(words, weights=range(1, 41), k=dice.randint(30, 120)))
        (folder / f"{number:03d}.txt").write_text(text)
    return str(folder / "*.txt")


def training(source: str, **changes: Any) -> dict[str, Any]:
    """A TrainingConfig document: 16 samples of 32 tokens a step."""
    document: dict[str, Any] = {
        "model": {"architecture": ARCHITECTURE},
        "data": {"train": [{"source": source}], "sequenceLength": 32},
        "batch": {"tokensPerStep": 512, "microBatch": 4},
        "optimizer": {"lr": 1e-3, "schedule": {"warmupSteps": 3}},
        "length": {"steps": 10},
        "seed": 3,
    }
    return document | changes


@dataclass
class Job:
    """One job's folders; each attempt has its own worker folders."""

    root: Path
    training: dict[str, Any]
    checkpoint: dict[str, Any] = field(default_factory=lambda: {"every": 1000})
    fence: str | None = None
    uid: str = "job-uid"
    device: str = "cpu"

    @property
    def folder(self) -> Path:
        return self.root / "checkpoints" / self.uid

    def worker_dir(self, attempt: int, worker: int = 0) -> Path:
        return self.root / f"attempt-{attempt}" / f"worker-{worker}"

    def environment(self, attempt: int, worker: int, resume_step: int) -> dict[str, str]:
        found = {
            Env.JOB: "job",
            Env.JOB_UID: self.uid,
            Env.ATTEMPT: str(attempt),
            Env.WORKER: str(worker),
            Env.RESUME_STEP: str(resume_step),
            Env.CHECKPOINT_URI: f"file://{self.folder}",
            Env.CONFIG: json.dumps({"training": self.training, "checkpoint": self.checkpoint}),
            Env.WORKER_DIR: str(self.worker_dir(attempt, worker)),
            Env.CACHE_DIR: str(self.root / "cache"),
            Env.DEVICE: self.device,
        }
        return found | ({Env.FENCE: self.fence} if self.fence else {})

    def start(
        self,
        attempt: int = 1,
        resume_step: int = 0,
        workers: int = 1,
        ranks: int = 1,
        port: int | None = None,
        dies: tuple[int, int] | None = None,
        forked: bool = False,
    ) -> "Gang":
        """Start an attempt as the operator does: a launcher per worker, each in a session of its own.

        forked: launchers and ranks come from a process that has loaded torch (young_workers.py), where a test is not
        about how they start. They begin to train at once, and what `ps` says of them is that process' own.

        dies: a rank, and the step of the attempt in whose midst it ends by SIGKILL (hooks/sitecustomize.py). A kill
        from outside would have to be quicker than the gang, which on a busy machine may be done by then.
        """
        port = port or free_port()
        environment = dict(os.environ)
        if dies is not None:
            rank, step = dies
            environment |= {
                "PYTHONPATH": str(HOOKS),
                "MUSTERTESTS_KILL": f"{rank}:{step}:{random.uniform(0.0, 0.03):.4f}",
            }
        launchers: list[Launcher] = []
        for worker in range(workers):
            directory = self.worker_dir(attempt, worker)
            directory.mkdir(parents=True)
            rendezvous = {
                "PET_NNODES": str(workers),
                "PET_NPROC_PER_NODE": str(ranks),
                "PET_NODE_RANK": str(worker),
                "PET_MASTER_ADDR": "127.0.0.1",
                "PET_MASTER_PORT": str(port),
            }
            variables = {**environment, **self.environment(attempt, worker, resume_step), **rendezvous}
            if forked:
                order = {"directory": str(directory), "ranks": ranks}
                launcher, connection = torch_server.start(young_workers.launcher, order, variables)
                connection.close()
                launchers.append(launcher)
                continue
            with (directory / "log").open("ab") as log:
                launchers.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "muster.trainer.launch"],
                        env=variables,
                        cwd=directory,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        return Gang(self, attempt, ranks, launchers)

    def steps(self, *attempts: int) -> list[StepRecord]:
        """Rank 0's records of these attempts, in the order written; without step 0."""
        lines = [
            line
            for attempt in attempts
            for line in (self.worker_dir(attempt) / STEP_LOG).read_text().splitlines(keepends=True)
        ]
        records = [StepRecord.model_validate_json(line) for line in lines if line.endswith("\n")]
        return [record for record in records if record.step]

    def commits(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("step-")) for path in (self.folder / "commits").glob("*.json"))

    def commit(self, step: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "commits" / f"step-{step:08d}.json").read_text())
        return found


@dataclass
class Gang:
    job: Job
    attempt: int
    ranks: int
    launchers: list[Launcher]

    def heartbeat(self, rank: int = 0) -> Heartbeat:
        directory = self.job.worker_dir(self.attempt, rank // self.ranks)
        return Heartbeat.model_validate_json((directory / HEARTBEAT.format(rank=rank)).read_text())

    def reaches(self, step: int, rank: int = 0) -> Heartbeat:
        """Wait until a rank has finished that step."""

        def there() -> Heartbeat | None:
            assert self.launchers[0].poll() is None, self.log()
            beat = self.heartbeat(rank) if self._has_beat(rank) else None
            return beat if beat and beat.step >= step else None

        found = eventually(there, f"step {step}", PATIENCE_SECONDS)
        assert found is not None
        return found

    def _has_beat(self, rank: int) -> bool:
        return (self.job.worker_dir(self.attempt, rank // self.ranks) / HEARTBEAT.format(rank=rank)).exists()

    def ends(self) -> list[WorkerExit]:
        """Wait for every launcher; what each left behind (a killed one: only its code)."""
        found = []
        for worker, launcher in enumerate(self.launchers):
            code = launcher.wait(PATIENCE_SECONDS)
            record = self.job.worker_dir(self.attempt, worker) / EXIT_RECORD
            if record.exists():
                found.append(WorkerExit.model_validate_json(record.read_text()))
                assert found[-1].exit_code == code
            else:
                found.append(WorkerExit(exit_code=code, at=0.0))
        return found

    def ends_well(self) -> None:
        assert [end.exit_code for end in self.ends()] == [0] * len(self.launchers), self.log()

    def log(self) -> str:
        return "\n".join(
            (self.job.worker_dir(self.attempt, worker) / "log").read_text() for worker in range(len(self.launchers))
        )


@dataclass(frozen=True)
class Part:
    """One attempt of a job in `train_many`. stop_after: the last rank is asked to stop while it trains that step."""

    job: Job
    attempt: int = 1
    resume_step: int = 0
    stop_after: int | None = None

    @property
    def plan(self) -> dict[str, Any]:
        return {
            "environment": self.job.environment(self.attempt, 0, self.resume_step),
            "stop_after": self.stop_after,
        }


def train_many(root: Path, ranks: int, parts: list[Part]) -> list[int]:
    """Train each part on the same ranks, one after the other; their exit codes. Raises when a rank fails."""
    root.mkdir(parents=True, exist_ok=True)
    plan = root / f"plan-{uuid.uuid4().hex}.json"
    plan.write_text(json.dumps([part.plan for part in parts]))
    rank_pool.train(ranks, plan)
    found: list[int] = json.loads(plan.with_suffix(".0.done").read_text())
    return found


def samples(job: Job, attempt: int, ranks: int, micro_batch: int) -> dict[int, list[int]]:
    """The sample ids of each step in their global order, from what each rank wrote down."""
    by_rank = [
        [json.loads(line) for line in (job.worker_dir(attempt) / f"samples-{rank}.jsonl").read_text().splitlines()]
        for rank in range(ranks)
    ]
    found = {}
    for lines in zip(*by_rank, strict=True):
        assert len({line["step"] for line in lines}) == 1
        passes = len(lines[0]["ids"]) // micro_batch
        found[lines[0]["step"]] = [
            sample
            for number in range(passes)
            for line in lines
            for sample in line["ids"][number * micro_batch : (number + 1) * micro_batch]
        ]
    return found
