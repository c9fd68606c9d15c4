"""Checkpoints of a program's own loop by Muster's engine: what `run.save` and `run.load` of muster.run do.

The engine (`trainer.checkpoint`) writes each checkpoint to a store on the node's disk, from where `entries` makes a
folder of it. The keeper publishes that as it publishes any folder of a program's, so the program needs no credentials.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from muster.storage.listing import steps_in
from muster.storage.opening import open_store
from muster.trainer.checkpoint import CheckpointSaver, SaveOutcome, SaverIdentity, TrainState, load_attached, randomness
from muster.trainer.checkpoint.entries import Entries
from muster.trainer.errors import UserError
from muster.trainer.launch.process_control import has_adopter
from muster.trainer.parallel.groups import groups
from muster.words.checkpoint import DataCursor
from muster.words.job import Keep
from muster.words.names import Env

# A second copy in memory, by which a crash costs a step at most, takes this part of a rank's share of the machine's at
# most, as for Muster's trainer.
SNAPSHOT_MEMORY_PART: Final = 8
# A save that is under way as the program ends has this long: it goes to the node's own disk.
END_SECONDS_MAX: Final = 300.0


class LoopSaver:
    """One per rank, from its first save to the end of its process."""

    def __init__(
        self, watched: Path, local_rank: int, local_ranks: int, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Collective."""
        worker_dir, attempt = os.environ.get(Env.WORKER_DIR), os.environ.get(Env.ATTEMPT, "")
        watched.mkdir(parents=True, exist_ok=True)
        rank = groups().rank
        entries = Entries(watched.absolute(), Path(worker_dir) if worker_dir else None, rank, local_rank == 0)
        entries.clear()
        identity = SaverIdentity(
            job=os.environ.get(Env.JOB) or "program",
            job_uid=os.environ.get(Env.JOB_UID) or "program",
            attempt=int(attempt) if attempt.isdecimal() else 1,
            fence=None,  # it is the keeper that publishes
            folder=entries.store.as_uri(),
            trainer="program",
        )
        self._saver = CheckpointSaver(identity, Keep(last=1, best=0), {}, entries)
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._can_snapshot = self._saver.prepare(model, optimizer, machine // local_ranks // SNAPSHOT_MEMORY_PART)
        self._is_checked = self._is_owed = False

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any],
        *,
        is_due: bool,
        is_last: bool,
    ) -> None:
        """Collective. Keep the state in memory; where it `is_due` or the last, also make a checkpoint of it."""
        attached = _pack(state)
        if not self._is_checked:  # what can't be read again is refused before a night's training
            _unpack(attached)
            self._is_checked = True
        of_step = TrainState(
            model=model,
            optimizer=optimizer,
            step=step,
            tokens=0,
            cursor=DataCursor(seed=0, epoch=0, sample=0),
            state={},
            rng=randomness.state(),
            metrics={},
            best=False,
            attached=attached,
        )
        is_due = is_due or self._is_owed
        if is_due or is_last:
            self._saver.save(of_step, emergency=is_last)
            self._is_owed = self._report(step)
        if self._can_snapshot and (self._is_owed or not (is_due or is_last)):
            self._saver.snapshot(of_step)

    def finish(self) -> None:
        """End with the process. What is newer in memory than the last checkpoint is saved by the upload process, where
        a launcher waits for that."""
        self._say(self._saver.drain(END_SECONDS_MAX))
        if not has_adopter():
            self._saver.close()

    def _report(self, step: int) -> bool:
        """Say which saves failed, and return whether that of this step was skipped, on every rank, for an earlier one
        is still under way: the next step is saved in its place."""
        outcomes = self._saver.finished()
        self._say(outcomes)
        return any(outcome.step == step and is_skipped(outcome) for outcome in outcomes)

    def _say(self, outcomes: Iterable[SaveOutcome]) -> None:
        for outcome in outcomes:
            if groups().speaks and outcome.error is not None and not is_skipped(outcome):
                print(f"muster: no checkpoint of step {outcome.step}: {outcome.error}", file=sys.stderr, flush=True)


def is_skipped(outcome: SaveOutcome) -> bool:
    return outcome.error is not None and outcome.error.startswith("skipped: ")


def load(folder: str, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> int:
    """Collective. Load what `save` left in a folder, on any number of ranks, and return its step. Raises UserError,
    CheckpointError."""
    uri = Path(folder).absolute().as_uri()
    steps = steps_in(open_store(uri, links=False)) if os.path.isdir(folder) else ()
    if not steps:
        raise UserError(f"{folder}: holds no checkpoint of run.save; load it as the program has written it")
    commit, attached = load_attached(uri, steps[-1], model, optimizer)
    contents = _unpack(attached)
    if contents.keys() != state.keys():
        raise UserError(
            f"{folder}: step {commit.step} was saved with {_names(contents)}, and is loaded with {_names(state)}; give "
            "run.load the same as run.save"
        )
    for name, receiver in state.items():
        if isinstance(receiver, dict):
            receiver.clear()
            receiver.update(contents[name])
        else:
            receiver.load_state_dict(contents[name])
    everyone = groups()
    world = everyone.world
    if commit.world_size == world:
        randomness.restore(randomness.of_rank(commit, everyone.rank, world))
    elif everyone.speaks:
        words = f"step {commit.step} is of {commit.world_size} ranks: {world} take the state of rank 0"
        print(f"muster: {words}, and their random generators begin anew", file=sys.stderr, flush=True)
    return commit.step


def _pack(state: Mapping[str, Any]) -> bytes:
    """Return the state that Muster does not know as bytes. Raises UserError naming what has none."""
    contents = {}
    for name, each in state.items():
        if isinstance(each, dict):
            contents[name] = each
        elif hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
            contents[name] = each.state_dict()
        else:
            raise UserError(
                f"run.save: {name} is a {type(each).__name__}; give a dict, or what has state_dict and load_state_dict"
            )
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> dict[str, Any]:
    """Return what `_pack` was given, read without running code of the bytes. Raises UserError."""
    try:
        contents: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # torch says it by many types
        raise UserError(
            f"run.save takes numbers, text, tensors, and lists and dicts of them, for nothing else can be read back "
            f"without running code of a checkpoint: {str(error).splitlines()[0]}"
        ) from None
    return contents


def _names(state: Mapping[str, Any]) -> str:
    return ", ".join(sorted(state)) or "nothing beside model and optimizer"
