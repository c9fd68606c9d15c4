"""One operator per state folder: a file lock that the kernel drops with the process, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.local.private import make_private_folder
from muster.words.state_folder import StateFolder


class FolderTaken(Exception):
    """Error that another operator works on the folder; the message names its pid."""


class FolderUnusable(Exception):
    """The state folder can't be made or written; the message says why and what to do."""


@dataclass(frozen=True)
class StateClaim:
    """Held until `release` or the end of the process."""

    path: Path
    descriptor: int

    def tell(self, url: str = "", nodes: int = 0, gpus_per_node: int = 0) -> None:
        """Write who works here, with what, and where its metrics are. In place: a renamed file would lose its lock."""
        facts = {"pid": os.getpid(), "startedAt": time.time(), "url": url, "nodes": nodes, "gpusPerNode": gpus_per_node}
        text = json.dumps(facts).encode()
        os.pwrite(self.descriptor, text, 0)
        os.ftruncate(self.descriptor, len(text))

    def release(self) -> None:
        os.close(self.descriptor)


def claim_folder(folder: Path) -> StateClaim:
    """Make the folder if need be and take it. Raises FolderTaken, FolderUnusable."""
    advice = "choose another with --state, or make this one writable"
    try:
        make_private_folder(folder, StateFolder(folder).operator)
        descriptor = os.open(StateFolder(folder).operator, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise FolderUnusable(f"the state folder {folder} can't be used: {error.strerror}; {advice}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        holder = read_claim(folder).get("pid")
        raise FolderTaken(
            f"another operator{f' (pid {holder})' if holder else ''} works on {folder}; "
            "stop it first, or choose another folder with --state"
        ) from None
    try:
        os.ftruncate(descriptor, 0)
        claim = StateClaim(StateFolder(folder).operator, descriptor)
        claim.tell()
    except OSError as error:
        os.close(descriptor)
        raise FolderUnusable(f"the state folder {folder} can't be written: {error.strerror}; {advice}") from error
    return claim


def read_claim(folder: Path) -> dict[str, Any]:
    """Return the newest holder's record, whether it lives or not; empty if nothing can be read."""
    with contextlib.suppress(OSError, ValueError):
        facts = json.loads(StateFolder(folder).operator.read_text())
        return facts if isinstance(facts, dict) else {}
    return {}
