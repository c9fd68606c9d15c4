"""Weights & Biases, by its own library."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muster.storage.opening import open_store
from muster.trainer.config import WorkerRun
from muster.trainer.tracking.tracker import scalars
from muster.words.redaction import redact_spec
from muster.words.signals import StepRecord
from muster.words.tracking import Wandb

FOLDER = "wandb"
# Nothing is sent that nobody asked for.
QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}


class WeightsAndBiases:
    """One run per job, under the job's id: a later attempt goes on with it, and what it repeats is passed over."""

    def __init__(self, run: WorkerRun, config: Wandb) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import wandb

        self._offline, self._run = config.mode == "offline", run
        self._wandb: Any = wandb.init(
            project=config.project,
            entity=config.entity,
            id=run.job_uid,
            name=run.job,
            config=redact_spec(run.document),
            mode=config.mode,
            dir=run.worker_dir,
            resume=None if self._offline else "allow",
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                **({"base_url": config.url} if config.url else {}),
            ),
        )

    def write(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self._wandb.log(scalars(record), step=record.step)

    def close(self) -> None:
        self._wandb.finish()
        if self._offline:
            self._keep()

    def _keep(self) -> None:
        """Put the attempt's file beside the commits: the worker's folder goes with the worker."""
        store = open_store(self._run.folder)
        for path in Path(self._run.worker_dir).glob("wandb/offline-run-*/*.wandb"):
            store.replace(f"{FOLDER}/attempt-{self._run.attempt}/{path.parent.name}/{path.name}", path.read_bytes())
