"""Checks of the data against the job, its ranks and the commit that they resume from. A failed check raises
UserError."""

from __future__ import annotations

from collections.abc import Callable

from muster.recipe.training import TrainingConfig
from muster.trainer.data.dataset import RunData
from muster.trainer.errors import UserError
from muster.trainer.parallel.groups import groups


def must_have_samples(config: TrainingConfig, data: RunData) -> None:
    if data.train.samples_per_epoch < 1:
        length = config.data.sequence_length
        raise UserError(
            f"training.data.train holds less than one sample of {length} tokens; add data or lower sequenceLength"
        )


def warn_of_small_epoch(config: TrainingConfig, data: RunData, report: Callable[[str], None]) -> None:
    """Say so where a step takes more samples than an epoch has, unless that is what a trial is about."""
    step, epoch = config.samples_per_step(), data.train.samples_per_epoch
    if epoch < step and config.data.overfit is None:
        report(
            f"data: warning: an epoch has fewer samples than one step: {epoch:,} of {step:,}, so that each step learns "
            f"from the same ones {step / epoch:.1f} times; add data, or lower batch.tokensPerStep"
        )


def must_be_alike(fingerprint: str) -> None:
    """Every rank deals itself its share of one order of samples, so all must hold the same data."""
    seen = groups().all.gather(fingerprint)
    strangers = [rank for rank, other in enumerate(seen) if other != seen[0]]
    if strangers:
        raise UserError(
            f"training.data differs between the nodes: ranks {strangers} read other contents than rank 0; "
            "put the same files on every node, or read them from one place (s3://, a shared file system)"
        )


def must_be_the_same_data(before: str | None, now: str, step: int) -> None:
    """A resume is exact only over the data of its commit."""
    if before is not None and before != now:
        raise UserError(
            f"training.data holds other contents than when step {step} was committed, or this Muster makes other "
            "samples of them than the one that committed it, so its position in them is lost: restore the files (after "
            "an upgrade, set runtime.image to the trainer image of before), or submit a new job with model.from to "
            "start from this checkpoint's weights"
        )
