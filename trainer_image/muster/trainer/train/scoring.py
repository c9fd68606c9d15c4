"""python -m muster.trainer.train.scoring --data ADDRESS --task (sft | pretrain) --sequence-length N [--model FOLDER]
[--samples N] [--precision NAME] [--format NAME] [--train-on PART] [--chat-template FILE] [--no-packing]

Scores a model's folder on held-out data, by the code that evaluates during training, and trains nothing. It is the
program of the jobs that `muster evaluate` submits: the model is by default the checkpoint that the job evaluates
($MUSTER_INPUTS_DIR/checkpoint), and rank 0 leaves the metrics at $MUSTER_RESULTS and prints them. Each rank scores its
share. Exit codes as those of a training: 80 where the data or the model can't be used, 83 where storage fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from muster.recipe.training import TrainingConfig
from muster.trainer.arguments import ArgumentParser
from muster.trainer.config import RankPosition, data_parallel, read_ranks
from muster.trainer.errors import NumericError, UserError, exit_code
from muster.words.base import InvalidDocument, parse
from muster.worker.names import WorkerVariables

TASKS = ("sft", "pretrain")  # whose loss is a mean over tokens, and needs no second model


def configuration(given: argparse.Namespace, world: int) -> TrainingConfig:
    """Return the configuration of a job that would train on the data that is scored. Raises UserError."""
    data: dict[str, Any] = {
        "train": [{"source": _address(given.data), "format": given.format}],
        "sequenceLength": given.sequence_length,
        "packing": not given.no_packing,
        "trainOn": given.train_on,
    }
    if given.chat_template:
        data["chatTemplate"] = _address(given.chat_template)
    document = {
        "task": given.task,
        "model": {"source": Path(given.model).resolve().as_uri()},
        "data": data,
        "batch": {"tokensPerStep": given.sequence_length * world},
        "precision": given.precision,
        "length": {"steps": 1},
    }
    try:
        return parse(TrainingConfig, document)
    except InvalidDocument as error:
        raise UserError(f"nothing can be scored: {error}") from None


def score(config: TrainingConfig, ranks: RankPosition, samples: int, cache: Path) -> dict[str, float]:
    """Return the metrics of the model on the first `samples` samples of the data. Collective."""
    # torch is loaded after everything that can fail without it.
    from muster.trainer.data import open_data
    from muster.trainer.data.checks import must_have_samples
    from muster.trainer.models import sharding
    from muster.trainer.parallel.groups import connect
    from muster.trainer.train.evaluation import HeldOutEvaluator, HeldOutSet
    from muster.trainer.train.origin import as_packable, fresh_origin
    from muster.trainer.train.tasks.choice import objective_of

    device = sharding.choose_device(ranks)
    report = _say if ranks.speaks else _discard
    division = data_parallel(config, ranks)
    origin = fresh_origin(config)
    groups = connect(device, division.ranks_per_share)
    data = open_data(as_packable(config, origin, report), origin.tokenizer, cache, report)
    must_have_samples(config, data)
    layout = sharding.plan(origin.model, config, ranks, sharding.capacity(device, ranks), device)
    model = sharding.ParallelModel(origin.model, config, layout, ranks, device, True)
    report(f"scoring {min(samples, data.train.samples_per_epoch):,} of {data.train.samples_per_epoch:,} samples")
    evaluator = HeldOutEvaluator(
        [HeldOutSet("", data.train, samples)],
        config.batch.micro_batch,
        model.division,
        objective_of(config, {}),
        device,
        by_token=True,
        token_bytes=origin.tokenizer.text_bytes(),
    )
    result = evaluator.run(model.model, groups.all.total, lambda: False)
    if not math.isfinite(result.loss):
        raise NumericError(f"the loss is {result.loss}")
    return {"loss": result.loss, **{name: value for name, value in result.values.items() if math.isfinite(value)}}


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m muster.trainer.train.scoring", description=__doc__)
    inputs = os.environ.get(WorkerVariables.INPUTS_DIR, ".")
    parser.add_argument("--model", default=os.path.join(inputs, "checkpoint"))
    parser.add_argument("--data", required=True)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--sequence-length", type=int, required=True)
    parser.add_argument("--samples", type=int, default=2_000)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--format", default="auto")
    parser.add_argument("--train-on", default="assistant")
    parser.add_argument("--chat-template")
    parser.add_argument("--no-packing", action="store_true")
    ranks = read_ranks()
    try:
        given = parser.parse_args(arguments)
        with tempfile.TemporaryDirectory(prefix="muster-scoring-") as cache:
            metrics = score(configuration(given, ranks.world), ranks, given.samples, Path(cache))
    except Exception as error:
        if (code := exit_code(error)) == 1:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return code
    if ranks.speaks:
        _leave(metrics)
    return 0


def _leave(metrics: dict[str, float]) -> None:
    print(json.dumps(metrics), flush=True)
    if path := os.environ.get(WorkerVariables.RESULTS):
        Path(path).write_text(json.dumps(metrics))


def _address(text: str) -> str:
    return text if "://" in text else Path(text).resolve().as_uri()


def _say(line: str) -> None:
    print(line, flush=True)


def _discard(_: str) -> None:
    """Do nothing: another rank reports it."""


if __name__ == "__main__":
    result = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(result)  # a library's thread may hang in the interpreter's teardown
