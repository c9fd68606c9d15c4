"""Ranks that train the parts of each plan whose path they are sent: the processes of `rank_pool`.

They are forked from a process that has loaded torch, and meet once. Each writes down the samples that it trains on, and
its upload processes are forked, as that of a rank's only run is: the loader is watched, nothing else of the trainer is
changed.
"""

import faulthandler
import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.fork_server import Order, fork_server

from muster.storage.small_files import write_whole
from muster.trainer.checkpoint import upload_process, uploader
from muster.trainer.checkpoint.messages import SaveChannel
from muster.trainer.config import RankPosition, read_ranks, read_run
from muster.trainer.launch.process_control import process_started_at
from muster.trainer.train.rank_state import RankState

if TYPE_CHECKING:
    from muster.trainer.data import RankLoader, StepBatch


def watched(rank_state: RankState, ranks: RankPosition, path: Path, stop_after: int | None) -> "type[RankLoader]":
    from muster.trainer.data import RankLoader

    class Watched(RankLoader):
        def next(self) -> "StepBatch":
            batch = super().next()
            step = rank_state.step + 1
            with path.open("a") as file:
                file.write(json.dumps({"step": step, "ids": batch.sample_ids}) + "\n")
            if step == stop_after and ranks.rank == ranks.world - 1:
                rank_state.stop_wanted = True
            return batch

    return Watched


def upload(connection: socket.socket, order: Order) -> None:
    os.setpgid(0, 0)
    uploader.main(os.getppid(), connection)


def rank(connection: socket.socket, order: Order) -> None:
    """Train plans until the connection ends. order: the rank's variables and the file for its standard error."""
    os.environ.update(order["variables"])
    os.dup2(os.open(order["log"], os.O_WRONLY | os.O_APPEND), 2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    faulthandler.enable()
    uploads = fork_server(upload)

    def start_upload() -> tuple[upload_process.ProcessHandle, SaveChannel]:
        process, channel = uploads.start({})
        return process, SaveChannel(channel)

    upload_process._start_anew = start_upload
    ranks, environment = read_ranks(), dict(os.environ)
    for line in connection.makefile():
        train(Path(line.rstrip("\n")), ranks, environment)


def train(plan: Path, ranks: RankPosition, environment: dict[str, str]) -> None:
    from muster.trainer.train import loop

    codes = []
    part: dict[str, Any]
    for part in json.loads(plan.read_text()):
        os.environ.clear()
        os.environ.update(environment | part["environment"])
        run = read_run()
        run.worker_dir.mkdir(parents=True, exist_ok=True)
        rank_state = RankState(run.worker_dir, run.attempt, ranks.rank, process_started_at())
        loop.RankLoader = watched(rank_state, ranks, run.worker_dir / f"samples-{ranks.rank}.jsonl", part["stop_after"])  # type: ignore[misc]
        codes.append(int(loop.train(run, ranks, rank_state)))
    write_whole(plan.with_suffix(f".{ranks.rank}.done"), json.dumps(codes))
