"""Files as REST shows them."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from muster.api.reply import Reply
from muster.api.tables import FileRow
from muster.contract.base import Time
from muster.contract.times import rfc3339


class Purpose(StrEnum):
    """What a file is for, in OpenAI's words."""

    FINE_TUNE = "fine-tune"  # data that a job trains on: read through when it has arrived
    EVALS = "evals"  # data that a job is evaluated on: the same
    USER_DATA = "user_data"  # anything else, such as a tokenizer.json: kept as it is

    @property
    def is_data(self) -> bool:
        return self != Purpose.USER_DATA


class Status(StrEnum):
    """Where a file stands."""

    UPLOADING = "uploading"  # bytes are still to come
    CHECKING = "checking"  # all have arrived, and are put away and read through
    READY = "ready"  # a job may read it
    FAILED = "failed"  # nothing can be learnt from it; `fault` says why and where


class File(Reply):
    """A file of a project. `received` are the bytes that have arrived for certain, of `bytes` in all. Of data, `format`
    is what the records look like, `samples` how many there are, and `uncompressed_bytes` their size as they are read;
    null before they were read through, and for other files; `unchecked` says why data could not be. Tokens depend on a
    job's tokenizer: `muster data inspect` counts them."""

    id: str
    project: str
    owner: str
    name: str
    purpose: Purpose
    status: Status
    bytes: int
    received: int
    sha256: str | None = Field(description="In hex; null before the last byte has arrived.")
    fault: str | None
    format: str | None
    samples: int | None
    uncompressed_bytes: int | None
    unchecked: str | None
    created_at: Time
    expires_at: Time | None


class FileList(Reply):
    """`next_cursor` asks for the next page; it is null on the last."""

    items: list[File]
    next_cursor: str | None


def file_document(row: FileRow, received: int | None = None) -> dict[str, Any]:
    """`received` is None where all has arrived, or this machine has nothing of it."""
    checked = row.checked or {}
    uploading = row.status == Status.UPLOADING
    return {
        "id": row.id,
        "project": row.project,
        "owner": row.owner,
        "name": row.name,
        "purpose": row.purpose,
        "status": row.status,
        "bytes": row.bytes,
        "received": (received or 0) if uploading else row.bytes,
        "sha256": None if uploading else row.sha256,
        "fault": row.fault,
        "format": checked.get("format"),
        "samples": checked.get("samples"),
        "uncompressedBytes": checked.get("bytes"),
        "unchecked": checked.get("unknown") or None,
        "createdAt": rfc3339(row.created_at),
        "expiresAt": rfc3339(row.expires_at) if row.expires_at is not None else None,
    }
