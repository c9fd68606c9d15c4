"""Folders of a job's attempts and workers on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from muster.words.state_folder import ATTEMPT_FOLDER, WORKER_FOLDER, StateFolder


def attempts(layout: StateFolder, uid: str) -> list[int]:
    """The numbers of the job's attempts in ascending order; empty where none has a folder."""
    return _numbers(layout.attempt(uid, 1).parent, ATTEMPT_FOLDER)


def workers(layout: StateFolder, uid: str, attempt: int) -> list[int]:
    """The numbers of the attempt's workers in ascending order; empty where none has a folder."""
    return _numbers(layout.attempt(uid, attempt), WORKER_FOLDER)


def _numbers(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    try:
        return sorted({int(match[1]) for entry in folder.iterdir() if (match := pattern.fullmatch(entry.name))})
    except (FileNotFoundError, NotADirectoryError):
        return []
