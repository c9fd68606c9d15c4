"""An estimate of a job, with what storage shows of its model and data: for the API, and for a command without one."""

from __future__ import annotations

from collections.abc import Sequence

from muster.plan.estimate import NO_ESTIMATE, Estimate, EstimateInputs, estimate_job
from muster.plan.throughput import MeasuredSpeed
from muster.recipe.document import JobSpec
from muster.storage.data_shape import examine
from muster.storage.model_source import model_facts
from muster.words.base import UserError
from muster.words.prices import Prices


def estimate_with_storage(
    spec: JobSpec, prices: Prices, records: Sequence[MeasuredSpeed] = (), machine_bytes: int | None = None
) -> Estimate:
    """The estimate of a job, from its document and from what storage shows of its model and its data.

    `machine_bytes` is the memory of the one machine that all workers would share; None if it is not known.

    Raises UserError for a program and for a model that can't be trained, StorageError for one that can't be read now,
    ValueError for a batch that can't be divided.
    """
    if (training := spec.training) is None:
        raise UserError(NO_ESTIMATE)
    facts = model_facts(training)
    ranks = spec.gang.nodes.max * spec.gang.ranks_per_node
    vocabulary = facts.size.vocab_size if training.scores is None else None
    look = examine(training, same_disk=machine_bytes is not None, vocabulary=vocabulary)
    job_facts = EstimateInputs(
        size=facts.size,
        casts_itself=facts.casts_itself,
        prices=prices,
        position_limit=facts.position_limit,
        records=records,
        rank_bytes=None if machine_bytes is None else machine_bytes // ranks,
        data=look.shape,
        data_faults=look.faults,
        data_gap=look.gap,
        evaluation_gap=look.evaluation_gap,
    )
    return estimate_job(spec, job_facts)
