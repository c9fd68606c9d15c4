"""One rank's training, as a recipe: read the orders, meet the others, build, load, then step by step until the end."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from muster.contract.checkpoint import DataCursor
from muster.contract.names import ExitCode
from muster.contract.signals import StepRecord, TrainerPhase
from muster.contract.training import TrainingConfig
from muster.trainer.checkpoint import Identity, Saver, TrainState, resume
from muster.trainer.config import Ranks, Run, accumulation
from muster.trainer.convert.weights import begin_with
from muster.trainer.data import Data, Loader, StepBatch, open_data
from muster.trainer.data.checks import must_be_alike, must_be_the_same_data, must_have_samples
from muster.trainer.data.loader import advanced
from muster.trainer.errors import NumericError, OutOfMemory, StaleAttempt, StorageError, is_out_of_memory
from muster.trainer.launch.notices import seconds_left
from muster.trainer.models import memory, sharding
from muster.trainer.train import flops, randomness
from muster.trainer.train.checkpoint_scheduler import CheckpointScheduler, withdraw
from muster.trainer.train.evaluation import Best, Evaluator
from muster.trainer.train.loss_spike_guard import Numerics
from muster.trainer.train.metrics import Metrics, StepLog
from muster.trainer.train.optimizer import LossScale, clip_factor, make_optimizer, set_rate, squared_norm
from muster.trainer.train.origin import Origin, find_origin
from muster.trainer.train.rank_state import Life
from muster.trainer.train.schedule import learning_rate, total_steps
from muster.trainer.train.straggler_timer import Pace, Stragglers
from muster.trainer.train.tasks.next_token import objective, scored

# A second copy of this rank's part of the state is kept where it takes at most this part of the host's spare memory.
SNAPSHOT_MEMORY_PART = 8
INTERVAL_STEPS = 10  # between two looks at how often a commit is due; the operator only asks whether it is overdue


def train(run: Run, ranks: Ranks, life: Life) -> int:
    """Train to the end, or to an agreed stop. Returns the exit code; raises the errors of `errors.py`."""
    accumulation(run.training, ranks.world)
    origin = find_origin(run, say if ranks.rank == 0 else lambda line: None)
    device = sharding.choose_device(ranks)
    if run.training.deterministic:
        randomness.make_deterministic(device)
    randomness.seed(run.training.seed, ranks.rank)
    sharding.connect(device)
    with life.during(TrainerPhase.DATA):
        report = say if ranks.local_rank == 0 else _say_nothing
        data = open_data(_as_packable(run.training, origin, report), origin.tokenizer, run.cache_dir, report)
        must_have_samples(run, data)
        must_be_alike(data.fingerprint, ranks)
    room = sharding.capacity(device, ranks)
    layout = sharding.plan(origin.model, run.training, ranks, room)
    life.memory = memory.advice(origin.model.size(), run.training, layout.need, room, ranks.world)
    try:
        trainer = Trainer(run, ranks, life, origin, data, device, layout)
        trainer.load()
        try:
            return trainer.run_to_the_end()
        except (NumericError, StaleAttempt, StorageError) as error:
            trainer.commits.close()  # what is in memory is not to be committed after us
            if isinstance(error, NumericError):
                trainer.doubt(error)
            raise
        finally:
            trainer.close()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(type(error).__name__, str(error)):
            raise
        raise OutOfMemory(f"{life.memory}\n{_first_line(error)}") from error


class Trainer:
    """The parts of one rank, assembled in the order in which they need each other."""

    def __init__(
        self,
        run: Run,
        ranks: Ranks,
        life: Life,
        origin: Origin,
        data: Data,
        device: torch.device,
        layout: sharding.Layout,
    ) -> None:
        config = self.config = run.training
        self.run, self.ranks, self.life, self.device, self.data, self.origin = run, ranks, life, device, data, origin
        fresh = origin.resume is None and origin.weights is None
        self.spread = sharding.Spread(
            origin.model, config, layout, ranks, device, values=fresh or config.adapter is not None
        )
        self.optimizer = make_optimizer(self.spread.decoder, config.optimizer)
        self.objective = objective(config)
        self.scale = LossScale(enabled=config.precision == "fp16")
        self.numerics = Numerics()
        self.passed_over: list[dict[str, int]] = []
        self.data_was_bad, self.owes_a_save = False, False
        self.best = Best(config.evaluation.early_stopping if config.evaluation else None)
        self.steps = total_steps(config, data.train.samples_per_epoch)
        self.step, self.tokens = 0, 0
        self.cursor = DataCursor(seed=config.seed, epoch=0, sample=0)
        identity = Identity(
            job=run.job,
            job_uid=run.job_uid,
            attempt=run.attempt,
            fence=run.fence,
            folder=run.folder,
            config=run.document,
            architecture=origin.model.describe(),
            tokenizer=origin.tokenizer.describe(),
        )
        size, length = origin.model.size(), config.data.sequence_length
        share = flops.hardware_share(size, length, config.parallel.activation_checkpointing)
        self.metrics = Metrics(ranks.rank, life.heartbeat, share)
        self.metrics.serve("127.0.0.1" if sharding.all_local() else "0.0.0.0", life.serves_metrics)  # noqa: S104
        if config.parallel.compile:
            life.deadlines.expect_compilation()
        sharded = layout.shard != "ddp" and not config.parallel.compile  # a compiled layer is not to be looked into
        self.pace = Pace(device, self.spread.decoder if sharded else None, self.spread.layers, life.moved)
        self.stragglers, self._worked, self._step_seconds = Stragglers(ranks.world), 0.0, 0.0
        self.log = StepLog(run.worker_dir) if ranks.rank == 0 else None
        life.before_each_beat(self.log.flush if self.log else None)
        saver = Saver(identity, run.checkpoint.keep, layout.describe())
        spare = sharding.host_memory(ranks) - (layout.need.total if device.type == "cpu" else 0)
        snapshots = saver.prepare(self.spread.decoder, spare // SNAPSHOT_MEMORY_PART)
        self.commits = CheckpointScheduler(saver, run.checkpoint.every, run.past, ranks, life, self.metrics, snapshots)
        self.evaluator = _evaluator(run, ranks, data, device)
        self.flops_per_token = flops.per_token(size, length)
        self.peak = flops.peak(torch.cuda.get_device_name(device), config.precision) if device.type == "cuda" else None
        if ranks.rank == 0:
            say(
                f"model of {size.parameters:,} parameters{_beside(config, size.learning)}, "
                f"{layout.shard} over {ranks.world} ranks on {device.type}, {config.precision}; "
                f"about {memory.gib(layout.need.total)} a rank"
            )

    def close(self) -> None:
        """Write what is not written yet."""
        self.life.before_each_beat(None)
        if self.log is not None:
            self.log.close()

    # --- where we stand ---

    def load(self) -> None:
        """Continue from our own commit, begin with another's weights, or keep the fresh ones."""
        with self.life.during(TrainerPhase.LOAD):
            self._load()
            self._pass_over()

    def _load(self) -> None:
        if self.origin.weights is not None:
            begin_with(*self.origin.weights, self.spread.decoder)
        if self.origin.resume is None:
            self.life.resumed(0, None, None)
            return
        commit = resume(self.run.folder, self.origin.resume.step, self.spread.decoder, self.optimizer, say)
        must_be_the_same_data(commit.state.get("data"), self.data.fingerprint, commit.step)
        self.step, self.tokens, self.cursor = commit.step, commit.tokens, commit.cursor
        self.scale.restore(commit.state.get("scaler", {}))
        self.best.restore(commit.state.get("best", {}))
        self.numerics.restore(commit.state.get("numerics", {}))
        self.passed_over = list(commit.state.get("passedOver", ()))
        self.life.skipped_steps = self.numerics.skipped
        if commit.world_size == self.ranks.world and len(commit.rng) == self.ranks.world:
            randomness.restore(commit.rng[self.ranks.rank])
        self.life.resumed(commit.step, commit.committed_at, self.best.step)
        self.commits.begin(commit.step)

    def _pass_over(self) -> None:
        """Leave out the data that the last attempt could not be brought to learn from; commits remember which."""
        skip = self.run.data_skip
        if skip is None or skip.after_step != self.step:
            return
        self.data_was_bad = True
        samples = skip.steps * self.config.samples_per_step()
        self.passed_over.append({"epoch": self.cursor.epoch, "sample": self.cursor.sample, "samples": samples})
        if self.ranks.rank == 0:
            say(f"the data of {skip.steps} steps after step {self.step} is passed over: its numbers were unsound")
        self.cursor = advanced(self.cursor, samples, self.data.train.samples_per_epoch)

    def doubt(self, error: NumericError) -> None:
        """To pass over the data after our commit was no help, so it may be its weights: leave it to the one before."""
        resumed = self.origin.resume
        if resumed is None or not (self.data_was_bad and self.commits.stands_at(resumed.step)):
            return
        if self.ranks.rank == 0 and withdraw(self.run.folder, resumed.step, str(error)):
            say(f"the commit of step {resumed.step} is set aside: what comes after it could not be learnt from twice")

    def state(self, loss: float, evaluation_loss: float | None, best: bool) -> TrainState:
        metrics = {"loss": loss} | ({} if evaluation_loss is None else {"evaluation_loss": evaluation_loss})
        return TrainState(
            model=self.spread.decoder,
            optimizer=self.optimizer,
            step=self.step,
            tokens=self.tokens,
            cursor=self.cursor,
            state={
                "scaler": self.scale.state(),
                "best": self.best.state(),
                "numerics": self.numerics.state(),
                "passedOver": self.passed_over,
                "steps": self.steps,
                "data": self.data.fingerprint,
            },
            rng=randomness.state(),
            metrics=metrics,
            best=best,
        )

    # --- the loop ---

    def run_to_the_end(self) -> int:
        self.life.enter(TrainerPhase.STEP)
        if self.step == 0 and self.evaluator is not None:
            loss, stop = self._evaluate()
            self.best.judge(loss, 0)
            self._report(self._record_of_start(loss))
            if stop:
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

    def advance(self, loader: Loader) -> TrainState | None:
        """One step, and what is due after it: evaluation, records, a save. The state to commit where all ranks stop."""
        record, stop, due, snapshot_due = self._one_step(loader)
        improved = False
        if self._evaluation_due():
            loss, asked = self._evaluate()
            improved, stop = self.best.judge(loss, self.step), stop or asked
            record = record.model_copy(update={"evaluation_loss": loss})
        self._report(record)
        last = self._over()
        # What is not learnt from may be the weights' fault: a commit waits until they have learnt again.
        due = due or self.owes_a_save
        self.owes_a_save = due and self.numerics.in_a_row > 0
        if stop or last or improved or (due and not self.owes_a_save):
            state = self.state(record.loss, record.evaluation_loss, improved)
            if stop and not last:
                return state
            self.commits.save(state, emergency=last)
        elif snapshot_due and self.numerics.in_a_row == 0:
            self.commits.snapshot(self.state(record.loss, record.evaluation_loss, improved))
        self.commits.look()
        return None

    def _over(self) -> bool:
        return self.step >= self.steps or self.best.stop

    def _one_step(self, loader: Loader) -> tuple[StepRecord, bool, bool, bool]:
        """One optimizer step; its record, and whether all ranks now stop, save, and keep the state in memory.

        The one collective besides the gradients' own: loss, tokens, gradient norm and the ranks' wishes, added up.
        Reading its result is the step's one wait for the device, and where numbers that are not finite are found.
        """
        began, step = time.perf_counter(), self.step + 1
        with self.life.waiting_for_data():
            batch = loader.next()
        told, under_way = self._backward(batch)
        gradients = self.spread.gradients()
        self.life.does("meeting")
        loss_total, labels_total, tokens, stop, due, snapshot, *work, square = self._meet(told, under_way, gradients)
        self._compare(work, step)
        # Gradients were made as if every token of the step were scored; labels_total says how many really were.
        correction = self.config.batch.tokens_per_step / max(labels_total, 1.0) / self.scale.value
        norm, loss = math.sqrt(square) * correction, loss_total / max(labels_total, 1.0)
        rate = learning_rate(self.config.optimizer, step, self.steps)
        self.life.does("update")
        sound, why = self._is_sound(loss, norm, step)
        if sound:
            self._update(gradients, correction * clip_factor(norm, self.config.optimizer.clip_norm), rate)
        self.optimizer.zero_grad()
        self.step, self.cursor, self.tokens = step, batch.cursor, self.tokens + int(tokens)
        seconds = self._step_seconds = time.perf_counter() - began
        shown = (loss if math.isfinite(loss) else self.numerics.last_good_loss(), norm if math.isfinite(norm) else 0.0)
        record = self._record(*shown, rate, int(tokens), seconds, batch.wait_seconds, why)
        self.metrics.stepped(record, self.config.samples_per_step(), batch.wait_seconds)
        return record, stop > 0, due > 0, snapshot > 0

    def _backward(self, batch: StepBatch) -> tuple[Tensor, dist.Work | None]:
        """Forward and backward over the micro-batches; what this rank tells the others, and the adding up of it where
        that is under way already."""
        # Gradients are averaged over the ranks, and the sum is wanted.
        weight = self.scale.value * self.ranks.world / self.config.batch.tokens_per_step
        loss_sum = torch.zeros((), device=self.device)
        labels = torch.zeros((), dtype=torch.int64, device=self.device)
        told, under_way = loss_sum, None
        for number, micro in enumerate(batch.micro, start=1):
            last = number == len(batch.micro)
            with self.spread.micro_step(last):
                self.life.does("forward")
                with self.pace.working() if number == 1 else contextlib.nullcontext():
                    loss = self.objective(self.spread.model, micro)
                loss_sum += loss.detach()
                labels += scored(micro)
                if last:
                    told, under_way = self._tell(loss_sum, labels, batch)
                self.life.does("backward")
                (loss * weight).backward()  # type: ignore[no-untyped-call]
        return told, under_way

    def _tell(self, loss_sum: Tensor, labels: Tensor, batch: StepBatch) -> tuple[Tensor, dist.Work | None]:
        """This rank's loss, labels, tokens, wishes and work, fp64; where only the gradients' norm would be missing, and
        every rank has all gradients, they are added up behind the backward pass."""
        step = self.step + 1
        asks = (self.life.stop_wanted, self.commits.due(step), self.commits.snapshot_due(step, self._step_seconds))
        # A place for each rank's working time of the step before, with this rank's in its own.
        work = [self._worked if rank == self.ranks.rank else 0.0 for rank in range(self.ranks.world)]
        wishes = torch.tensor([float(batch.tokens), *map(float, asks), *work], dtype=torch.float64)
        told = torch.cat((torch.stack((loss_sum.double(), labels.double())), wishes.to(self.device, non_blocking=True)))
        whole = self.spread.layout.shard == "ddp" and self.ranks.world > 1
        return told, dist.all_reduce(told, async_op=True) if whole else None

    def _meet(self, told: Tensor, under_way: dist.Work | None, gradients: list[Tensor]) -> list[float]:
        """What all ranks told, added up, and the square of the gradients' norm; on the host."""
        square = squared_norm(gradients)[None]
        if under_way is None:
            return self._total(torch.cat((told, square / self.spread.copies)))
        under_way.wait()
        return [float(value) for value in torch.cat((told, square)).tolist()]

    def _compare(self, work: list[float], step: int) -> None:
        """work: seconds of own work in the step before, by rank."""
        self._worked = self.pace.seconds()
        if self.ranks.rank == 0:
            self.stragglers.hear(step, work)
            self.life.slow_ranks = self.stragglers.slow
            self.metrics.stragglers(self.stragglers.slow)

    def _update(self, gradients: list[Tensor], factor: float, rate: float) -> None:
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        set_rate(self.optimizer, rate)
        self.optimizer.step()

    def _is_sound(self, loss: float, norm: float, step: int) -> tuple[bool, str]:
        """Whether to learn from this batch, and if not, why; no word where only fp16's scale was too large."""
        if math.isfinite(loss) and not self.scale.accepts(norm):
            if self.scale.exhausted:
                raise NumericError(
                    f"the gradient norm is {norm} at step {step} whatever the loss scale (loss {loss:.4f})"
                )
            return False, ""
        why = self.numerics.judge(loss, norm, step)
        if why:
            self.life.skipped_steps = self.numerics.skipped
            self.metrics.skipped.inc()
            if self.ranks.rank == 0:
                say(f"step {step}: {why}; its batch is skipped")
        return not why, why

    def _total(self, vector: Tensor) -> list[float]:
        """A vector added up over all ranks, on the host."""
        if self.ranks.world > 1:
            dist.all_reduce(vector)
        return [float(value) for value in vector.tolist()]

    # --- evaluation ---

    def _evaluation_due(self) -> bool:
        every = self.config.evaluation.every if self.config.evaluation else 0
        return bool(every) and (self.step % every == 0 or self.step == self.steps)

    def _evaluate(self) -> tuple[float, bool]:
        """The held-out loss, and whether a rank was asked to stop meanwhile."""
        assert self.evaluator is not None
        with self.life.during(TrainerPhase.EVALUATION):
            loss, stop = self.evaluator.run(self.spread.model, self._total, lambda: self.life.stop_wanted)
        if not math.isfinite(loss):
            raise NumericError(f"the evaluation loss is {loss} after step {self.step}")
        self.metrics.evaluation_loss.set(loss)
        return loss, stop

    # --- records ---

    def _report(self, record: StepRecord) -> None:
        if self.ranks.rank == 0 and record.step % INTERVAL_STEPS == 0 and record.step_seconds > 0:
            self.life.commit_seconds = self.commits.interval_seconds(record.step_seconds)
        self.life.stepped(record.step, record)
        if self.log is not None:
            self.log.write(record)

    def _record(
        self, loss: float, norm: float, rate: float, tokens: int, seconds: float, waited: float, skipped: str = ""
    ) -> StepRecord:
        speed = tokens / seconds
        return StepRecord(
            attempt=self.run.attempt,
            step=self.step,
            steps=self.steps,
            at=time.time(),
            loss=loss,
            grad_norm=norm,
            lr=rate,
            tokens=tokens,
            tokens_per_second=speed,
            step_seconds=seconds,
            data_wait_seconds=waited,
            mfu=flops.utilisation(self.flops_per_token, speed, self.peak, self.ranks.world),
            memory_bytes=_memory_used(self.device),
            skipped=skipped,
        )

    def _record_of_start(self, evaluation_loss: float) -> StepRecord:
        """Step 0: nothing trained yet, so its loss is the held-out one."""
        record = self._record(evaluation_loss, 0.0, 0.0, 0, 1.0, 0.0)
        return record.model_copy(update={"step_seconds": 0.0, "evaluation_loss": evaluation_loss, "mfu": None})

    # --- the end ---

    def _stopped(self, state: TrainState | None) -> int:
        """All ranks were asked to stop and stand at the same step: commit it, unless there is nothing new."""
        self.life.enter(TrainerPhase.DRAIN)
        if state is None:
            return ExitCode.PREEMPTED_NO_COMMIT
        left = seconds_left()  # known where it is this very node that goes
        committed = self.commits.save_last(state, left, terminating=left is not None)
        self.commits.close()
        return ExitCode.PREEMPTED_COMMITTED if committed else ExitCode.PREEMPTED_NO_COMMIT

    def _finished(self) -> int:
        self.life.enter(TrainerPhase.DRAIN)
        self.commits.finish(self.step)
        self.commits.close()
        self.life.enter(TrainerPhase.DONE)
        if self.ranks.rank == 0:
            say(f"done after step {self.step}" + (": the held-out loss stopped improving" if self.best.stop else ""))
        return ExitCode.DONE

    def open_loader(self) -> Loader:
        samples, micro_batch = self.config.samples_per_step(), self.config.batch.micro_batch
        return Loader(
            self.data.train, self.cursor, samples, micro_batch, self.ranks.rank, self.ranks.world, self.device
        )


def _beside(config: TrainingConfig, learning: int) -> str:
    return f", of which the {learning:,} of {config.adapter.kind} learn alone" if config.adapter else ""


def _as_packable(config: TrainingConfig, origin: Origin, report: Callable[[str], None]) -> TrainingConfig:
    """The configuration with a document to a row, where the model's class would let packed ones see each other."""
    if origin.model.packs or not config.data.packing:
        return config
    report("documents are not packed, one to a row and the rest of it padding: " + origin.model.why_not_packed)
    return config.model_copy(update={"data": config.data.model_copy(update={"packing": False})})


def _evaluator(run: Run, ranks: Ranks, data: Data, device: torch.device) -> Evaluator | None:
    config = run.training.evaluation
    if config is None or data.evaluation is None:
        return None
    return Evaluator(data.evaluation, config.samples, run.training.batch.micro_batch, ranks.rank, ranks.world, device)


def _memory_used(device: torch.device) -> int:
    """Peak bytes of this process on the GPU, or on the CPU in memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:500]


def _say_nothing(line: str) -> None:
    """The worker's first rank tells what all of them see."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
