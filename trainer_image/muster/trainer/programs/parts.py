"""Agreement of the workers' keepers through the job's store: worker 0 orders a checkpoint, each other worker uploads
what its own node has of it and reports that, and worker 0 publishes the one COMMIT.

Nodes need not see each other's disks for that, and where all workers write to one shared folder, the others see in the
order the very files that worker 0 uploads, and report nothing of their own.

    parts/attempt-7/order.json                          by worker 0: {step, entry, files, done}
    parts/attempt-7/step-00001200/worker-00003.json     by worker 3: {files} or {fault}
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from typing import Any, Final

from muster.storage.errors import NotFound, StoreError
from muster.storage.store import Store
from muster.trainer.programs.listing import FileFacts, FileListing
from muster.words.checkpoint import PARTS, FileEntry, step_name

_BYTES_MAX: Final = 256 << 20


@dataclass(frozen=True)
class PublishOrder:
    """A checkpoint that worker 0 wants to publish; `is_last`: worker 0 orders nothing after it."""

    step: int
    entry: str | None
    files: tuple[FileFacts, ...]  # worker 0's own
    is_last: bool = False


class PartFailed(Exception):
    """Another worker could not upload its part. The message says which, and why."""


class AttemptParts:
    """One attempt's orders and reports."""

    def __init__(self, store: Store, attempt: int) -> None:
        self._store, self._folder = store, f"{PARTS}/attempt-{attempt}"

    def order(self, step: int, listing: FileListing) -> None:
        files = [astuple(file) for file in listing.files]
        self._put("order.json", {"step": step, "entry": listing.entry, "files": files, "done": False})

    def end(self) -> None:
        """Say that no order comes after the last."""
        last = self._get("order.json") or {"step": -1, "entry": None, "files": []}
        self._put("order.json", {**last, "done": True})

    def newest_order(self) -> PublishOrder | None:
        """Raises StoreError."""
        if (order := self._get("order.json")) is None:
            return None
        files = tuple(FileFacts(*file) for file in order["files"])
        return PublishOrder(order["step"], order["entry"], files, bool(order["done"]))

    def report(self, step: int, worker: int, files: tuple[FileEntry, ...], fault: str | None = None) -> None:
        entries = [entry.model_dump(mode="json", by_alias=True) for entry in files]
        self._put(self._name(step, worker), {"files": entries, "fault": fault})

    def of(self, step: int, worker: int) -> tuple[FileEntry, ...] | None:
        """Return the files that a worker has uploaded; None before its report. Raises PartFailed, StoreError."""
        if (report := self._get(self._name(step, worker))) is None:
            return None
        if report["fault"]:
            raise PartFailed(f"worker {worker}: {report['fault']}")
        return tuple(FileEntry.model_validate(entry) for entry in report["files"])

    def sweep(self) -> None:
        """Remove what this attempt and those before it have left; nobody needs it once a checkpoint is published."""
        for entry in list(self._store.objects(f"{PARTS}/")):
            if not entry.key.endswith("/order.json") or not entry.key.startswith(self._folder):
                self._store.delete(entry.key)

    def _name(self, step: int, worker: int) -> str:
        return f"{step_name(step)}/worker-{worker:05d}.json"

    def _put(self, name: str, document: dict[str, Any]) -> None:
        self._store.replace(f"{self._folder}/{name}", json.dumps(document).encode())

    def _get(self, name: str) -> dict[str, Any] | None:
        try:
            document = json.loads(self._store.read(f"{self._folder}/{name}", _BYTES_MAX))
        except NotFound:
            return None
        except ValueError as error:
            raise StoreError(f"{self._store.uri}/{self._folder}/{name}: is no JSON: {error}") from error
        return document if isinstance(document, dict) else None
