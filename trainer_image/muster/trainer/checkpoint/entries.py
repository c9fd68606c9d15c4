"""Checkpoints of a program, each as a folder that holds all of itself.

The engine writes a program's checkpoints to a store on the node's own disk. What publishes them, the keeper, knows
folders: so the files of each are linked into one, which is a store of one checkpoint, and revealed by a rename once its
COMMIT is there. Each node reveals what its own ranks wrote; only rank 0's has the COMMIT.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.storage.small_files import write_whole
from muster.words.checkpoint import COMMITS, commit_key, step_name
from muster.words.names import SAVE_REQUEST, SAVER

SAVES: Final = ".saves"  # the engine's store, in the folder of the checkpoints
# Of the node's folders; the store keeps what retention says. The keeper may be copying the one before the newest.
KEPT_ON_NODE: Final = 2


@dataclass(frozen=True)
class Entries:
    """The folders of this node's part of the checkpoints."""

    watched: Path  # where they are
    worker_dir: Path | None  # where the keeper hears of them; None: nobody keeps them, so all stay here
    rank: int
    is_leader: bool  # whether this rank is the first of its node

    @property
    def store(self) -> Path:
        return self.watched / SAVES

    def clear(self) -> None:
        """Remove what an earlier process of this rank's node left half done. The others must not have begun."""
        if self.is_leader:
            for path in (self.store, *self.watched.glob(".step-*.partial")):
                shutil.rmtree(path, ignore_errors=True)

    def register(self) -> None:
        """Tell the launcher of this process, which it does not end with the ranks: it may have to outlive its own."""
        if self.worker_dir is not None:
            write_whole(self.worker_dir / SAVER.format(rank=self.rank), json.dumps({"pid": os.getpid()}))

    def add(self, step: int, keys: Iterable[str]) -> None:
        """Link files of the store into the folder of a step that is not revealed yet. Raises OSError."""
        for key in keys:
            path = self._partial(step) / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # of a save of this step that failed
            path.hardlink_to(self.store / key)

    def add_shards(self, step: int, key: str) -> None:
        """Link this rank's file, and its frozen weights, which may have been written for an earlier step."""
        frozen = self.store.glob(f"step-*/attempt-*/frozen-{self.rank:05d}-of-*.safetensors")
        self.add(step, [key, *(path.relative_to(self.store).as_posix() for path in frozen)])

    def add_commit(self, step: int) -> None:
        """Link the COMMIT, before any node hears that there is one."""
        self.add(step, [commit_key(step)])

    def reveal(self, step: int) -> None:
        """Give the folder of a committed step its name, and say so; on a folder that nodes share the first one does.
        Raises OSError."""
        if not self.is_leader:
            return
        final = self.watched / step_name(step)
        old = self.watched / f".{step_name(step)}.old"
        if self._partial(step).exists():
            with contextlib.suppress(FileNotFoundError):
                final.rename(old)  # of a run that began again before this step
        with contextlib.suppress(FileNotFoundError):
            self._partial(step).rename(final)
        shutil.rmtree(old, ignore_errors=True)
        if self.worker_dir is not None:
            request = {"step": step, "folder": str(final), "at": time.time()}
            write_whole(self.worker_dir / SAVE_REQUEST.format(step=step), json.dumps(request))
            self._drop_old()
        for path in self.watched.glob(".step-*.partial"):
            if path.name < self._partial(step).name:  # of a save that failed
                shutil.rmtree(path, ignore_errors=True)

    def _partial(self, step: int) -> Path:
        return self.watched / f".{step_name(step)}.partial"

    def _drop_old(self) -> None:
        """Remove the older folders of this kind: the keeper has published them, or takes a newer one in their place."""
        steps = sorted(self.watched.glob("step-*"), key=lambda path: (len(path.name), path.name))
        ours = [path for path in steps if any((*path.glob(COMMITS), *path.glob("step-*/attempt-*")))]
        for path in ours[:-KEPT_ON_NODE]:
            shutil.rmtree(path, ignore_errors=True)
