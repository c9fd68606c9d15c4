"""Protocol of a tracker, and the names by which it shows a step's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from muster.words.signals import StepRecord


class RunTracker(Protocol):
    """Destination of a job's numbers. After any error, it is called again with the same records for a while."""

    def write(self, records: Sequence[StepRecord]) -> None:
        """Take these, in the order of their steps. After a restart, steps may be repeated."""

    def close(self) -> None:
        """Store the records that are not stored yet; there will be no more."""


def scalars(record: StepRecord) -> dict[str, float]:
    """The numbers of a step by the names that people look for: `train/loss`, `evaluation/loss` and so on."""
    values: dict[str, float] = {}
    if record.step_seconds > 0:  # step 0 is an evaluation alone
        values = {
            "train/loss": record.loss,
            "train/grad_norm": record.grad_norm,
            "train/learning_rate": record.lr,
            "speed/tokens_per_second": record.tokens_per_second,
            "speed/step_seconds": record.step_seconds,
            "speed/data_wait_seconds": record.data_wait_seconds,
            "speed/memory_bytes": float(record.memory_bytes),
        }
        if record.mfu is not None:
            values["speed/mfu"] = record.mfu
        values |= {f"train/{name}": value for name, value in record.values.items()}
    if record.evaluation_loss is not None:
        values["evaluation/loss"] = record.evaluation_loss
        values |= {f"evaluation/{name}": value for name, value in record.evaluation_values.items()}
    return values
