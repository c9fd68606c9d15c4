"""Hub of the signals of all sources, until they are withdrawn or their attempt is over.

All of it is a cache: what a new operator has not heard yet, its sources will repeat.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from muster.operator.sources.alerts import AlertOutcome, SignalReport
from muster.words.signals import Signal

# A storm of ever new alerts must not fill the memory; a real job has a handful.
PER_JOB_MAX, JOBS_MAX = 64, 20_000

Key = tuple[str, str]  # source, and the report's own


class SignalHub:
    """The signals that stand about each job, of all sources. Any thread may call anything here.

    `current` returns the attempt of a living job, and None for a job that is over or unknown. `enqueue` is called, from
    any thread, with the uid of a job about which something changed.
    """

    def __init__(self, current: Callable[[str], int | None], enqueue: Callable[[str], None]) -> None:
        self._current, self._enqueue = current, enqueue
        self._signals: dict[str, dict[Key, Signal]] = {}
        self._lock = threading.Lock()

    def take(self, source: str, report: SignalReport) -> AlertOutcome:
        """Keep it, unless it is about what is gone. The same key again is a repetition."""
        outcome = self._keep(source, report)
        if outcome is AlertOutcome.TAKEN:
            self._enqueue(report.uid)
        return outcome

    def withdraw(self, source: str, uid: str, key: str) -> AlertOutcome:
        with self._lock:
            signals = self._signals.get(uid, {})
            withdrawn = signals.pop((source, key), None)
            if not signals:
                self._signals.pop(uid, None)
        if withdrawn is not None:
            self._enqueue(uid)
        return AlertOutcome.RESOLVED

    def replace(self, source: str, reports: Iterable[SignalReport]) -> None:
        """Replace the reports of this source by these."""
        by_key = {(report.uid, report.key): report for report in reports}
        with self._lock:
            here = [(uid, key) for uid, signals in self._signals.items() for from_, key in signals if from_ == source]
        for uid, key in here:
            if (uid, key) not in by_key:
                self.withdraw(source, uid, key)
        for report in by_key.values():
            self.take(source, report)

    def signals(self, uid: str, attempt: int) -> tuple[Signal, ...]:
        """Return the signals of this attempt. Those of earlier ones are dropped."""
        with self._lock:
            by_key = self._signals.get(uid)
            if by_key is None:
                return ()
            for key in [key for key, signal in by_key.items() if signal.attempt < attempt]:
                del by_key[key]
            if not by_key:
                del self._signals[uid]
            return tuple(signal for signal in by_key.values() if signal.attempt == attempt)

    def forget(self, uid: str) -> None:
        with self._lock:
            self._signals.pop(uid, None)

    def _keep(self, source: str, report: SignalReport) -> AlertOutcome:
        attempt = self._current(report.uid)
        if attempt is None:
            self.forget(report.uid)
            return AlertOutcome.JOB_GONE
        if attempt != report.signal.attempt:
            return AlertOutcome.ATTEMPT_GONE
        with self._lock:
            if report.uid not in self._signals and len(self._signals) >= JOBS_MAX:
                return AlertOutcome.TOO_MANY
            signals = self._signals.setdefault(report.uid, {})
            key = (source, report.key)
            if (previous := signals.get(key)) is not None and previous.attempt == attempt:
                return AlertOutcome.REPEATED
            if len(signals) >= PER_JOB_MAX:
                return AlertOutcome.TOO_MANY
            signals[key] = report.signal
            return AlertOutcome.TAKEN
