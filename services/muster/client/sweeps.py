"""Sweeps, whose steps are in `sweep_operations`, for programs with threads.

Written from `async_sweeps.py` by `tools/generate_client.py`; change that file.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from muster.client import operations, sweep_operations
from muster.client.answers import parsed
from muster.client.connection import Connection
from muster.client.documents import JobSource, job_document
from muster.client.errors import MusterError
from muster.client.sweep_view import SweepView
from muster.replies.sweeps import SweepSummary


class Sweep(SweepView):
    """One sweep. What it shows is as of when it was last asked for; every method that asks raises MusterError."""

    def __init__(self, connection: Connection, document: Mapping[str, Any]) -> None:
        super().__init__(document)
        self._connection = connection

    def refresh(self) -> Sweep:
        """Ask for the sweep as it is now; returns this very sweep."""
        self.document = self._connection.run(operations.ask("GET", f"sweeps/{self.id}"))
        return self

    def wait(self, timeout_seconds: float | None = None) -> Sweep:
        """Wait until every trial has ended, at most so many seconds; returns this very sweep. Raises WaitTimeout."""
        self.document = self._connection.run(sweep_operations.wait(self.id, timeout_seconds))
        return self

    def cancel(self) -> Sweep:
        """Start no more trials and cancel those that run. Returns this very sweep, which ends a little later."""
        self.document = self._connection.run(operations.ask("POST", f"sweeps/{self.id}:cancel"))
        return self


class Sweeps:
    """The sweeps of one server. Every method raises MusterError."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def create(
        self, sweep: JobSource, *, name: str | None = None, project: str | None = None, key: str | None = None
    ) -> Sweep:
        """Create a sweep: a mapping, YAML text or the path of a file, that of a job with `sweep:` above its spec.

        It is sent again after a lost answer, under one idempotency key, so that one call makes one sweep.
        """
        sent = job_document(sweep, name, project, self._connection.server.local)
        try:
            document = self._connection.run(sweep_operations.create(sent.data, key or str(uuid.uuid4())))
        except MusterError as error:
            raise sent.located(error) from None
        return Sweep(self._connection, document)

    def get(self, name: str) -> Sweep:
        """The newest sweep of that name, or the one of that id. Raises NotFound."""
        return Sweep(self._connection, self._connection.run(sweep_operations.get(name)))

    def list(
        self, *, limit: int | None = None, project: str | None = None, name: str | None = None, live: bool | None = None
    ) -> Iterator[SweepSummary]:
        """The newest sweeps, all or so many, newest first. Filters combine."""
        filters = {"project": project, "name": name, "live": live}
        for page in self._connection.walk(operations.pages(limit, filters, "sweeps")):
            for line in page:
                yield parsed(SweepSummary, line)
