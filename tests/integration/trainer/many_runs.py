"""A rank that trains the parts of each plan whose path it reads from standard input: one of `rank_pool`'s processes.

The ranks meet once and load torch once. Each writes down the samples that it trains on: the loader is watched, nothing
else of the trainer is changed.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

from muster.storage.small_files import write_whole
from muster.trainer.config import Ranks, read_ranks, read_run
from muster.trainer.data import Loader, StepBatch
from muster.trainer.launch.process_control import process_started_at
from muster.trainer.train import loop
from muster.trainer.train.rank_state import RankState


def watched(rank_state: RankState, ranks: Ranks, path: Path, stop_after: int | None) -> type[Loader]:
    class Watched(Loader):
        def next(self) -> StepBatch:
            batch = super().next()
            step = rank_state.step + 1
            with path.open("a") as file:
                file.write(json.dumps({"step": step, "ids": batch.sample_ids}) + "\n")
            if step == stop_after and ranks.rank == ranks.world - 1:
                rank_state.stop_wanted = True
            return batch

    return Watched


def main() -> int:
    faulthandler.enable()
    ranks, environment = read_ranks(), dict(os.environ)
    for line in sys.stdin:
        plan, codes = Path(line.rstrip("\n")), []
        part: dict[str, Any]
        for part in json.loads(plan.read_text()):
            os.environ.clear()
            os.environ.update(environment | part["environment"])
            run = read_run()
            run.worker_dir.mkdir(parents=True, exist_ok=True)
            rank_state = RankState(run.worker_dir, run.attempt, ranks.rank, process_started_at())
            loop.Loader = watched(rank_state, ranks, run.worker_dir / f"samples-{ranks.rank}.jsonl", part["stop_after"])  # type: ignore[misc]
            codes.append(int(loop.train(run, ranks, rank_state)))
        write_whole(plan.with_suffix(f".{ranks.rank}.done"), json.dumps(codes))
    return 0


if __name__ == "__main__":
    result = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(result)
