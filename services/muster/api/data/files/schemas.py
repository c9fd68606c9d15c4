"""Files as REST shows them (muster.replies.files)."""

from __future__ import annotations

from typing import Any

from muster.api.core.database.tables import FileRow
from muster.replies.files import FileStatus
from muster.words.times import rfc3339


def file_document(row: FileRow, received: int | None = None) -> dict[str, Any]:
    """Return the document of a file. `received` is None if all bytes have arrived, or this machine has nothing of
    it."""
    checked = row.checked or {}
    uploading = row.status == FileStatus.UPLOADING
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
        "tokensEstimated": checked.get("tokens_estimated"),
        "unchecked": checked.get("unknown") or None,
        "createdAt": rfc3339(row.created_at),
        "expiresAt": rfc3339(row.expires_at) if row.expires_at is not None else None,
    }
