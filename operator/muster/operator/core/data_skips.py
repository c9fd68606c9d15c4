"""Data that the next attempt skips after a numeric failure.

It resumes from the newest commit, and what was trained since then, up to the batch that could not be learnt from, is
passed over (PaLM, arXiv 2204.02311, 5.1: restart before the spike and skip the batches seen around it). Should that be
of no help, the trainer gives the commit up, and the newest is one before it.
"""

from __future__ import annotations

from muster.operator.core.worker_summary import WorkerSummary
from muster.words.signals import Cause
from muster.words.status import DataSkip


def data_skip(summary: WorkerSummary, resume_step: int) -> DataSkip | None:
    """Return the data to skip for the attempt that is being started. Data that was skipped after the same checkpoint
    before stays skipped."""
    status = summary.status
    before, failure = status.data_skip, status.last_failure
    if failure is None or failure.attempt != status.attempt or failure.cause is not Cause.NUMERIC:
        return before if before and before.after_step == resume_step else None
    trained = failure.step + 1 - resume_step if failure.step is not None else 1
    # The data that the attempt met lay so much further on, also where it began after a commit that is given up now.
    passed_over = before.steps if before and before.after_step >= resume_step else 0
    return DataSkip(after_step=resume_step, steps=passed_over + max(1, trained))
