"""A rank that trains the same steps under several divisions of their samples.

`python -m tests.integration.trainer.shares OUT`: everything but the division is the trainer's own; what each rank saw
goes to OUT.<rank>, as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.integration.trainer.gangs import ARCHITECTURE, training

from muster.recipe.adapter_config import Adapter
from muster.recipe.evaluation_config import Generation
from muster.recipe.training import TrainingConfig
from muster.trainer.checkpoint import randomness
from muster.trainer.config import DataParallel, RankPosition, read_ranks
from muster.trainer.data import PackedSample, RankLoader, load_tokenizer
from muster.trainer.models import sharding
from muster.trainer.models.decoder_model import DecoderModel
from muster.trainer.parallel.groups import connect, groups
from muster.trainer.train.evaluation import HeldOutEvaluator, HeldOutSet
from muster.trainer.train.rank_state import RankState
from muster.trainer.train.reduction import StepRequests
from muster.trainer.train.samples import SampleMaker
from muster.trainer.train.step import TrainStep
from muster.words.base import parse
from muster.words.checkpoint import DataCursor

LENGTH, STEPS, SEED, HELD_OUT = 32, 4, 3, 7
# By name: what each of two ranks holds of a step of six samples.
DIVISIONS = {
    "plain": (DataParallel(2, (0,)), DataParallel(2, (1,))),
    "a rank with another's share": (DataParallel(2, (0, 1), shares_per_rank=2), DataParallel(2, (), shares_per_rank=2)),
    "three shares on two ranks": (DataParallel(3, (0, 2), shares_per_rank=2), DataParallel(3, (1,), shares_per_rank=2)),
}
# Ranks that divide the tokens of their rows draw other numbers than one rank, so these draw none.
UNDRAWN = "nothing drawn"
DIVIDED = "one share, whose tokens both ranks divide"
UNDRAWN_DIVISIONS = {UNDRAWN: DIVISIONS["plain"], DIVIDED: (DataParallel(1, (0,), ranks_per_share=2),) * 2}
DROPOUT = Adapter(rank=4, alpha=64.0, targets=("all-linear",), dropout=0.2)


class Numbered:
    """Samples of noise that depend on their number alone; some have fewer labels than others."""

    seed, samples_per_epoch, names = SEED, 20, ("even", "odd")

    def sample(self, epoch: int, index: int) -> PackedSample:
        dice = np.random.default_rng((epoch, index))
        tokens = dice.integers(0, 250, LENGTH, dtype=np.int32)
        labels = np.roll(tokens, -1)
        labels[LENGTH - 1 - index % 5 :] = -100
        documents = np.where(labels == -100, -1, 0).astype(np.int32)
        return PackedSample(tokens, labels, np.arange(LENGTH, dtype=np.int32), documents)

    def source_of(self, epoch: int, index: int) -> int:
        return index % 2


def trained(config: TrainingConfig, ranks: RankPosition, division: DataParallel, directory: Path) -> dict[str, Any]:
    """What this rank saw of STEPS steps: numbers by step, the samples that it computed, and the held-out loss."""
    device = torch.device("cpu")
    randomness.seed(ranks.rank)  # nothing may depend on it
    connect(device, division.ranks_per_share)
    draws = config.neftune_noise_alpha is not None
    adapter = DROPOUT if draws else DROPOUT.model_copy(update={"dropout": 0.0})
    model_of = DecoderModel(config.model.shape, adapter)  # type: ignore[arg-type]
    layout = dataclasses.replace(sharding.plan(model_of, config, ranks, 1 << 33), division=division)
    model = sharding.ParallelModel(model_of, config, layout, ranks, device)
    step = TrainStep(config, STEPS, model, ranks, RankState(directory, 1, ranks.rank, 0.0))
    start = DataCursor(seed=SEED, epoch=0, sample=0)
    loader = RankLoader(Numbered(), start, config.samples_per_step(), config.batch.micro_batch, division, device)
    nothing = StepRequests(stop=False, save=False, snapshot=False)
    try:
        outcomes = [step.run(number, loader, lambda: nothing) for number in range(1, STEPS + 1)]
    finally:
        loader.close()
    sets = [HeldOutSet("", Numbered(), HELD_OUT), HeldOutSet("few", Numbered(), 1)]
    evaluator = HeldOutEvaluator(sets, 2, division, step.objective, device, by_token=True)
    held_out = evaluator.run(model.model, groups().all.total, lambda: False)
    asked = Generation(prompts=("abc", "a longer one"), max_tokens=8)
    made = SimpleNamespace(task="pretrain", evaluation=SimpleNamespace(generate=asked))
    run: Any = SimpleNamespace(training=made, folder=directory.as_uri(), attempt=1)
    maker = SampleMaker(run, ranks, model_of, model.module, load_tokenizer("bytes"), device)
    samples = maker.make(STEPS)
    maker.close()
    return {
        "samples": [sample.text for sample in samples],
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.grad_norm for outcome in outcomes],
        "tokens": [outcome.tokens for outcome in outcomes],
        "cursor": outcomes[-1].cursor.sample,
        "evaluation": held_out.loss,
        "metrics": held_out.values,
    }


def main() -> None:
    out, ranks = Path(sys.argv[1]), read_ranks()
    connect(torch.device("cpu"))
    found = {}
    for shard in ("ddp", "fsdp"):
        document = training(
            "none.txt",
            model={"architecture": ARCHITECTURE},
            batch={"tokensPerStep": 6 * LENGTH, "microBatch": 1},
            parallel={"shard": shard},
            neftuneNoiseAlpha=5.0,
        )
        config = parse(TrainingConfig, document, "training")
        undrawn = config.model_copy(update={"neftune_noise_alpha": None})
        for name, held in DIVISIONS.items():
            found[f"{shard}: {name}"] = trained(config, ranks, held[ranks.rank], out.parent)
        for name, held in UNDRAWN_DIVISIONS.items():
            found[f"{shard}: {name}"] = trained(undrawn, ranks, held[ranks.rank], out.parent)
    out.with_suffix(f".{ranks.rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
