"""The documents of the jobs on this machine: read, refused with words where nobody can read them, and written together
with the fence that follows from them.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from pydantic import ValidationError

from muster.local.cluster import LocalCluster
from muster.operator.core.conditions import refused_status
from muster.operator.local.fences import FenceFiles
from muster.operator.world import UnreadableDocument
from muster.words.base import InvalidDocument, parse
from muster.words.job import TrainingJob
from muster.words.status import JobStatus


class InvalidSpec(Exception):
    """A job's spec can't be read; the message names the faults and their places."""


class JobDocuments:
    """The jobs of `cluster`, with their fences. `now` is the world's clock."""

    def __init__(self, cluster: LocalCluster, fences: FenceFiles, now: Callable[[], float]) -> None:
        self._cluster, self._fences, self._now = cluster, fences, now

    def read(self, uid: str) -> TrainingJob:
        """Raises NotFound, UnreadableDocument for a status that nobody here can read, InvalidSpec for such a spec."""
        try:
            return self._cluster.get(uid)
        except ValidationError:
            raw = self._cluster.raw(uid)
        try:
            status = JobStatus.model_validate_json(raw.status)
            spec = parse(self._cluster.spec_type, json.loads(raw.spec), "spec")
        except ValidationError as error:
            where = f"job {uid} in {self._cluster.path}"
            raise UnreadableDocument(
                f"{where} can't be understood, was it written by a newer Muster? {error}"
            ) from error
        except InvalidDocument as error:
            raise InvalidSpec("; ".join(str(problem) for problem in error.problems)) from None
        return TrainingJob(metadata=raw.metadata, spec=spec, status=status)  # written anew between the two looks

    def refuse(self, uid: str, why: str, reads_only: bool) -> None:
        """Say in the status of a job that can't be read what is wrong with it, once. Raises UnreadableDocument for
        one that ran; `reads_only`: nothing is written.
        """
        raw = self._cluster.raw(uid)
        status, because = JobStatus.model_validate_json(raw.status), f"the spec was refused: {why}"[:4_000]
        if status.attempt and not status.phase.terminal:  # it ran, under another version of Muster: hands off
            raise UnreadableDocument(f"job {raw.metadata.namespace}/{raw.metadata.name}: {because}")
        if reads_only:
            return
        if raw.metadata.deletion_timestamp is not None:
            self._cluster.remove(uid)
        elif not status.phase.terminal:
            refused = refused_status(status, because, self._now(), raw.metadata.generation)
            self._cluster.write_status(uid, refused, raw.metadata.resource_version)

    def write_status(self, uid: str, status: JobStatus, version: str) -> None:
        """The fence first: should we die in between it is too narrow for a moment, never too wide."""
        self._fences.tell(uid, status)
        try:
            self._cluster.write_status(uid, status, version)
        except BaseException:
            self._fences.announce_written(uid)
            raise

    def remove(self, uid: str) -> None:
        self._fences.end(uid)
        self._cluster.remove(uid)
