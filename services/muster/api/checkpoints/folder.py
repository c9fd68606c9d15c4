"""A job's checkpoint folder, as far as the API can look into it: `file://` on this machine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from muster.contract.checkpoint import COMMITS, commit_key, step_of_commit_key


@dataclass(frozen=True)
class CommitSummary:
    """The part of a COMMIT that a list shows. bytes: of all its files."""

    step: int
    attempt: int
    committed_at: float
    world_size: int
    tokens: int
    metrics: dict[str, float]
    best: bool
    bytes: int
    files: int


@dataclass(frozen=True)
class Folder:
    """uri: `<spec.checkpoint.uri>/<job uid>`. path: the same on this machine; None where it is elsewhere (s3://)."""

    uri: str

    @classmethod
    def of(cls, job_id: str, spec: dict[str, Any]) -> Folder | None:
        """None: the job does not say where it commits (it was not submitted through this API)."""
        base = (spec.get("checkpoint") or {}).get("uri")
        return cls(f"{str(base).rstrip('/')}/{job_id}") if base else None

    @property
    def path(self) -> Path | None:
        return Path(unquote(self.uri.removeprefix("file://"))) if self.uri.startswith("file:///") else None

    def steps(self) -> tuple[int, ...]:
        """The steps that are committed, ascending. Raises OSError when the folder can't be read; absent means none."""
        assert self.path is not None
        try:
            names = [entry.name for entry in (self.path / COMMITS).iterdir()]
        except FileNotFoundError:
            return ()
        return tuple(sorted(step for name in names if (step := step_of_commit_key(name)) is not None))

    def commit(self, step: int) -> CommitSummary | None:
        """None: retention removed it meanwhile, or its text is not a commit (the trainer quarantines those)."""
        assert self.path is not None
        file = self.path / commit_key(step)
        try:
            return _summary(file, file.stat().st_mtime_ns)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


@lru_cache(maxsize=4096)
def _summary(file: Path, _changed: int) -> CommitSummary:
    """A COMMIT lists every tensor and never changes, so it is read once."""
    document = json.loads(file.read_bytes())
    files = document.get("files") or []
    return CommitSummary(
        step=int(document["step"]),
        attempt=int(document["attempt"]),
        committed_at=float(document["committedAt"]),
        world_size=int(document["worldSize"]),
        tokens=int(document.get("tokens", 0)),
        metrics={key: value for key, value in (document.get("metrics") or {}).items() if _finite(value)},
        best=bool(document.get("best")),
        bytes=sum(int(entry.get("bytes", 0)) for entry in files),
        files=len(files),
    )


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and value == value and abs(value) != float("inf")
