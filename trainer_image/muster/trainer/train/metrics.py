"""Metrics that a rank publishes about its training: StepRecord lines and Prometheus metrics."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from muster.words.base import dump_json
from muster.words.names import STEP_LOG
from muster.words.signals import Heartbeat, SlowRank, StepRecord, TrainerPhase

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

STEP_SECONDS_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


# What is handed over with a copy of the state in memory must leave room there for the rest (snapshot.ORDER_BYTES). A
# record has some 500 bytes, and is written within a tenth of a second.
UNWRITTEN_BYTES_MAX = 32_000


class StepLog:
    """Rank 0's lines: one JSON object per step, on standard output and in steps.jsonl.

    They are written by whoever calls `flush` (the heartbeat's thread, ten times a second), so that a slow disk or a
    full pipe does not hold up a step.
    """

    def __init__(self, directory: Path, out: TextIO = sys.stdout) -> None:
        self._out = out
        self._file = (directory / STEP_LOG).open("a")
        self._waiting: deque[StepRecord] = deque()
        self._flushing = threading.Lock()

    def write(self, record: StepRecord) -> None:
        self._waiting.append(record)

    def unwritten(self) -> tuple[str, ...]:
        """The newest lines that may not be written yet, some kilobytes at most. Waits for nobody."""
        lines = list[str]()
        left = UNWRITTEN_BYTES_MAX
        for record in reversed(self._waiting.copy()):
            lines.append(dump_json(record))
            left -= len(lines[-1])
            if left < 0:
                break
        return tuple(reversed(lines))

    def flush(self) -> None:
        with self._flushing:
            count = len(self._waiting)
            lines = "".join(dump_json(self._waiting[number]) + "\n" for number in range(count))
            try:
                if lines:
                    for stream in (self._file, self._out):
                        stream.write(lines)
                        stream.flush()
            finally:
                # Only now, see unwritten; and also where a disk is full or nobody listens, as the file would get the
                # same lines ten times a second.
                for _ in range(count):
                    self._waiting.popleft()

    def close(self) -> None:
        self.flush()
        self._file.close()


class SpeedMetrics:
    """Metrics of the amount of training and of its speed.

    `hardware_share` is HFU divided by MFU. `place` holds the registry and the namespace as keyword arguments for
    prometheus_client.
    """

    def __init__(self, rank: int, hardware_share: float, place: dict[str, Any]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._rank, self._hardware_share = str(rank), hardware_share
        self._seconds = Histogram("step_seconds", "Time of one optimizer step", buckets=STEP_SECONDS_BUCKETS, **place)
        self._rank_seconds = Gauge("rank_step_seconds", "This rank's last step, waits included", ["rank"], **place)
        self._steps = Counter("steps_total", "Optimizer steps made by this process", **place)
        self._tokens = Counter(
            "tokens_total", "Tokens trained on by all ranks in this attempt, padding not counted", **place
        )
        self._samples = Counter("samples_total", "Samples trained on by all ranks in this attempt", **place)
        self._tokens_per_second = Gauge(
            "tokens_per_second", "Tokens per second of all ranks over the last step", **place
        )
        self._mfu = Gauge(
            "mfu_ratio", "Model FLOPs utilisation of the last step; NaN where the peak is unknown", **place
        )
        self._hfu = Gauge("hfu_ratio", "The same with recomputed work (estimated for selective checkpointing)", **place)
        self._memory = Gauge("memory_bytes", "Peak memory of this rank on the device; on the CPU resident", **place)
        self._data_wait = Counter("data_wait_seconds_total", "Time this rank waited for data", **place)
        self._last_step_at = Gauge("last_step_timestamp_seconds", "When the last step ended", **place)
        self._mfu.set(float("nan"))
        self._hfu.set(float("nan"))

    def stepped(self, record: StepRecord, samples: int, own_data_wait: float) -> None:
        """Note that a step has ended. `samples` counts those of all ranks. `own_data_wait` is the time in seconds for
        which this rank waited for data.
        """
        self._seconds.observe(record.step_seconds)
        self._rank_seconds.labels(self._rank).set(record.step_seconds)
        self._steps.inc()
        self._tokens.inc(record.tokens)
        self._samples.inc(samples)
        self._tokens_per_second.set(record.tokens_per_second)
        self._memory.set(record.memory_bytes)
        self._data_wait.inc(own_data_wait)
        self._last_step_at.set(record.at)
        if record.mfu is not None:
            self._mfu.set(record.mfu)
            self._hfu.set(record.mfu * self._hardware_share)


class LearningMetrics:
    """Metrics of learning: losses, gradient norms, learning rates and skipped steps."""

    def __init__(self, place: dict[str, Any]) -> None:
        from prometheus_client import Counter, Gauge

        self._place = place
        self._skipped_steps = Counter(
            "skipped_steps_total", "Steps whose batch was not learnt from, for its numbers", **place
        )
        self._skipped_samples = Counter("skipped_samples_total", "Samples of skipped steps", **place)
        self._evaluation_loss = Gauge("evaluation_loss", "Loss of the last evaluation, per scored term", **place)
        self._loss = Gauge("loss", "Training loss of the last step, per scored term", **place)
        self._grad_norm = Gauge("grad_norm", "Gradient norm of the last step, before clipping", **place)
        self._learning_rate = Gauge("learning_rate", "Learning rate of the last step", **place)
        self._values = Gauge("objective", "What the objective reports of the last step by name", ["name"], **place)
        self._evaluation_values = Gauge(
            "evaluation_objective", "What the objective reports of the last evaluation by name", ["name"], **place
        )

    def skip(self, samples: int) -> None:
        """Note a step that was not learnt from, with the samples of all ranks."""
        self._skipped_steps.inc()
        self._skipped_samples.inc(samples)

    def watch_balance(self, last: Callable[[], float | None]) -> None:
        """Show the load-balancing loss of this rank's last pass, read at each scrape. `last` returns it."""
        from prometheus_client import Gauge

        help_ = "How unequally the experts of a mixture were busy in this rank's last pass; NaN where that is not asked"
        gauge = Gauge("load_balancing_loss", help_, **self._place)
        gauge.set_function(lambda: float("nan") if (value := last()) is None else value)

    def stepped(self, record: StepRecord) -> None:
        self._loss.set(record.loss)
        self._grad_norm.set(record.grad_norm)
        self._learning_rate.set(record.lr)
        for name, value in record.values.items():
            self._values.labels(name).set(value)

    def evaluated(self, loss: float, values: Mapping[str, float]) -> None:
        """Note an evaluation: its loss, and what the objective reported by name."""
        self._evaluation_loss.set(loss)
        for name, value in values.items():
            self._evaluation_values.labels(name).set(value)


class CommitMetrics:
    """Metrics of saves: their durations and their failures."""

    def __init__(self, place: dict[str, Any]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self.blocked = Histogram(
            "checkpoint_blocked_seconds",
            "Time a save kept this rank from training",
            buckets=STEP_SECONDS_BUCKETS,
            **place,
        )
        self.failures = Counter("checkpoint_failures_total", "Saves that ended without a checkpoint", **place)
        self._duration = Histogram(
            "checkpoint_duration_seconds",
            "Time from the start of a save to its checkpoint",
            buckets=STEP_SECONDS_BUCKETS,
            **place,
        )
        self._bytes = Counter("checkpoint_bytes_total", "Bytes that this rank wrote into commits", **place)
        self._last_at = Gauge("last_commit_timestamp_seconds", "When the last checkpoint was seen", **place)
        self._last_step = Gauge("last_commit_step", "The step of the last checkpoint", **place)

    def committed(self, step: int, at: float, seconds: float, size: int) -> None:
        """Note that a commit of `step` exists since `at` (seconds since the epoch). `seconds` is the time since its
        save began, `size` the number of bytes that this rank wrote.
        """
        self._duration.observe(seconds)
        self._bytes.inc(size)
        self._last_step.set(step)
        self._last_at.set(at)


class StragglerMetrics:
    """Metrics of the ranks that are slow now; a rank that is no longer slow has no series."""

    def __init__(self, place: dict[str, Any]) -> None:
        from prometheus_client import Gauge

        self._any = False
        self._ratio = Gauge(
            "straggler_ratio", "Own work of a slow rank in a step, to the median of the others", ["rank"], **place
        )

    def set(self, slow: Sequence[SlowRank]) -> None:
        if slow or self._any:
            self._ratio.clear()
            self._any = bool(slow)
            for entry in slow:
                self._ratio.labels(str(entry.rank)).set(entry.ratio)


class RankMetrics:
    """The metrics of one rank, in a registry of its own.

    `heartbeat` is called at every scrape, for the phase and the seconds. `hardware_share` is HFU divided by MFU.
    """

    def __init__(self, rank: int, heartbeat: Callable[[], Heartbeat], hardware_share: float = 1.0) -> None:
        from prometheus_client import CollectorRegistry

        self.registry: CollectorRegistry = CollectorRegistry()
        place: dict[str, Any] = {"registry": self.registry, "namespace": "muster_trainer"}
        self.speed = SpeedMetrics(rank, hardware_share, place)
        self.learning = LearningMetrics(place)
        self.commits = CommitMetrics(place)
        self.stragglers = StragglerMetrics(place)
        self.registry.register(_FromHeartbeat(heartbeat))

    def stepped(self, record: StepRecord, samples: int, own_data_wait: float) -> None:
        """Note that a step has ended, as `SpeedMetrics.stepped` does."""
        self.speed.stepped(record, samples, own_data_wait)
        self.learning.stepped(record)

    def serve(self, address: str, ready: Callable[[int], None]) -> None:
        """Answer /metrics on a free port, from a thread that also does the slow imports; `ready` is told the port."""

        def start() -> None:
            from prometheus_client import start_http_server

            try:
                server, _ = start_http_server(0, addr=address, registry=self.registry)
            except OSError as error:  # training is worth more than its metrics
                print(f"metrics are not served: {error}", file=sys.stderr)
                return
            ready(server.server_port)

        threading.Thread(target=start, name="metrics", daemon=True).start()


class _FromHeartbeat:
    """Phase, goodput seconds and the step, read when somebody asks."""

    def __init__(self, heartbeat: Callable[[], Heartbeat]) -> None:
        self._heartbeat = heartbeat

    def collect(self) -> Any:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        beat = self._heartbeat()
        seconds = CounterMetricFamily(
            "muster_trainer_goodput_seconds",
            "Time since the process started, by what it was spent on",
            labels=["state"],
        )
        for state, value in beat.seconds.model_dump(by_alias=False).items():
            seconds.add_metric([state], value)
        phase = GaugeMetricFamily("muster_trainer_phase", "1 for the phase that this rank is in", labels=["phase"])
        for each in TrainerPhase:
            phase.add_metric([each.value], float(each is beat.phase))
        step = GaugeMetricFamily("muster_trainer_step", "The last step that this rank finished", value=beat.step)
        limit = GaugeMetricFamily(
            "muster_trainer_limit_seconds",
            "How long this phase may go without progress, learnt from this run; absent until it is",
        )
        if beat.limit_seconds is not None:
            limit.add_metric([], beat.limit_seconds)
        return [seconds, phase, step, limit]
