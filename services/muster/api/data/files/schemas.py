"""Files as REST shows them (muster.replies.files)."""

from __future__ import annotations

from muster.api.core.database.tables import FileRow
from muster.api.core.http.reply import reply_of
from muster.replies.files import File, FileStatus


def file_reply(row: FileRow, received: int | None = None) -> File:
    """Return the reply of a file. `received` is None if all bytes have arrived, or this machine has nothing of
    it."""
    checked = row.checked or {}
    uploading = row.status == FileStatus.UPLOADING
    return reply_of(
        File,
        row,
        received=(received or 0) if uploading else row.bytes,
        sha256=None if uploading else row.sha256,
        format=checked.get("format"),
        samples=checked.get("samples"),
        uncompressed_bytes=checked.get("bytes"),
        tokens_estimated=checked.get("tokens_estimated"),
        unchecked=checked.get("unknown") or None,
    )
