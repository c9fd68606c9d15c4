"""Muster's own processes beside a program of the user's own: `prepare` fills the node's disk before the program starts,
and `keeper` keeps the checkpoints that it writes. Both run with Muster's interpreter, never with the program's.

Here are their orders, read from the environment of the worker.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from muster.recipe.document import WorkerConfig
from muster.storage.small_files import read_regular
from muster.trainer.config import folder_in
from muster.trainer.errors import UserError
from muster.words.base import problems
from muster.words.job import CheckpointSpec
from muster.words.names import FIRST_INCARNATION, Env, Rendezvous
from muster.words.program import Program

# Folders in MUSTER_WORKER_DIR; its files are named in the contract.
WORK = "work"  # the program's working directory
SOURCE = "source"
INPUTS = "inputs"
CHECKPOINTS = "checkpoints"  # where MUSTER_CHECKPOINT_DIR leads
KEEPING = "keeper"  # the keeper's own files


@dataclass(frozen=True)
class WorkerOrders:
    """One worker's orders."""

    job: str
    job_uid: str
    attempt: int
    worker: int
    incarnation: int
    workers: int  # of the gang
    ranks: int  # of this worker
    resume_step: int  # 0 for a fresh start
    store: str  # the address of the job's checkpoint folder
    fence: str | None  # where the current attempt is written; None checks nothing
    worker_dir: Path
    program: Program
    checkpoint: CheckpointSpec
    watched: Path  # the folder that the program writes its checkpoints to


def read_surroundings(environ: Mapping[str, str] = os.environ) -> WorkerOrders:
    """The orders in the environment. Raises UserError naming the variable or the path of a fault."""
    try:
        config = WorkerConfig.model_validate_json(environ.get(Env.CONFIG) or "")
    except ValidationError as error:
        faults = "\n".join(str(problem) for problem in problems(WorkerConfig, error))
        raise UserError(f"{Env.CONFIG}: the job's configuration was refused:\n{faults}") from None
    if config.program is None:
        raise UserError(f"{Env.CONFIG} has no program: Muster's own trainer keeps its checkpoints itself")
    worker_dir = Path(environ.get(Env.WORKER_DIR) or ".").resolve()
    if config.checkpoint.folder:
        watched = worker_dir / WORK / config.checkpoint.folder
    else:
        watched = Path(environ.get(Env.CHECKPOINT_DIR) or worker_dir / CHECKPOINTS)
    return WorkerOrders(
        job=environ.get(Env.JOB) or "job",
        job_uid=environ.get(Env.JOB_UID) or "",
        attempt=int(environ.get(Env.ATTEMPT) or 1),
        worker=int(environ.get(Env.WORKER) or 0),
        incarnation=int(environ.get(Env.INCARNATION) or FIRST_INCARNATION),
        workers=int(environ.get(Rendezvous.NODES) or 1),
        ranks=int(environ.get(Rendezvous.RANKS_PER_NODE) or 1) if config.program.launcher == "torchrun" else 1,
        resume_step=int(environ.get(Env.RESUME_STEP) or 0),
        store=folder_in(environ),
        fence=environ.get(Env.FENCE) or None,
        worker_dir=worker_dir,
        program=config.program,
        checkpoint=config.checkpoint,
        watched=watched,
    )


def read_document(path: Path) -> dict[str, Any] | None:
    """A small JSON object that another process writes; None where there is none, or none yet."""
    try:
        document = json.loads(read_regular(path))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
