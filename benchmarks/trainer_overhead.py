"""What Muster's loop costs: against a bare FSDP2 loop, and against transformers.Trainer, in one run.

    python benchmarks/trainer_overhead.py [--ranks 2] [--preset muster-1m] [--repetitions 8] [--steps 8]

The sides take turns in blocks of a few steps on the same ranks, so that whatever else the machine does falls on all of
them; compared are the medians of neighbouring blocks. Muster runs whole: heartbeats, metrics, step records, the saver's
process, exact token weighting, the check of the numbers. The bare loop has the same model, data order and optimizer
under FSDP2; transformers.Trainer has the same shape, batch and optimizer under DDP, and is compared with Muster's DDP.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Cost = tuple[float, float]  # seconds, and CPU seconds of the whole process, which say more on a busy machine
AGAINST = {"bare FSDP2": "muster fsdp", "transformers.Trainer": "muster ddp"}
AIMS = {"bare FSDP2": 1.03, "transformers.Trainer": 0.95}
WARM_UP = 3


def main() -> int:
    given = _arguments()
    if os.environ.get("RANK"):
        _rank(given)
        return 0
    with tempfile.TemporaryDirectory(prefix="muster-overhead-") as folder:
        _start_ranks(given, Path(folder))
        seconds = json.loads((Path(folder) / "seconds.json").read_text())
    result = _report(seconds)
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _report(blocks: dict[str, list[list[Cost]]]) -> dict[str, Any]:
    """blocks: per side and repetition the cost of each step."""
    result: dict[str, Any] = {"blocks": blocks}
    for clock, title in enumerate(("seconds", "CPU seconds")):
        print(f"{title} per step on rank 0")
        for name, repetitions in blocks.items():
            values = sorted(cost[clock] for block in repetitions for cost in block)
            low, middle, high = (values[int(len(values) * part)] * 1e3 for part in (0.1, 0.5, 0.9))
            shown = f"median {middle:8.2f} ms  p10 {low:8.2f}  p90 {high:8.2f}"
            print(f"{name:>24}  {shown}  of {len(values)}")
        for theirs, ours in AGAINST.items():
            ratio = _ratio(blocks[ours], blocks[theirs], clock)
            met = "" if clock else ", met" if ratio <= AIMS[theirs] else ", MISSED"
            print(f"{ours} / {theirs}: {ratio:.3f} (aim at most {AIMS[theirs]}{met})")
            result[f"{title}: {ours} / {theirs}"] = ratio
    return result


def _ratio(ours: list[list[Cost]], theirs: list[list[Cost]], clock: int) -> float:
    """The median over repetitions of the ratio of medians. Neighbours in time are compared: a slow minute hits both."""

    def median(block: list[Cost]) -> float:
        return statistics.median(cost[clock] for cost in block)

    return statistics.median(median(mine) / median(other) for mine, other in zip(ours, theirs, strict=True))


def _start_ranks(given: argparse.Namespace, folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _write_corpus(folder / "corpus.txt")
    config = {
        "model": {"preset": given.preset},
        "data": {"train": [{"source": str(folder / "corpus.txt")}], "sequenceLength": given.sequence_length},
        "batch": {
            "tokensPerStep": given.sequence_length * given.micro_batch * given.ranks * given.accumulation,
            "microBatch": given.micro_batch,
        },
        "length": {"steps": 1_000_000},
    }
    shared = {
        "MUSTER_JOB_UID": "overhead",
        "MUSTER_CONFIG": json.dumps({"training": config, "checkpoint": {"every": 1_000_000}}),
        "MUSTER_CHECKPOINT_URI": f"file://{folder}/checkpoints",
        "MUSTER_WORKER_DIR": str(folder),
        "MUSTER_CACHE_DIR": str(folder / "cache"),
        "MUSTER_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(given.ranks),
        "LOCAL_WORLD_SIZE": str(given.ranks),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(given.ranks)
    ]
    try:
        if any(code := [rank.wait() for rank in ranks]):
            raise SystemExit(f"a rank failed: exit codes {code}")
    finally:
        for rank in ranks:
            rank.kill()


def _write_corpus(path: Path) -> None:
    """One long document, so that no sample has a border in it: transformers.Trainer would attend across."""
    dice = random.Random(1)
    words = ["".join(dice.choices("abcdefghijklmnop", k=dice.randint(2, 9))) for _ in range(500)]
    path.write_text(" ".join(dice.choices(words, k=400_000)))


def _rank(given: argparse.Namespace) -> None:
    import trainer_baselines  # beside this file

    from muster.contract.signals import TrainerPhase
    from muster.trainer.config import data_parallel, read_ranks, read_run
    from muster.trainer.data import open_data
    from muster.trainer.launch.process_control import process_started_at
    from muster.trainer.models import sharding
    from muster.trainer.train import loop
    from muster.trainer.train.origin import find_origin
    from muster.trainer.train.rank_state import RankState

    run, ranks = read_run(), read_ranks()
    device = sharding.choose_device(ranks)
    sharding.connect(device)
    origin = find_origin(run, print)
    data = open_data(run.training, origin.tokenizer, run.cache_dir, lambda line: None)
    rank_state = RankState(run.worker_dir, run.attempt, ranks.rank, process_started_at())
    rank_state.heartbeats.start()
    rank_state.activity.enter(TrainerPhase.STEP)

    def muster(shard: str) -> Callable[[], object]:
        asked = run.training.parallel.model_copy(update={"shard": shard})
        training = run.training.model_copy(update={"parallel": asked})
        layout = sharding.plan(origin.model, training, ranks, sharding.capacity(device, ranks))
        trainer = loop.Trainer(run, ranks, rank_state, origin, data, device, layout)
        loader = trainer.open_loader()
        return lambda: trainer.advance(loader)

    under_fsdp, under_ddp = muster("fsdp"), muster("ddp")
    theirs = loop.Loader(
        data.train,
        _start(run.training.seed),
        run.training.samples_per_step(),
        run.training.batch.micro_batch,
        data_parallel(run.training, ranks),
        device,
    )
    architecture = run.training.model.shape
    assert architecture is not None, "the benchmark trains a decoder of ours"
    bare = trainer_baselines.BareLoop(architecture, run.training, ranks, theirs)
    seconds: dict[str, list[list[Cost]]] = {}
    sides = [("muster fsdp", under_fsdp), ("bare FSDP2", bare.step)]
    for _ in range(WARM_UP):
        for _, side in sides:
            side()
    for repetition in range(given.repetitions * 2):
        for name, side in sides if repetition % 2 else reversed(sides):
            seconds.setdefault(name, []).append(_timed(side, given.steps // 2))

    samples = trainer_baselines.Samples(data.train)

    def hugging_face() -> list[Cost]:
        costs = trainer_baselines.hugging_face_steps(architecture, run.training, samples, given.steps + WARM_UP)
        return costs[WARM_UP:]

    _timed(under_ddp, WARM_UP)
    turns = [
        ("transformers.Trainer", hugging_face),
        ("muster ddp", lambda: _timed(under_ddp, given.steps)),
    ]
    for repetition in range(given.repetitions):
        for name, block in turns if repetition % 2 else reversed(turns):
            seconds.setdefault(name, []).append(block())
    if ranks.rank == 0:
        (run.worker_dir / "seconds.json").write_text(json.dumps(seconds))
    sys.stdout.flush()
    os._exit(0)


def _start(seed: int) -> Any:
    from muster.contract.checkpoint import DataCursor

    return DataCursor(seed=seed, epoch=0, sample=0)


def _timed(step: Callable[[], object], count: int) -> list[Cost]:
    """The first step of a block pays for caches that the other side emptied, on both sides alike; it is not counted."""
    found = []
    for number in range(count + 1):
        began, worked = time.perf_counter(), time.process_time()
        step()
        if number:
            found.append((time.perf_counter() - began, time.process_time() - worked))
    return found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--preset", default="muster-1m")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="steps of a block")
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
