"""One optimizer step: forward and backward over the micro-batches, the one reduction, and the update."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muster.recipe.training import TrainingConfig
from muster.trainer.checkpoint import randomness
from muster.trainer.config import RankPosition
from muster.trainer.data import RankLoader, StepBatch
from muster.trainer.errors import NumericError
from muster.trainer.models.sharding import ParallelModel
from muster.trainer.parallel.groups import groups
from muster.trainer.train.numeric_guard import NumericGuard
from muster.trainer.train.optimizer import LossScale, clip_factor, make_optimizer, set_rate, squared_norm
from muster.trainer.train.rank_state import RankState
from muster.trainer.train.reduction import (
    PackedReport,
    RankReport,
    StepReport,
    StepRequests,
    all_reduce_step_report,
    pack_step_report,
)
from muster.trainer.train.rollouts import RolloutMaker
from muster.trainer.train.schedule import learning_rate
from muster.trainer.train.second_model import LoadedSecond
from muster.trainer.train.straggler_timer import StragglerTimer
from muster.trainer.train.tasks.choice import objective_of
from muster.trainer.train.tasks.objective import LossTotals
from muster.words.checkpoint import DataCursor


@dataclass(frozen=True)
class StepOutcome:
    """One finished step, the same on every rank but for data_wait_seconds."""

    number: int
    loss: float  # per counted term; where it is no number, that of the last step that had one
    grad_norm: float  # before clipping; 0 where it is no number
    learning_rate: float
    tokens: int  # of all ranks, without padding
    seconds: float  # of the whole step
    data_wait_seconds: float  # for which this rank waited for its batch
    skipped: str  # why nothing was learnt from the batch, else empty
    cursor: DataCursor  # where the data stands after this step
    requests: StepRequests  # what any rank asked for
    work_seconds: tuple[float, ...]  # of each rank's own work in the step before, by global rank
    values: dict[str, float]  # what the objective reports by name


class TrainStep:
    """The model, its optimizer and what guards them. `steps` is the number of steps of the whole job, which the
    learning rate depends on.
    """

    def __init__(
        self,
        config: TrainingConfig,
        steps: int,
        model: ParallelModel,
        ranks: RankPosition,
        rank_state: RankState,
        second: Mapping[str, LoadedSecond] | None = None,
        rollouts: RolloutMaker | None = None,
    ) -> None:
        self.model, self.steps, self.rollouts = model, steps, rollouts
        self.optimizer = make_optimizer(model.module, config.optimizer, config.seed)
        self.second = second or {}  # second models, by the paths of their fields
        self.objective = objective_of(config, {path: each.model for path, each in self.second.items()})
        # A range test raises the rate until the loss diverges, so there a divergence is the result.
        losses_compare = rollouts is None and config.optimizer.range_test is None
        self.guard = NumericGuard(config.optimizer.clip_norm, config.optimizer.skip_spikes, losses_compare)
        self.last_seconds = 0.0
        self._config, self._ranks, self._rank_state = config, ranks, rank_state
        self._loss_scale = LossScale(enabled=config.precision == "fp16")
        timed = not model.layout.is_whole and not config.parallel.compile  # a compiled layer is not to be looked into
        self._timer = StragglerTimer(
            model.device, model.module if timed else None, model.layers, rank_state.activity.moved
        )
        if model.split is not None:
            model.split.meeting = self._timer.apart
        self._work_seconds = 0.0

    def run(self, number: int, loader: RankLoader, requests: Callable[[], StepRequests]) -> StepOutcome:
        """Step `number`, from its batch to the update. `requests` returns what this rank asks for, and is called once
        the batch is known.

        Raises NumericError when the numbers stay unsound whatever is skipped.
        """
        began, doing = time.perf_counter(), self._rank_state.activity
        with doing.waiting_for_data():
            batch = loader.next()
        if self.rollouts is not None:
            doing.does("rollouts")
            batch = self.rollouts.of(batch)
        passes = self._config.grpo.iterations if self._config.grpo else 1
        skipped = [
            self._learn(number, batch, lambda: StepRequests(False, False, False), done)[-1]
            for done in range(passes - 1)
        ]
        report, loss, norm, rate, why = self._learn(number, batch, requests, passes - 1)
        self.last_seconds = time.perf_counter() - began
        return StepOutcome(
            number=number,
            loss=loss if math.isfinite(loss) else self.guard.last_loss(),
            grad_norm=norm if math.isfinite(norm) else 0.0,
            learning_rate=rate,
            tokens=report.tokens,
            seconds=self.last_seconds,
            data_wait_seconds=batch.wait_seconds,
            skipped=why if all(skipped) else "",
            cursor=batch.cursor,
            requests=report.requests,
            work_seconds=report.work_seconds,
            values=report.values,
        )

    def _learn(
        self, number: int, batch: StepBatch, requests: Callable[[], StepRequests], done: int
    ) -> tuple[StepReport, float, float, float, str]:
        """One update by the batch, which `done` updates were made by already. Returns what all ranks reported, loss,
        gradient norm and learning rate, and why nothing was learnt."""
        doing = self._rank_state.activity
        packed = self._backward(number, batch, requests, done)
        gradients = self.model.gradients()
        doing.does("meeting")
        # Where the report travelled behind the backward pass, every rank has the whole of every gradient.
        replicas = None if self.model.replicated else self.model.gradient_replicas()
        report = all_reduce_step_report(packed, squared_norm(gradients, replicas), groups())
        self._work_seconds = self._timer.seconds()
        # Gradients were made as if every token of the step were counted; the report says how many really were.
        correction = self._config.batch.tokens_per_step / max(report.count, 1.0) / self._loss_scale.value
        norm, loss = math.sqrt(report.squared_norm) * correction, report.loss / max(report.count, 1.0)
        rate = learning_rate(self._config.optimizer, number, self.steps)
        doing.does("update")
        sound, why = self._is_sound(loss, norm, number)
        if sound:
            self._update(gradients, correction * clip_factor(norm, self._config.optimizer.clip_norm), rate)
        self.optimizer.zero_grad()
        return report, loss, norm, rate, why

    def state(self) -> dict[str, Any]:
        """Return the state that a commit keeps in addition to weights and optimizer, as JSON."""
        return {"scaler": self._loss_scale.state(), "numerics": self.guard.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._loss_scale.restore(state.get("scaler", {}))
        self.guard.restore(state.get("numerics", {}))

    def _backward(self, number: int, batch: StepBatch, requests: Callable[[], StepRequests], done: int) -> PackedReport:
        """Forward and backward over the micro-batches. Returns this rank's report, which is packed before the last
        backward pass; where every rank will have all gradients, it is added up behind that pass."""
        # Gradients are averaged over ranks, and their sum is wanted.
        weight = self._loss_scale.value * self.model.averaged_over / self._config.batch.tokens_per_step
        totals = LossTotals(self.objective.names, self.model.device)
        packed: PackedReport | None = None
        doing = self._rank_state.activity
        for index, micro in enumerate(batch.micro):
            last = index == len(batch.micro) - 1
            # Dropout and noise depend on the rows alone, so they are the same whichever rank computes a pass, and when.
            # Ranks that have other tokens of the same rows draw other numbers, as for one rank's tokens they would be.
            place = () if self.model.split is None else (self.model.split.index,)
            randomness.seed(self._config.seed, number, batch.first_rows[index], done, *place)
            with self.model.micro_step(last):
                doing.does("forward")
                with self._timer.working() if index == 0 else contextlib.nullcontext():
                    losses = self.objective.loss(self.model.model, micro)
                totals.add(losses)
                if last:
                    own = RankReport(batch.tokens, requests(), self._work_seconds)
                    packed = pack_step_report(totals, own, self._ranks)
                    packed = packed.start() if self.model.replicated else packed
                doing.does("backward")
                (losses.sum * weight).backward()  # type: ignore[no-untyped-call]
        assert packed is not None, "a step has at least one micro-batch"
        return packed

    def _update(self, gradients: list[Tensor], factor: float, rate: float) -> None:
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        set_rate(self.optimizer, rate)
        self.optimizer.step()

    def _is_sound(self, loss: float, norm: float, number: int) -> tuple[bool, str]:
        """Return whether to learn from this batch, and if not, why; the reason is empty where only fp16's scale was too
        large."""
        if math.isfinite(loss) and not self._loss_scale.accepts(norm):
            if self._loss_scale.exhausted:
                raise NumericError(
                    f"the gradient norm is {norm} at step {number} whatever the loss scale (loss {loss:.4f})"
                )
            return False, ""
        why = self.guard.judge(loss, norm, number)
        return not why, why
