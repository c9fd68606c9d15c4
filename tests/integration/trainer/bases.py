"""A job to start others from."""

from dataclasses import replace

import torch
from tests.integration.checkpoint.one_rank import identity, outcomes, state
from tests.integration.trainer.gangs import ARCHITECTURE, Job

from muster.recipe.architecture import Architecture
from muster.trainer.checkpoint import CheckpointSaver
from muster.trainer.models.decoder import build
from muster.trainer.models.init import initialize
from muster.trainer.models.scoring import ScoreHead
from muster.words.base import dump
from muster.words.job import Keep


def write_base(job: Job, scores: ScoreHead | None = None) -> None:
    """Another job's commit: of its first weights, which will do as well as any. With `scores` a reward model's."""
    decoder = build(Architecture.model_validate(ARCHITECTURE), scores=scores).to_empty(device="cpu")
    initialize(decoder, decoder.architecture, 5)
    described = dump(decoder.architecture) | (scores.describe() if scores else {})
    about = replace(identity(f"file://{job.folder}"), architecture=described)
    saving = CheckpointSaver(about, Keep(), {})
    try:
        saving.save(state(decoder, torch.optim.AdamW(decoder.parameters()), 8))
        assert outcomes(saving) == [(8, True, None)]
    finally:
        saving.close()
