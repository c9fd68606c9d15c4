"""A whole platform as a user has it: `muster up` on a folder, and the `muster` command beside it."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import yaml
from tests import forked, processes
from tests.polling import WAIT_SECONDS_MAX, eventually

from muster.cli.up import READY_SECONDS_MAX
from muster.words.names import HEARTBEAT
from muster.words.signals import Heartbeat
from muster.words.state_folder import StateFolder

MUSTER = [sys.executable, "-m", "muster.cli"]
START_SECONDS_MAX = READY_SECONDS_MAX + 10.0
COMMAND_SECONDS_MAX = 300.0  # some wait for a job's whole life
ARCHITECTURE = {"dim": 32, "layers": 1, "heads": 2, "kvHeads": 1, "ffnDim": 64, "vocabSize": 260, "maxPositions": 64}


class House:
    """root: a fresh folder; state, home and configuration of everything that is started here lie in it."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.state = StateFolder(self.root / "state")
        self.process: subprocess.Popen[str] | None = None
        self.url = ""
        self.environ = {
            **{name: value for name, value in os.environ.items() if name != "COLUMNS"},  # a pipe has no width
            "HOME": str(self.root),
            "XDG_CONFIG_HOME": str(self.root / "config"),
            "MUSTER_STATE": str(self.state.root),
        }

    # -- the platform -------------------------------------------------------------------------------------------------

    def up(self, *words: str) -> None:
        """Start it and wait until it answers."""
        self.process = self.start("up", "--port", "0", "--nodes", "2", "--json", *words)
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], START_SECONDS_MAX)
        line = self.process.stdout.readline() if readable else ""
        assert line, f"`muster up` did not start: {self.process.stderr and self.process.stderr.read()}"
        self.url = json.loads(line)["url"]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send the signal; return exit code and standard error."""
        assert self.process is not None
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=WAIT_SECONDS_MAX)
        return self.process.returncode, errors

    def kill(self) -> None:
        """`kill -9` of the whole platform: `muster up` and all its children, at once."""
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        # The agent is started when the platform answers already.
        children = eventually(lambda: found if len(found := parent.children()) == 3 else [], "API, operator and agent")
        family = [parent, *children]
        processes.kill(family)  # a child may end by itself as soon as its parent is gone
        self.process.communicate()
        eventually(lambda: not any(map(processes.is_alive, family)), "the end of the platform")

    def child(self, module: str) -> psutil.Process:
        """The running child of `muster up` that runs that module."""
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children():
            if module in processes.command_of(child):
                return child
        raise AssertionError(f"no {module} runs")

    def close(self) -> None:
        """End everything of this folder, whatever state it is in."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        processes.kill(self.processes())
        eventually(lambda: not self.processes(), "every process of the house to be gone")

    def processes(self) -> list[psutil.Process]:
        """Platform, workers and ranks of this state folder."""
        mark = str(self.state.root)
        return [
            process
            for process in processes.others()
            if any(mark in word for word in processes.command_of(process))
            or mark in processes.environment_of(process).get("MUSTER_WORKER_DIR", "")
        ]

    # -- the command --------------------------------------------------------------------------------------------------

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*MUSTER, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environ,
            start_new_session=True,
        )

    def muster(self, *words: str, expect: int = 0, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run the command to its end; fail showing all it said when it ends with another code."""
        result = forked.run("muster.cli", words, self.environ, stdin, COMMAND_SECONDS_MAX)
        assert result.returncode == expect, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result

    def ask(self, *words: str, expect: int = 0) -> Any:
        """The same with --json; returns the document."""
        return json.loads(self.muster(*words, "--json", expect=expect).stdout)

    def phase(self, name: str) -> str:
        return str(self.ask("get", name)["status"]["phase"])

    def wait_for_step(self, name: str, step: int) -> None:
        """Until some rank's heartbeat has reached that step."""
        uid = self.ask("get", name)["id"]
        eventually(lambda: any(beat.step >= step for beat in self.beats(uid)), f"step {step} of {name}")

    def beats(self, uid: str) -> list[Heartbeat]:
        """The last heartbeat of every rank of every attempt."""
        files = (self.state.root / "jobs" / uid).glob("attempt-*/worker-*/" + HEARTBEAT.format(rank="*"))
        names = [file for file in files if file.stem.removeprefix("rank-").isdigit()]
        return [Heartbeat.model_validate_json(file.read_text()) for file in names]

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def job_file(self, name: str, **training: Any) -> Path:
        """A job of two workers that learns made-up words; keyword arguments replace parts of its training."""
        document = {
            "apiVersion": "muster.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": {
                "training": {
                    "model": {"architecture": ARCHITECTURE},
                    "data": {"train": [{"source": f"{self.corpus().name}/*.txt"}], "sequenceLength": 32},
                    "batch": {"tokensPerStep": 256, "microBatch": 2},
                    "optimizer": {"lr": 3e-3, "schedule": {"warmupSteps": 3}},
                    "parallel": {"shard": "fsdp"},
                    "length": {"steps": 12},
                    "evaluation": {"every": 6, "holdout": 0.1, "samples": 8},
                    **training,
                },
                "gang": {"nodes": 2},
                "checkpoint": {"every": 4},
            },
        }
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        return path

    def corpus(self) -> Path:
        folder = self.root / "corpus"
        if not folder.exists():
            folder.mkdir()
            dice = random.Random(4)
            words = ["".join(dice.choices("abcdefghij", k=dice.randint(2, 7))) for _ in range(40)]
            for number in range(60):
                text = " ".join(dice.choices(words, weights=range(1, 41), k=200))
                (folder / f"{number:03d}.txt").write_text(text)
        return folder
