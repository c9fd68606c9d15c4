"""Which data the next attempt leaves out, after an attempt that ended for its numbers.

It resumes from the newest commit, and what was trained since then, up to the batch that could not be learnt from, is
passed over (PaLM, arXiv 2204.02311, 5.1: restart before the spike and skip the batches seen around it).
"""

from __future__ import annotations

from muster.contract.signals import Cause
from muster.contract.status import DataSkip
from muster.operator.core.roll import Roll


def data_skip(roll: Roll, resume_step: int) -> DataSkip | None:
    """For the attempt that is being minted. What was passed over after the same commit before stays so."""
    status = roll.status
    before = status.data_skip if status.data_skip and status.data_skip.after_step == resume_step else None
    failure = status.last_failure
    if failure is None or failure.attempt != status.attempt or failure.cause is not Cause.NUMERIC:
        return before
    trained = failure.step + 1 - resume_step if failure.step is not None else 1
    return DataSkip(after_step=resume_step, steps=(before.steps if before else 0) + max(1, trained))
