"""Discovery of the `muster up` that runs on a state folder: up.json names it, and its lock says whether it is alive."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path

from muster.words.state_folder import StateFolder


@dataclass(frozen=True)
class RunningPlatform:
    """A `muster up`, by its process id. `url` is empty until it answers for the first time."""

    pid: int
    url: str
    started_at: float = 0.0


def who(state: StateFolder) -> RunningPlatform | None:
    """The `muster up` that lives on this folder; None when there is none, whatever the file says."""
    try:
        file = os.open(state.running, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return read_running(state.running)
    finally:
        os.close(file)
    return None


def read_running(path: Path) -> RunningPlatform | None:
    """Return the file's content, whether or not its writer is alive; None if it can't be read."""
    try:
        document = json.loads(path.read_text())
        return RunningPlatform(int(document["pid"]), str(document["url"]), float(document["started_at"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
