"""Checkpoints that cannot lie: what is committed loads, or says so before a tensor is touched.

The names below are imported when they are first used: the upload process and the commands share this package and must
start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muster.trainer.checkpoint.commits import list_commits, read_commit
    from muster.trainer.checkpoint.failures import CheckpointError, CheckpointMismatch, DamagedCommit, UnusableCommit
    from muster.trainer.checkpoint.loader import load, load_attached, load_weights, resume
    from muster.trainer.checkpoint.policy import SavePolicy, retained
    from muster.trainer.checkpoint.quarantine import newest_readable
    from muster.trainer.checkpoint.saver import CheckpointSaver, SaveOutcome, SaverIdentity, TrainState

_HOMES = {
    "CheckpointError": "failures",
    "CheckpointMismatch": "failures",
    "DamagedCommit": "failures",
    "SaverIdentity": "saver",
    "SavePolicy": "policy",
    "SaveOutcome": "saver",
    "CheckpointSaver": "saver",
    "TrainState": "saver",
    "UnusableCommit": "failures",
    "list_commits": "commits",
    "load": "loader",
    "load_attached": "loader",
    "load_weights": "loader",
    "newest_readable": "quarantine",
    "read_commit": "commits",
    "resume": "loader",
    "retained": "policy",
}

__all__ = [
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointSaver",
    "DamagedCommit",
    "SaveOutcome",
    "SavePolicy",
    "SaverIdentity",
    "TrainState",
    "UnusableCommit",
    "list_commits",
    "load",
    "load_attached",
    "load_weights",
    "newest_readable",
    "read_commit",
    "resume",
    "retained",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
