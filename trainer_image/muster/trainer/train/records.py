"""Publication of a finished step: its record, its metrics, its line in the log, and the ranks that are slow."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from muster.plan import flops
from muster.trainer.config import RankPosition
from muster.trainer.train.evaluation import HeldOutResult
from muster.trainer.train.hardware import HardwareReader
from muster.trainer.train.metrics import RankMetrics, StepLog
from muster.trainer.train.rank_state import RankState
from muster.trainer.train.step import StepOutcome
from muster.trainer.train.straggler_timer import StragglerDetector
from muster.words.redaction import redact
from muster.words.signals import RANKS_TOLD_MAX, StepRecord
from muster.words.text import plural


@dataclass(frozen=True)
class RecordMaker:
    """Makes the StepRecords of one attempt."""

    attempt: int
    steps: int  # of the whole job
    world: int  # the number of ranks of the gang
    device: torch.device
    flops_per_token: float  # of the model's own work, without recomputation
    peak: float | None  # FLOPs per second of one device; None where it is not known
    hardware: HardwareReader | None = None  # of the rank that keeps the log

    def of(self, outcome: StepOutcome) -> StepRecord:
        speed = outcome.tokens / outcome.seconds
        return StepRecord(
            attempt=self.attempt,
            step=outcome.number,
            steps=self.steps,
            at=time.time(),
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            lr=outcome.learning_rate,
            tokens=outcome.tokens,
            tokens_per_second=speed,
            step_seconds=outcome.seconds,
            data_wait_seconds=outcome.data_wait_seconds,
            mfu=flops.utilisation(self.flops_per_token, speed, self.peak, self.world),
            memory_bytes=_memory_used(self.device),
            values=outcome.values,
            rank_seconds=by_rank(outcome.work_seconds),
            hardware=self.hardware.use() if self.hardware is not None else {},
            skipped=outcome.skipped,
        )

    def of_start(self, result: HeldOutResult) -> StepRecord:
        """Step 0: nothing is trained yet, so its loss is the held-out one."""
        return StepRecord(
            attempt=self.attempt,
            step=0,
            steps=self.steps,
            at=time.time(),
            loss=result.loss,
            grad_norm=0.0,
            lr=0.0,
            tokens=0,
            tokens_per_second=0.0,
            step_seconds=0.0,
            data_wait_seconds=0.0,
            memory_bytes=_memory_used(self.device),
            evaluation_loss=result.loss,
            evaluation_values=result.values,
        )


class StepReporter:
    """Tells the heartbeat, Prometheus, the log and people of every step. Only rank 0 has a log and compares ranks."""

    def __init__(
        self, directory: Path, metrics: RankMetrics, rank_state: RankState, ranks: RankPosition, records: RecordMaker
    ) -> None:
        self.metrics, self.records = metrics, records
        self._rank_state, self._ranks = rank_state, ranks
        self._stragglers = StragglerDetector(ranks.world)
        self._log = StepLog(directory) if ranks.speaks else None
        rank_state.heartbeats.before_each_beat(self._log.flush if self._log else None)

    def finished(
        self, outcome: StepOutcome, record: StepRecord, samples: int, skipped_steps: int, traced: bool = False
    ) -> None:
        """Note that a step has ended. `samples` counts those of all ranks, `skipped_steps` the steps skipped in this
        job so far. Where a rank is `traced` it is no slower for that than it is without.
        """
        if self._ranks.speaks:
            if not traced:
                self._stragglers.hear(outcome.number, outcome.work_seconds)
            self._rank_state.slow_ranks = self._stragglers.slow
            self.metrics.stragglers.set(self._stragglers.slow)
        if outcome.skipped:
            self._rank_state.steps.skipped = skipped_steps
            self._rank_state.steps.skipped_samples = skipped_steps * samples
            self.metrics.learning.skip(samples)
            if self._ranks.speaks:
                say(f"step {outcome.number}: {outcome.skipped}; {plural(samples, 'sample')} skipped")
        self.metrics.stepped(record, 0 if outcome.skipped else samples, outcome.data_wait_seconds)

    def publish(self, record: StepRecord) -> None:
        """The record of a step is whole: what was due after it (an evaluation) is in it."""
        self._rank_state.stepped(record)
        if self._log is not None:
            self._log.write(record)

    def unwritten(self) -> tuple[str, ...]:
        """Lines of the step log that whoever commits this step writes, should this rank die first."""
        return self._log.unwritten() if self._log is not None else ()

    def close(self) -> None:
        """Write what is not written yet."""
        self._rank_state.heartbeats.before_each_beat(None)
        if self._log is not None:
            self._log.close()


def by_rank(seconds: Sequence[float]) -> dict[str, float]:
    """Each rank's own work as a step's record tells it, to four digits; nothing of a single rank, nor before all ranks
    have told theirs."""
    if len(seconds) < 2 or min(seconds) <= 0:
        return {}
    if len(seconds) <= RANKS_TOLD_MAX:
        named = {str(rank): own for rank, own in enumerate(seconds)}
    else:
        named = {"fastest": min(seconds), "median": statistics.median(seconds), "slowest": max(seconds)}
    return {name: float(f"{own:.4g}") for name, own in named.items()}


def say(line: str) -> None:
    """Tell the people who read this worker's log."""
    print(redact(line), file=sys.stderr, flush=True)  # addresses of data may be signed


def _memory_used(device: torch.device) -> int:
    """Peak bytes of this process on the GPU, or on the CPU in memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
