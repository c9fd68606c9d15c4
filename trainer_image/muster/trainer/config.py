"""Configuration of this worker: the environment and MUSTER_CONFIG, checked before any device is touched."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from muster.recipe.document import WorkerConfig
from muster.recipe.training import TrainingConfig
from muster.trainer.errors import UserError
from muster.words.address import AddressError, checkpoint_address
from muster.words.base import InvalidDocument, dump, parse, problems
from muster.words.job import CheckpointSpec, EarlierAttempts
from muster.words.names import FIRST_INCARNATION, Env
from muster.words.status import DataSkip
from muster.words.tracking import Tracking


@dataclass(frozen=True)
class WorkerRun:
    """One worker's orders."""

    job: str
    job_uid: str
    attempt: int
    worker: int
    incarnation: int
    resume_step: int  # 0 for a fresh start
    folder: str  # the job's checkpoint folder, as an address
    # where the current attempt is written; None where nobody else can start an attempt (tests, a run by hand)
    fence: str | None
    worker_dir: Path
    cache_dir: Path
    training: TrainingConfig
    checkpoint: CheckpointSpec
    past: EarlierAttempts = field(default_factory=EarlierAttempts)
    data_skip: DataSkip | None = None
    tracking: Tracking = field(default_factory=Tracking)

    @property
    def document(self) -> dict[str, object]:
        """The resolved training configuration, as it is stored with every commit."""
        return dump(self.training)


SPEAKER: Final = 0  # the rank that speaks for the gang


@dataclass(frozen=True)
class RankPosition:
    """Position of this process in the gang, as torchrun gives it."""

    rank: int
    local_rank: int
    world: int
    local_world: int

    @property
    def speaks(self) -> bool:
        """Return whether this rank speaks for the gang: it alone logs, keeps what all ranks have alike, and decides
        what all of them then do."""
        return self.rank == SPEAKER

    @property
    def speaks_for_its_node(self) -> bool:
        """Return whether this rank reports what the ranks of its node see alike."""
        return self.local_rank == 0

    @property
    def nodes(self) -> int:
        return max(1, self.world // self.local_world)


@dataclass(frozen=True)
class DataParallel:
    """Division of a step's samples into `size` equal shares; this rank computes those in `shares`.

    A share is not a rank. Ranks that compute one model together hold the same share, and a rank that takes over the
    work of a lost one holds two. Batches, evaluation and a step's sums know only shares.

    All ranks make as many passes as the rank with the most shares, for a sharded model's passes need them all. A rank
    that holds fewer shares fills up with batches in which nothing is scored.
    """

    size: int  # the number of shares of a step
    shares: tuple[int, ...]  # the numbers of those that this rank computes
    ranks_per_share: int = 1  # how many ranks compute one share together
    shares_per_rank: int = 1  # the most that any rank holds

    @property
    def blank_shares(self) -> int:
        """Number of shares' worth of unscored batches that this rank computes in addition to its own."""
        return max(0, self.shares_per_rank - len(self.shares))


def read_run(environ: Mapping[str, str] = os.environ) -> WorkerRun:
    """The orders in the environment. Raises UserError naming the variable or the path of every fault."""
    config = _worker_config(_required(environ, Env.CONFIG))
    if (training := config.training) is None:
        raise UserError(f"{Env.CONFIG} has no training: a program is started by its own launcher, muster.worker")
    worker_dir = Path(environ.get(Env.WORKER_DIR) or ".").resolve()
    return WorkerRun(
        job=environ.get(Env.JOB) or "job",
        job_uid=_required(environ, Env.JOB_UID),
        attempt=_number(environ, Env.ATTEMPT, 1),
        worker=_number(environ, Env.WORKER, 0),
        incarnation=_number(environ, Env.INCARNATION, FIRST_INCARNATION),
        resume_step=_number(environ, Env.RESUME_STEP, 0),
        folder=folder_in(environ),
        fence=environ.get(Env.FENCE) or None,
        worker_dir=worker_dir,
        cache_dir=Path(environ.get(Env.CACHE_DIR) or worker_dir / "cache").resolve(),
        training=training,
        checkpoint=config.checkpoint,
        past=config.past or EarlierAttempts(),
        data_skip=config.data_skip,
        tracking=config.tracking,
    )


def read_ranks(environ: Mapping[str, str] = os.environ) -> RankPosition:
    """torchrun's variables; one lonely rank where there are none."""
    world = _number(environ, "WORLD_SIZE", 1)
    return RankPosition(
        rank=_number(environ, "RANK", 0),
        local_rank=_number(environ, "LOCAL_RANK", 0),
        world=world,
        local_world=_number(environ, "LOCAL_WORLD_SIZE", world),
    )


def data_parallel(training: TrainingConfig, ranks: RankPosition) -> DataParallel:
    """The share of this rank at the start of a run. Raises UserError when the batch can't be divided."""
    try:
        size = training.data_parallel_size(ranks.world)
        training.accumulation(size)
    except ValueError as error:
        raise UserError(f"{error}; change tokensPerStep or microBatch, or run another number of ranks") from None
    ranks_per_share = ranks.world // size
    return DataParallel(size, (ranks.rank // ranks_per_share,), ranks_per_share)


def _worker_config(text: str) -> WorkerConfig:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UserError(f"{Env.CONFIG} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise UserError(f"{Env.CONFIG} must be a JSON object with the keys training and checkpoint")
    try:
        training = parse(TrainingConfig, document.get("training"), "training")
        checkpoint = parse(CheckpointSpec, document.get("checkpoint") or {}, "checkpoint")
        tracking = parse(Tracking, document.get("tracking") or {}, "tracking")
        parsed = {"training": training, "checkpoint": checkpoint, "tracking": tracking}
        return WorkerConfig.model_validate({**document, **parsed})
    except InvalidDocument as error:
        raise UserError(f"the job's configuration was refused:\n{error}") from None
    except ValidationError as error:
        faults = "\n".join(str(problem) for problem in problems(WorkerConfig, error))
        raise UserError(f"the job's configuration was refused:\n{faults}") from None


def folder_in(environ: Mapping[str, str]) -> str:
    """The address of the job's checkpoint folder. Raises UserError where it can't be one."""
    try:
        return str(checkpoint_address(_required(environ, Env.CHECKPOINT_URI)))
    except AddressError as error:
        raise UserError(f"{Env.CHECKPOINT_URI}: {error}") from None


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise UserError(f"{name} is not set: start workers through Muster, or set it by hand (see muster.words.names)")
    return value


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdecimal():
        raise UserError(f"{name} must be a whole number, not {text!r}")
    return int(text)
