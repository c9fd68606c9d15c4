"""Nodes of a spot market on one machine: per virtual node a metadata service and the real agent that polls it, a real
operator, a real S3 server behind a proxy that answers some requests with 503."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.drills.checkpoint.faulty_proxy import Plan, faulty_proxy
from tests.integration.local.house import House
from tests.polling import eventually
from tests.s3_servers import BUCKET, KEYS, rclone_server
from tests.unit.agent.mock_imds import ACTION, MockImds, mock_imds

from muster.words.names import STEP_LOG
from muster.words.signals import StepRecord

SHAPE = {"dim": 64, "layers": 2, "heads": 2, "kvHeads": 1, "ffnDim": 128, "vocabSize": 260, "maxPositions": 256}
STEPS = 1_000_000  # the drill ends it
COMMIT_EVERY = 40  # steps: so that a notice now and then meets an upload in flight
KEPT = 1_000_000  # checkpoints
PATIENCE_SECONDS = 400.0


@dataclass
class Market:
    """imds: of each node, by its name. plan: what the proxy before the store does."""

    house: House
    imds: dict[str, MockImds]
    plan: Plan
    environment: dict[str, str]

    def submit(self, name: str, workers: int) -> str:
        text = self.house.state.root.parent / "text.txt"
        if not text.exists():
            text.write_text("".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py"))))
        training = {
            "model": {"architecture": SHAPE},
            "data": {"train": [{"source": str(text)}], "sequenceLength": 128},
            "batch": {"tokensPerStep": 2048, "microBatch": 4},
            "length": {"steps": STEPS},
        }
        return self.house.submit(
            name=name,
            nodes=workers,
            training=training,
            env=self.environment | {"OMP_NUM_THREADS": "1"},  # the gangs share two cores
            # All are kept, so that the one of the notice is still there when the drill reads it.
            checkpoint={"every": COMMIT_EVERY, "uri": f"s3://{BUCKET}/drill", "keep": {"last": KEPT}},
            # Were a retry consumed, the job would end: the strictest judge of "none is".
            recovery={"budgets": {"infrastructure": 0, "hang": 0, "unknown": 0}, "backoffSeconds": 0.1},
            gang={"nodes": workers, "capacity": {"prefer": "any"}},
        )

    def steps(self, uid: str, attempt: int) -> list[StepRecord]:
        """Rank 0's, of one attempt; a half line is not there yet."""
        path = self.house.state.worker(uid, attempt, 0) / STEP_LOG
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [StepRecord.model_validate_json(line) for line in lines if line.endswith("\n")]

    def interrupt(self, node: str) -> float:
        """Now AWS says that it takes the node back in two minutes; returns when that was said."""
        now = time.time()
        ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now + 120))
        self.imds[node].interrupt("terminate", ends)
        return now

    def replace(self, node: str) -> None:
        """A new instance has the node's name."""
        self.imds[node].documents.pop(ACTION, None)
        path = self.house.state.notices / f"{node}.json"
        eventually(lambda: not path.exists(), f"the agent of {node} to see that nothing is announced")

    @contextlib.contextmanager
    def as_us(self) -> Iterator[None]:
        """This process reads the store as the workers do."""
        before = dict(os.environ)
        os.environ.update(self.environment)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextlib.contextmanager
def market(root: Path, nodes: int, refused: float, seed: int = 0) -> Iterator[Market]:
    """refused: the share of requests to the store that are answered with 503."""
    (root / "state").mkdir()
    (root / "s3").mkdir()
    plan = Plan(seed=seed, rates={"slow_down": refused})
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(rclone_server(root / "s3"))
        proxy = stack.enter_context(faulty_proxy(server.url, plan))
        environment = {**KEYS, "AWS_ENDPOINT_URL": proxy, "AWS_EC2_METADATA_DISABLED": "true"}
        house = House(root / "state", worker_command=None)
        house.environment |= environment
        names = [f"local-{index}" for index in range(nodes)]
        services = {name: stack.enter_context(mock_imds()) for name in names}
        stack.callback(house.close)
        house.start("--nodes", str(nodes))
        for name in names:
            stack.enter_context(_agent(house, name, services[name].address))
        yield Market(house, services, plan, environment)


@contextlib.contextmanager
def _agent(house: House, node: str, imds: str) -> Iterator[None]:
    log = house.state.root / f"agent-{node}.log"
    options: dict[str, Any] = {
        "--node": node, "--imds": imds, "--folder": house.state.notices, "--host": "127.0.0.1", "--port": 0,
        "--kernel-log": os.devnull, "--disks": house.state.root,
    }  # fmt: skip
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "muster.agent", *(str(word) for pair in options.items() for word in pair)],
            stdout=file,
            stderr=file,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(120)
