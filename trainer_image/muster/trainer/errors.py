"""Errors by which a rank fails on purpose: each kind is one exit code of the contract."""

from __future__ import annotations

from muster.storage.errors import StorageError, final_errors_are_the_users
from muster.words.base import UserError
from muster.words.names import ExitCode
from muster.worker.fence import StaleAttempt

__all__ = [
    "NodeUnfit",
    "NumericError",
    "OutOfMemory",
    "PeerLost",
    "RanksApart",
    "StaleAttempt",
    "StorageError",
    "UserError",
    "exit_code",
    "final_errors_are_the_users",
]


class NodeUnfit(Exception):
    """This node can't run the job, and another may: its GPUs can't be used. The message says by what evidence."""


class NumericError(Exception):
    """The loss or a gradient is not a finite number. The message names the step."""


class OutOfMemory(Exception):
    """The device's or the machine's memory is too small. The message carries the arithmetic."""


class PeerLost(Exception):
    """A collective failed because another rank is gone: this rank is well, the cause lies with the other."""


class RanksApart(Exception):
    """The ranks could not meet. The message says where; another attempt may have a port that is free."""


_CODES: tuple[tuple[type[BaseException], ExitCode], ...] = (
    (UserError, ExitCode.USER_ERROR),
    (OutOfMemory, ExitCode.OUT_OF_MEMORY),
    (MemoryError, ExitCode.OUT_OF_MEMORY),
    (NodeUnfit, ExitCode.PREFLIGHT_EXCLUDE),
    (NumericError, ExitCode.NUMERIC),
    (StorageError, ExitCode.STORAGE),
    (StaleAttempt, ExitCode.STALE_ATTEMPT),
    (PeerLost, ExitCode.PEER_LOST),
    (RanksApart, ExitCode.PREFLIGHT_FAILED),
)


def exit_code(error: BaseException) -> int:
    """The exit code of a rank that ends with `error`; 1 where the error is a bug of ours or unknown."""
    return next((int(code) for kind, code in _CODES if isinstance(error, kind)), 1)


_PEER_FAILURE_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "connection was closed",
    "socket closed",
    "failed to recv",
    "remote process exited",
    "ncclremoteerror",
    "gloo/transport",
    "timed out waiting",
    "connection was likely closed",
)


def is_lost_peer(kind: str, message: str) -> bool:
    """Return whether an error (its type's name and text) says that another rank went away, not that this rank is
    wrong."""
    text = message.lower()
    distributed = kind in ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "RuntimeError")
    return distributed and any(words in text for words in _PEER_FAILURE_TEXTS)


def is_out_of_memory(kind: str, message: str) -> bool:
    """Return whether an allocation failed, on a GPU or on the CPU (where torch raises a plain RuntimeError)."""
    text = message.lower()
    return kind in ("OutOfMemoryError", "MemoryError") or (
        kind == "RuntimeError" and ("defaultcpuallocator" in text or "out of memory" in text)
    )
