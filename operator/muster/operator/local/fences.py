"""The fence of each job on this machine: a file of its own that says which attempt lives and in which incarnations its
workers do, and nothing of other jobs.

It holds what the Kubernetes API would answer, cut down to what the fence asks (worker/fence.py). It is written before
the status that it reports: whoever commits after an attempt was closed, or after the next one was made, is refused.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from muster.local.cluster import LocalCluster, NotFound
from muster.storage.small_files import read_regular, write_whole
from muster.words.address import parse_address
from muster.words.base import dump
from muster.words.state_folder import StateFolder
from muster.words.status import JobStatus

_GONE = "null"


class FenceFiles:
    """The fences of the jobs in `cluster`, whose state folder is `state`."""

    def __init__(self, state: StateFolder, cluster: LocalCluster) -> None:
        self._state, self._cluster = state, cluster

    def address(self, uid: str) -> str:
        """Return the address for MUSTER_FENCE."""
        return str(parse_address(str(self._path(uid))))

    def tell(self, uid: str, status: JobStatus) -> None:
        """Let only the attempt that lives by this status pass from now on. Raises OSError."""
        path = self._path(uid)
        if not status.attempt and not path.exists():
            return  # it never ran: nobody asks
        document = dump(status.model_copy(update={"attempts": status.attempts[-1:]}))
        gang = {"incarnations": list(status.gang.incarnations)}
        about = {"attempt": status.attempt, "attempts": document.get("attempts") or [], "gang": gang}
        self._write(path, json.dumps({"metadata": {"uid": uid}, "status": about}))

    def announce_written(self, uid: str) -> None:
        """Do as `tell`, with the status that is written. A job that is gone lets nobody pass. Raises OSError."""
        try:
            status = JobStatus.model_validate_json(self._cluster.raw(uid).status)
        except NotFound:
            return self.end(uid)
        except ValidationError:  # whoever observes it says so; meanwhile the fence stays as it is
            return
        self.tell(uid, status)

    def end(self, uid: str) -> None:
        """The job is no more. Raises OSError."""
        path = self._path(uid)
        if path.parent.is_dir():
            self._write(path, _GONE)

    def _path(self, uid: str) -> Path:
        return self._state.jobs / uid / "fence.json"

    def _write(self, path: Path, text: str) -> None:
        try:
            if read_regular(path) == text.encode():
                return
        except OSError:  # not there yet, or not ours
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, text)
