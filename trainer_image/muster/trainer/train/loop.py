"""One rank's training, as a recipe: read the orders, meet the others, build, load, then step by step until the end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from muster.plan import fitting
from muster.plan.memory import gib
from muster.recipe.commits_read import REWARD_MODEL
from muster.trainer.checkpoint import TrainState, randomness, resume
from muster.trainer.checkpoint.quarantine import must_not_lose_all
from muster.trainer.config import RankPosition, WorkerRun, data_parallel
from muster.trainer.convert.weights import begin_with
from muster.trainer.data import RankLoader, RunData, open_data
from muster.trainer.data.checks import must_be_alike, must_be_the_same_data, must_have_samples, warn_of_small_epoch
from muster.trainer.errors import NumericError, OutOfMemory, StaleAttempt, StorageError, UserError, is_out_of_memory
from muster.trainer.models import load_balancing, sharding
from muster.trainer.models.compiler import ADVICE, has_compiler, must_have_compiler
from muster.trainer.models.float8 import must_compute_float8
from muster.trainer.parallel.groups import connect, groups
from muster.trainer.train import assembly
from muster.trainer.train.answering import must_be_able_to_verify
from muster.trainer.train.best import BestMetric
from muster.trainer.train.data_report import keep_report
from muster.trainer.train.evaluation import HeldOutEvaluator, HeldOutResult
from muster.trainer.train.origin import RunOrigin, as_packable, find_origin
from muster.trainer.train.profiling import StepProfiler
from muster.trainer.train.progress import JobProgress, set_aside_commit
from muster.trainer.train.rank_state import RankState
from muster.trainer.train.records import StepReporter, say
from muster.trainer.train.reduction import StepRequests
from muster.trainer.train.reference import compute_reference, read_reference
from muster.trainer.train.schedule import total_steps
from muster.trainer.train.second_model import LoadedSecond, SecondOrigin, find_second_models
from muster.trainer.train.step import TrainStep
from muster.trainer.train.trials import report_verdict, trial_of
from muster.words.checkpoint import DataCursor
from muster.words.names import ExitCode
from muster.words.signals import StepRecord, TrainerPhase
from muster.worker.notices import seconds_left

INTERVAL_STEPS = 10  # between two looks at how often a commit is due; the operator only asks whether it is overdue


def train(run: WorkerRun, ranks: RankPosition, rank_state: RankState) -> int:
    """Train to the end, or to an agreed stop. Returns the exit code; raises the errors of `errors.py`."""
    device = sharding.choose_device(ranks)  # first: without its GPUs nothing of the rest is worth the wait
    division = data_parallel(run.training, ranks)
    must_be_able_to_verify(run.training, say if ranks.speaks else _discard)
    if ranks.speaks and run.attempt > 1 and not run.resume_step:
        must_not_lose_all(run.folder, say)
    origin = find_origin(run, say if ranks.speaks else _discard)
    if run.training.precision == "fp8":
        must_compute_float8(device)
    if run.training.deterministic:
        randomness.make_deterministic(device)
    randomness.seed(run.training.seed, division.shares[0])
    connect(device, division.ranks_per_share)
    with rank_state.activity.during(TrainerPhase.DATA):
        report = say if ranks.speaks_for_its_node else _discard
        data = open_data(as_packable(run.training, origin, report), origin.tokenizer, run.cache_dir, report)
        must_have_samples(run.training, data)
        warn_of_small_epoch(run.training, data, report)
        must_be_alike(data.fingerprint)
        if ranks.speaks:
            keep_report(run.folder, data, origin.tokenizer)
    capacity = sharding.capacity(device, ranks)
    second = find_second_models(run.training, origin)
    beside = tuple(each.model.size() for each in second.values())
    layout = sharding.plan(origin.model, run.training, ranks, capacity, device, beside)
    host = sharding.host_of(origin.model, capacity, device)
    size, count = replace(origin.model.size(), second=beside), ranks.world
    rank_state.memory = fitting.advice(size, run.training, layout.need, count, ranks.nodes, host)
    try:
        trainer = RankTrainer(run, ranks, rank_state, origin, data, device, layout, second)
        trainer.load()
        try:
            return trainer.run_to_the_end()
        except (NumericError, StaleAttempt, StorageError, UserError) as error:
            trainer.checkpoints.close()  # what is in memory is not to be committed after us
            if isinstance(error, NumericError):
                trainer.quarantine_resume_commit(error)
            raise
        finally:
            trainer.close()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(type(error).__name__, str(error)):
            raise
        raise OutOfMemory(f"{rank_state.memory}\n{_first_line(error)}") from error


class RankTrainer:
    """The parts of one rank, assembled in the order in which they need each other."""

    def __init__(
        self,
        run: WorkerRun,
        ranks: RankPosition,
        rank_state: RankState,
        origin: RunOrigin,
        data: RunData,
        device: torch.device,
        layout: sharding.ShardLayout,
        second: Mapping[str, SecondOrigin] | None = None,
    ) -> None:
        config = run.training
        self.run, self.ranks, self.rank_state, self.data, self.origin = run, ranks, rank_state, data, origin
        if config.parallel.compile:
            must_have_compiler()
            rank_state.activity.deadlines.expect_compilation()
        self.progress = JobProgress(
            steps=total_steps(config, data.train.samples_per_epoch),
            cursor=DataCursor(seed=config.seed, epoch=0, sample=0),
            trial=trial_of(config),
        )
        fresh = origin.resume is None and origin.weights is None
        values = fresh or config.adapter is not None or config.scores is not None
        model = sharding.ParallelModel(origin.model, config, layout, ranks, device, values)
        loaded = {path: LoadedSecond.load(each, config, layout, device) for path, each in (second or {}).items()}
        rollouts = assembly.rollouts(run, origin, ranks, data, model, loaded.get(REWARD_MODEL))
        self.step = TrainStep(config, self.progress.steps, model, ranks, rank_state, loaded, rollouts)
        self.best = BestMetric.of(config.evaluation)
        self.reference: str | None = None  # the digest of what the reference model says of the data
        metrics = assembly.serve_metrics(run, origin, ranks, rank_state)
        metrics.learning.watch_balance(lambda: load_balancing.last(model.module))
        records = assembly.record_maker(run, origin, ranks, self.progress.steps, device)
        self.reporter = StepReporter(run.worker_dir, metrics, rank_state, ranks, records)
        self.profiler = StepProfiler(run, ranks, device, rank_state.activity)
        self.checkpoints = assembly.checkpoint_scheduler(run, origin, ranks, rank_state, self.step, metrics.commits)
        self.evaluator = assembly.evaluator(run, origin, ranks, data, self.step)
        self.samples = assembly.sample_maker(run, origin, ranks, self.step)
        if ranks.speaks:
            _say_what_is_trained(run, origin, layout, ranks, device)

    def close(self) -> None:
        """Write what is not written yet."""
        self.reporter.close()
        if self.samples is not None:
            self.samples.close()
        self.profiler.close(wait=not self.rank_state.stop_wanted)

    def open_loader(self) -> RankLoader:
        """Open the training data where this run stands in it."""
        samples, micro_batch = self.run.training.samples_per_step(), self.run.training.loader_micro_batch
        model = self.step.model
        return RankLoader(self.data.train, self.progress.cursor, samples, micro_batch, model.division, model.device)

    # --- where we stand ---

    def load(self) -> None:
        """Continue from our own commit, begin with another's weights, or keep the fresh ones."""
        with self.rank_state.activity.during(TrainerPhase.LOAD):
            self._load()
            samples = self.run.training.samples_per_step()
            skip = self.run.data_skip
            if self.progress.skip_data(skip, samples, self.data.train.samples_per_epoch) and self.ranks.speaks:
                assert skip is not None
                say(
                    f"the data of {skip.steps} steps after step {self.progress.step} is passed over: "
                    "its numbers were unsound"
                )

    def _load(self) -> None:
        module = self.step.model.module
        if self.origin.weights is not None:
            begin_with(*self.origin.weights, module)
        if self.origin.resume is None:
            if self.step.objective.stored_reference:
                self.reference = self._compute_reference()
            self.rank_state.resumed(0, None, None)
            return
        commit = resume(self.run.folder, self.origin.resume.step, module, self.step.optimizer, say)
        must_be_the_same_data(commit.state.get("data"), self.data.fingerprint, commit.step)
        for second in self.step.second.values():
            second.must_be(commit.state)
        self.reference = commit.state.get("reference")
        if self.reference is not None:
            read_reference(self.reference, self.data, self.run.folder)
        self.progress.restore(commit)
        self.step.restore(commit.state)
        self.best.restore(commit.state.get("best", {}))
        self.rank_state.steps.skipped = self.step.guard.skipped
        self.rank_state.steps.skipped_samples = self.step.guard.skipped * self.run.training.samples_per_step()
        self.rank_state.resumed(commit.step, commit.committed_at, self.best.step)
        self.checkpoints.begin(commit, module)
        if self.step.guard.doubtful:
            self.checkpoints.in_doubt = [commit.step]

    def _compute_reference(self) -> str:
        """Compute the reference model's log-probabilities of the data, with the weights that the job begins with, and
        return the digest of the result."""
        report = say if self.ranks.speaks else _discard
        micro_batch, activity = self.run.training.batch.micro_batch, self.rank_state.activity
        model, folder = self.step.model, self.run.folder
        return compute_reference(
            model, self.data, micro_batch, self.ranks, folder, report, lambda _: activity.enter(TrainerPhase.LOAD)
        )

    def quarantine_resume_commit(self, error: NumericError) -> None:
        """Set aside what the next attempt should not resume from: commits of a rise that turned out to be a divergence,
        and the commit that we resumed from where leaving out the data after it was no help, for it may be its weights
        that are at fault."""
        for step in reversed(self.checkpoints.in_doubt):
            if self.ranks.speaks and set_aside_commit(self.run.folder, step, str(error), say):
                say(f"the checkpoint of step {step} is set aside: its loss was far above the usual already")
        resumed = self.origin.resume
        if resumed is None or not (self.progress.skipped_now and self.checkpoints.stands_at(resumed.step)):
            return
        if self.ranks.speaks and set_aside_commit(self.run.folder, resumed.step, str(error), say):
            say(f"the checkpoint of step {resumed.step} is set aside: what follows it failed to train twice")

    def state(self, record: StepRecord, best: bool) -> TrainState:
        """Return the state that a commit of this step holds."""
        evaluated = {f"evaluation_{name}": value for name, value in record.evaluation_values.items()}
        if record.evaluation_loss is not None:
            evaluated["evaluation_loss"] = record.evaluation_loss
        return TrainState(
            model=self.step.model.module,
            optimizer=self.step.optimizer,
            step=self.progress.step,
            tokens=self.progress.tokens,
            cursor=self.progress.cursor,
            state={
                **self.step.state(),
                **self.progress.state(),
                "best": self.best.state(),
                "data": self.data.fingerprint,
                **({} if self.reference is None else {"reference": self.reference}),
                **{key: entry for second in self.step.second.values() for key, entry in second.state.items()},
            },
            rng={},  # every pass seeds the generators itself
            metrics={"loss": record.loss} | record.values | evaluated,
            best=best,
            records=self.reporter.unwritten(),
        )

    # --- the loop ---

    def run_to_the_end(self) -> int:
        """Step by step. Returns the exit code."""
        self.rank_state.activity.enter(TrainerPhase.STEP)
        if self.progress.step == 0 and self.evaluator is not None:
            result = self._evaluate(self.evaluator)
            self.best.judge(result, 0)
            self.reporter.publish(self.reporter.records.of_start(result))
            if result.stop:
                return self._stopped(None)
        loader = self.open_loader()
        try:
            while not self._over():
                stopped_with = self.advance(loader)
                if stopped_with is not None:
                    return self._stopped(stopped_with)
        finally:
            loader.close()
        return self._finished()

    def advance(self, loader: RankLoader) -> TrainState | None:
        """One step, and what is due after it: evaluation, records, a save. The state to commit where all ranks stop."""
        outcome = self.step.run(self.progress.step + 1, loader, self._requests)
        self.progress.advance(outcome)
        record = self.reporter.records.of(outcome)
        guard = self.step.guard
        samples = self.run.training.samples_per_step()
        self.reporter.finished(outcome, record, samples, guard.skipped, self.profiler.active)
        if self.step.rollouts is not None and self.ranks.speaks:
            self.step.rollouts.watch(outcome.values, say)
        stop, improved = outcome.requests.stop, False
        if self.evaluator is not None and self._evaluation_due():
            result = self._evaluate(self.evaluator)
            improved, stop = self.best.judge(result, self.progress.step), stop or result.stop
            record = record.model_copy(update={"evaluation_loss": result.loss, "evaluation_values": result.values})
        self._publish(record)
        last = self._over()
        due = self.checkpoints.saves(self.progress.step, outcome.requests.save, guard)
        if stop or last or improved or due:
            state = self.state(record, improved)
            if stop and not last:
                return state
            self.checkpoints.save(state, emergency=last)
        elif outcome.requests.snapshot and not guard.doubtful:
            self.checkpoints.snapshot(self.state(record, improved))
        self.checkpoints.look()
        self.profiler.stepped(self.progress.step, outcome.requests.profile and not last)
        return None

    def _requests(self) -> StepRequests:
        """Return this rank's requests for the end of the step that is under way."""
        step = self.progress.step + 1
        return StepRequests(
            stop=self.rank_state.stop_wanted,
            save=self.checkpoints.due(step),
            snapshot=self.checkpoints.snapshot_due(step, self.step.last_seconds),
            profile=self.profiler.asked,
        )

    def _over(self) -> bool:
        return self.progress.over or self.best.stop

    def _publish(self, record: StepRecord) -> None:
        if self.ranks.speaks and record.step % INTERVAL_STEPS == 0 and record.step_seconds > 0:
            self.rank_state.commits.interval_seconds = self.checkpoints.interval_seconds(record.step_seconds)
        self.reporter.publish(record)

    def _evaluation_due(self) -> bool:
        every = self.run.training.evaluation.every if self.run.training.evaluation else 0
        return bool(every) and (self.progress.step % every == 0 or self.progress.step == self.progress.steps)

    def _evaluate(self, evaluator: HeldOutEvaluator) -> HeldOutResult:
        with self.rank_state.activity.during(TrainerPhase.EVALUATION):
            result = evaluator.run(self.step.model.model, groups().all.total, lambda: self.rank_state.stop_wanted)
            if self.samples is not None and not result.stop:
                self.samples.make(self.progress.step)
        if not math.isfinite(result.loss):
            raise NumericError(f"the evaluation loss is {result.loss} after step {self.progress.step}")
        self.reporter.metrics.learning.evaluated(result.loss, result.values)
        return result

    # --- the end ---

    def _stopped(self, state: TrainState | None) -> int:
        """All ranks were asked to stop and stand at the same step: commit it, unless there is nothing new."""
        self.rank_state.activity.enter(TrainerPhase.DRAIN)
        if state is None:
            return ExitCode.PREEMPTED_NO_COMMIT
        left = seconds_left(time.time())  # known where it is this very node that goes
        committed = self.checkpoints.save_last(state, left, terminating=left is not None)
        self.checkpoints.close()
        return ExitCode.PREEMPTED_COMMITTED if committed else ExitCode.PREEMPTED_NO_COMMIT

    def _finished(self) -> int:
        self.profiler.finish(self.progress.step)
        self.rank_state.activity.enter(TrainerPhase.DRAIN)
        self.checkpoints.finish(self.progress.step)
        self.checkpoints.close()
        self.rank_state.activity.enter(TrainerPhase.DONE)
        if self.ranks.speaks:
            if self.progress.trial is not None:
                report_verdict(self.progress.trial, self.run.folder, say)
            early = f": the held-out {self.best.metric} stopped improving" if self.best.stop else ""
            say(self.progress.last_line(self.rank_state.steps.skipped_samples, early))
        return ExitCode.DONE


def _say_what_is_trained(
    run: WorkerRun, origin: RunOrigin, layout: sharding.ShardLayout, ranks: RankPosition, device: torch.device
) -> None:
    """Report what is going to be trained, and warn of slow attention."""
    precision = run.training.precision
    say(
        f"model of {origin.model.size().parameters:,} parameters{_beside(run, origin)}, "
        f"{layout.shard} over {ranks.world} ranks on {device.type}{_split(layout)}, {precision}; "
        f"about {gib(layout.need.total)} a rank"
    )
    if device.type == "cuda" and precision != "fp32" and not has_compiler():
        say(f"warning: attention computes what is masked, too, and takes more time and memory, for {ADVICE}")


def _split(layout: sharding.ShardLayout) -> str:
    size = layout.division.ranks_per_share
    return f", {size} of which compute one share: its tokens split {size} ways" if size > 1 else ""


def _beside(run: WorkerRun, origin: RunOrigin) -> str:
    adapter = run.training.adapter
    return f", of which the {origin.model.size().learning:,} of {adapter.kind} learn alone" if adapter else ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:500]


def _discard(line: str) -> None:
    """The worker's first rank tells what all of them see."""
