"""Layouts of one model over four ranks against one rank: losses, norms of gradients, and the bytes that ranks send.

    python benchmarks/parallel.py [--only llama] [--steps 200] [--table] [--json FILE]

Each family trains from the same weights, on the same packed rows, by the trainer's own loader, model and step: once on
one rank, and on four processes (gloo, fp32) under every sharding with every context that divides them. Counted are the
bytes that rank 0 gives to torch's collectives for others, less what it keeps; the formula is muster.plan.communication.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RANKS, LENGTH, ROWS = 4, 64, 8
SHARDINGS = ("ddp", "zero2", "fsdp", "hsdp")
CONTEXTS = (1, 2, 4)
FAMILIES = ("decoder", "llama-3.1", "qwen3", "mistral", "gemma-3", "qwen3-moe", "gpt-oss")
OWN = {"dim": 32, "layers": 2, "heads": 4, "kvHeads": 2, "ffnDim": 64, "vocabSize": 288, "maxPositions": 256}


@dataclass(frozen=True)
class Outcome:
    """Result of one layout: `sent` are bytes by dimension in a step, counted and by the formula."""

    losses: list[float]
    norms: list[float]
    sent: dict[str, list[int]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families whose name holds this text")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--table", action="store_true", help="print the table of docs/parallelism.md too")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        _rank(given.rank, given.steps)
        return 0
    lines = []
    for family in (each for each in FAMILIES if given.only in each):
        lines += _compare(family, given.steps)
    if given.table:
        print("| family | layout | loss, relative | norm, relative | sent: data | context |\n|---|---|--:|--:|--:|--:|")
        print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    if given.json:
        given.json.write_text(json.dumps(lines))
    return 0


def _compare(family: str, steps: int) -> list[tuple[str, ...]]:
    with tempfile.TemporaryDirectory(prefix="muster-parallel-") as text:
        folder = Path(text)
        if family != "decoder":
            from tests.model_families import write_model

            (folder / "model").mkdir()
            write_model(folder / "model", family)
        alone, layouts = (_run(family, folder, ranks, steps) for ranks in (1, RANKS))
    (reference,) = alone.values()
    lines = []
    for name, outcome in layouts.items():
        loss, norm = _apart(outcome.losses, reference.losses), _apart(outcome.norms, reference.norms)
        sent = [f"{counted:,} ({counted / max(formula, 1) - 1:+.1%})" if formula else "0"
                for counted, formula in outcome.sent.values()]  # fmt: skip
        lines.append((family, name, f"{loss:.1e}", f"{norm:.1e}", *sent))
        print("  ".join(f"{each:<24}" for each in lines[-1]), flush=True)
    return lines


def _apart(measured: list[float], reference: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(measured, reference, strict=True))


def _run(family: str, folder: Path, ranks: int, steps: int) -> dict[str, Outcome]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    about = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    about |= {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, "--rank", family, "--steps", str(steps)]
    started = [
        subprocess.Popen(command, env={**os.environ, **about, "RANK": str(n), "LOCAL_RANK": str(n)}, cwd=folder)
        for n in range(ranks)
    ]
    if codes := [code for each in started if (code := each.wait(3600))]:
        raise SystemExit(f"{family}: the ranks ended with {codes}")
    reported = json.loads((folder / f"outcome-{ranks}.json").read_text())
    return {name: Outcome(**outcome) for name, outcome in reported.items()}


# --- one rank ---


def _rank(family: str, steps: int) -> None:
    import torch

    from muster.trainer.config import read_ranks

    torch.set_num_threads(1)
    ranks = read_ranks()
    outcomes = {}
    for shard in SHARDINGS if ranks.world > 1 else ("ddp",):
        for context in CONTEXTS if ranks.world > 1 else (1,):
            outcomes[f"{shard}, context {context}"] = vars(_trained(family, ranks, shard, context, steps))
    if ranks.speaks:
        Path(f"outcome-{ranks.world}.json").write_text(json.dumps(outcomes))
    sys.stdout.flush()
    os._exit(0)


def _trained(family: str, ranks: Any, shard: str, context: int, steps: int) -> Outcome:
    import time

    import torch

    from muster.plan.communication import sent_bytes
    from muster.recipe.training import TrainingConfig
    from muster.trainer.config import data_parallel
    from muster.trainer.data import RankLoader
    from muster.trainer.models import sharding
    from muster.trainer.parallel.groups import connect
    from muster.trainer.train.rank_state import RankState
    from muster.trainer.train.reduction import StepRequests
    from muster.trainer.train.step import TrainStep
    from muster.words.base import parse
    from muster.words.checkpoint import DataCursor

    device = torch.device("cpu")
    document = {
        "model": {"architecture": OWN} if family == "decoder" else {"source": Path("model").resolve().as_uri()},
        "data": {"train": [{"source": "x"}], "sequenceLength": LENGTH},
        "batch": {"tokensPerStep": LENGTH * ROWS, "microBatch": 2},
        "optimizer": {"lr": 1e-3, "schedule": {"warmupSteps": min(10, steps - 1)}},
        "parallel": {"shard": shard, "context": context, **({"replicas": 2} if shard == "hsdp" else {})},
        "length": {"steps": steps},
    }
    training = parse(TrainingConfig, document)
    division = data_parallel(training, ranks)
    connect(device, division.ranks_per_share)
    definition = _definition(family, training)
    layout = sharding.plan(definition, training, ranks, 2**60, device)
    model = sharding.ParallelModel(definition, training, layout, ranks, device)
    step = TrainStep(training, steps, model, ranks, RankState(Path.cwd(), 1, ranks.rank, time.time()))
    cursor = DataCursor(seed=0, epoch=0, sample=0)
    loader = RankLoader(_Rows(), cursor, training.samples_per_step(), 2, division, device)
    counts = _Counted()
    outcomes = []
    for number in range(1, steps + 1):
        with counts.during() if number == 2 else counts.nothing():
            outcomes.append(step.run(number, loader, lambda: StepRequests(stop=False, save=False, snapshot=False)))
    loader.close()
    accumulation = training.accumulation(division.size)
    formula = sent_bytes(definition.size(), training, layout, accumulation)
    data = formula.data if layout.shard != "ddp" else 0  # by DDP's own code, which is not seen from here
    sent = {"data": [counts.data, data], "context": [counts.context, formula.context]}
    return Outcome([each.loss for each in outcomes], [each.grad_norm for each in outcomes], sent)


def _definition(family: str, training: Any) -> Any:
    from muster.storage.file_store import FileStore
    from muster.storage.model_folder import open_folder
    from muster.trainer.models.decoder_model import DecoderModel
    from muster.trainer.models.transformers_model import from_folder

    if family == "decoder":
        return DecoderModel(training.model.shape)
    return from_folder(open_folder(FileStore(Path("model"))), None)


class _Rows:
    """Rows of packed documents of uneven lengths, with a pattern to learn and padding behind."""

    seed, samples_per_epoch = 0, 1 << 20

    def sample(self, epoch: int, index: int) -> Any:
        import numpy

        from muster.trainer.data.packing import IGNORED, PADDING, PackedSample

        dice = numpy.random.default_rng((epoch, index))
        tokens, labels, positions, documents = numpy.zeros((4, LENGTH), numpy.int32)
        at = number = 0
        while at < LENGTH - 3:
            length = min(int(dice.integers(3, 40)), LENGTH - at)
            text = (numpy.cumsum(dice.integers(1, 4, length)) % 250).astype(numpy.int32)
            here = slice(at, at + length)
            tokens[here], positions[here], documents[here] = text, numpy.arange(length), number
            labels[here] = numpy.append(text[1:], IGNORED)
            at, number = at + length, number + 1
        documents[at:], labels[at:] = PADDING, IGNORED
        return PackedSample(tokens, labels, positions, documents)


class _Counted:
    """The bytes that this rank sends in a step, by who asks for it: FSDP, or the exchanges of a split of tokens."""

    def __init__(self) -> None:
        self.data = self.context = 0

    def nothing(self) -> Any:
        from contextlib import nullcontext

        return nullcontext()

    def during(self) -> Any:
        from contextlib import ExitStack
        from unittest import mock

        import torch.distributed as dist

        from muster.trainer.parallel.groups import RankGroup

        stack = ExitStack()

        def watched(owner: Any, name: str, field: str, sent: Any) -> None:
            own = getattr(owner, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                setattr(self, field, getattr(self, field) + int(sent(*args, **kwargs)))
                return own(*args, **kwargs)

            stack.enter_context(mock.patch.object(owner, name, call))

        def gathered(output_tensor: Any, input_tensor: Any, **_: Any) -> int:
            return output_tensor.nbytes - input_tensor.nbytes

        def scattered(output: Any, input: Any, **_: Any) -> int:
            return input.nbytes - output.nbytes

        def reduced(tensor: Any, *_: Any, group: Any = None, **__: Any) -> float:
            ranks = dist.get_world_size(group)
            is_gradient = tensor.numel() > 100 and tensor.dtype.is_floating_point  # not the step's report
            return 2 * tensor.nbytes * (ranks - 1) / ranks if is_gradient else 0

        new = hasattr(dist, "all_gather_single")  # torch 2.13's names
        watched(dist, "all_gather_single" if new else "all_gather_into_tensor", "data", gathered)
        watched(dist, "reduce_scatter_single" if new else "reduce_scatter_tensor", "data", scattered)
        watched(dist, "all_reduce", "data", reduced)
        watched(RankGroup, "exchange", "context", lambda group, parts: parts.nbytes * (group.size - 1) / group.size)
        watched(RankGroup, "collect", "context", lambda group, own: own.nbytes * (group.size - 1))
        watched(RankGroup, "scatter_sum", "context", lambda group, parts: parts.nbytes * (group.size - 1) / group.size)
        return stack


if __name__ == "__main__":
    sys.exit(main())
