"""The ways a checkpoint fails to be read."""

from __future__ import annotations

from muster.trainer.errors import StorageError, UserError


class CheckpointError(StorageError):
    """A commit is missing, or its bytes are not what it says. The message names file and reason."""


class DamagedCommit(CheckpointError):
    """The store answers, and what it holds is not what was committed: nothing to be had from trying again."""


class UnusableCommit(DamagedCommit):
    """The bytes are those that were committed, and training can't go on from them; they won't be others later."""


class UnknownFormat(CheckpointError):
    """The commit is a newer Muster's. It stays where it is, for that one to read."""


class GoneCommit(CheckpointError):
    """There is no such commit, or no longer."""


class CheckpointMismatch(UserError):
    """The commit is sound, but of another model; `differences` names every one."""

    def __init__(self, where: str, differences: tuple[str, ...]) -> None:
        self.differences = differences
        listed = "\n  ".join(differences)
        super().__init__(f"{where} does not fit the model ({len(differences)} differences):\n  {listed}")
