"""Assembly of the parts that watch, save and evaluate a run, from its orders, its model and its place in the gang."""

from __future__ import annotations

import torch

from muster.plan import flops
from muster.recipe.evaluation_config import reports_tokens
from muster.trainer.checkpoint import CheckpointSaver, SaverIdentity
from muster.trainer.config import RankPosition, WorkerRun
from muster.trainer.data import RunData
from muster.trainer.data.answers import ends_of_turn
from muster.trainer.models import sharding
from muster.trainer.parallel.groups import all_local
from muster.trainer.train.answering import AnswerEvaluator, AnswerScoring, answered_sets
from muster.trainer.train.checkpoint_scheduler import CheckpointScheduler
from muster.trainer.train.evaluation import HeldOutEvaluator, HeldOutSet
from muster.trainer.train.hardware import HardwareReader
from muster.trainer.train.metrics import CommitMetrics, RankMetrics
from muster.trainer.train.origin import RunOrigin
from muster.trainer.train.rank_state import RankState
from muster.trainer.train.records import RecordMaker, say
from muster.trainer.train.reward_model import RewardScores
from muster.trainer.train.rollouts import RolloutMaker
from muster.trainer.train.samples import SampleMaker
from muster.trainer.train.second_model import LoadedSecond
from muster.trainer.train.step import TrainStep
from muster.trainer.train.writing import ROWS_AT_ONCE, TokenWriter

# A second copy of this rank's part of the state is kept where it takes at most this part of the host's spare memory.
SNAPSHOT_MEMORY_PART = 8


def serve_metrics(run: WorkerRun, origin: RunOrigin, ranks: RankPosition, rank_state: RankState) -> RankMetrics:
    """This rank's metrics, which anybody who reaches the gang may read."""
    config = run.training
    share = flops.hardware_share(
        origin.model.size(), config.data.sequence_length, config.parallel.activation_checkpointing
    )
    metrics = RankMetrics(ranks.rank, rank_state.heartbeat, share)
    metrics.serve("127.0.0.1" if all_local() else "0.0.0.0", rank_state.serves_metrics)  # noqa: S104
    return metrics


def record_maker(
    run: WorkerRun, origin: RunOrigin, ranks: RankPosition, steps: int, device: torch.device
) -> RecordMaker:
    """Make the maker of this job's step records. `steps` is the number of steps of the whole job."""
    config = run.training
    return RecordMaker(
        attempt=run.attempt,
        steps=steps,
        world=ranks.world,
        device=device,
        flops_per_token=flops.per_token(origin.model.size(), config.data.sequence_length),
        peak=flops.peak(torch.cuda.get_device_name(device), config.precision) if device.type == "cuda" else None,
        hardware=HardwareReader(device) if ranks.speaks else None,
    )


def checkpoint_scheduler(
    run: WorkerRun,
    origin: RunOrigin,
    ranks: RankPosition,
    rank_state: RankState,
    step: TrainStep,
    metrics: CommitMetrics,
) -> CheckpointScheduler:
    """Collective: the ranks learn where rank 0 coordinates their saves, and whether all have memory for snapshots."""
    identity = SaverIdentity(
        job=run.job,
        job_uid=run.job_uid,
        attempt=run.attempt,
        worker=run.worker,
        incarnation=run.incarnation,
        fence=run.fence,
        folder=run.folder,
        config=run.document,
        architecture=origin.model.describe(),
        tokenizer=origin.tokenizer.describe(),
    )
    model = step.model
    saver = CheckpointSaver(identity, run.checkpoint.keep, model.layout.describe())
    on_the_host = model.layout.need.total if model.device.type == "cpu" else 0
    spare = sharding.host_memory(ranks) - on_the_host
    snapshots = saver.prepare(model.module, step.optimizer, spare // SNAPSHOT_MEMORY_PART)
    return CheckpointScheduler(saver, run.checkpoint.every, run.past, ranks, rank_state, metrics, snapshots)


def evaluator(
    run: WorkerRun, origin: RunOrigin, ranks: RankPosition, data: RunData, step: TrainStep
) -> HeldOutEvaluator | None:
    """Make the evaluator; None where the configuration requests no evaluation."""
    config, model = run.training, step.model
    asked = config.evaluation
    if asked is None:
        return None
    sets = [HeldOutSet("", data.evaluation, asked.samples)] if data.evaluation else []
    sets += [
        HeldOutSet(name, held_out, asked.sets[name].samples or asked.samples) for name, held_out in data.sets.items()
    ]
    by_token = reports_tokens(config.task)
    return HeldOutEvaluator(
        sets,
        config.batch.micro_batch,
        model.division,
        step.objective,
        model.device,
        by_token,
        origin.tokenizer.text_bytes() if by_token else None,
        _answer_evaluator(run, origin, ranks, data, step),
    )


def rollouts(
    run: WorkerRun,
    origin: RunOrigin,
    ranks: RankPosition,
    data: RunData,
    model: sharding.ParallelModel,
    scorer: LoadedSecond | None,
) -> RolloutMaker | None:
    """Make the rollouts; None where the task does not answer prompts while it trains."""
    if run.training.grpo is None:
        return None
    tokenizer = origin.tokenizer
    writer = TokenWriter(model.module, origin.model, tokenizer, ends_of_turn(tokenizer), model.device)
    scoring = AnswerScoring(run.training.grpo.verifiers, tokenizer, say)
    judge = None if scorer is None else RewardScores(scorer.model, tokenizer, run.training.batch.micro_batch)
    return RolloutMaker(run.training, data.train, scoring, model.module, writer, tokenizer.eos, judge)


def _answer_evaluator(
    run: WorkerRun, origin: RunOrigin, ranks: RankPosition, data: RunData, step: TrainStep
) -> AnswerEvaluator | None:
    """Make the evaluator of answers; None where no set's prompts are answered."""
    asked = run.training.evaluation
    if asked is None or not data.prompts:
        return None
    model, tokenizer = step.model, origin.tokenizer
    sets = answered_sets(asked.sets, asked.samples, data.prompts, tokenizer, say)
    writer = TokenWriter(model.module, origin.model, tokenizer, ends_of_turn(tokenizer), model.device)
    at_once = ROWS_AT_ONCE * run.training.batch.micro_batch * run.training.data.sequence_length
    decides = asked.metric in [metric for each in sets for metric in each.metrics()]
    return AnswerEvaluator(sets, model.module, writer, model.division, at_once, model.device, decides)


def sample_maker(run: WorkerRun, origin: RunOrigin, ranks: RankPosition, step: TrainStep) -> SampleMaker | None:
    """Make the sample maker; None where the configuration names no prompts."""
    if run.training.evaluation is None or run.training.evaluation.generate is None:
        return None
    return SampleMaker(run, ranks, origin.model, step.model.module, origin.tokenizer, step.model.device)
