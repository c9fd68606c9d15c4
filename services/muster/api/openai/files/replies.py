"""Files and uploads as OpenAI's clients read them."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel

from muster.api.core.database.tables import FileRow
from muster.replies.files import FileStatus

FILE_PREFIX: Final = "file-"
UPLOAD_PREFIX: Final = "upload_"
PART_PREFIX: Final = "part_"
_STATUSES: Final[dict[str, Literal["uploaded", "processed", "error"]]] = {
    FileStatus.READY: "processed",
    FileStatus.FAILED: "error",
}


class FileObject(BaseModel):
    """A file. It is `uploaded` until it was read through; of one in `error`, `status_details` has the first bad line.
    What begins with `x_` is beyond OpenAI: what the records look like, how many there are, and a quarter of the bytes
    of their text, which no tokenizer has counted, as an estimate of their tokens."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["uploaded", "processed", "error"]
    status_details: str | None
    x_format: str | None
    x_samples: int | None
    x_tokens_estimated: int | None


class FileObjectList(BaseModel):
    """Send the last id as `after` for more."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class Upload(BaseModel):
    """A file that comes in parts. `file` is there when it is `completed`."""

    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled"]
    file: FileObject | None


class UploadPart(BaseModel):
    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


def file_reply(row: FileRow) -> FileObject:
    checked = row.checked or {}
    return FileObject(
        id=row.id,
        bytes=row.bytes,
        created_at=int(row.created_at),
        expires_at=int(row.expires_at) if row.expires_at is not None else None,
        filename=row.name,
        purpose=row.purpose,
        status=_STATUSES.get(row.status, "uploaded"),
        status_details=row.fault,
        x_format=checked.get("format"),
        x_samples=checked.get("samples"),
        x_tokens_estimated=checked.get("tokens_estimated"),
    )


def upload_reply(row: FileRow, expires_at: float, cancelled: bool = False) -> Upload:
    completed = row.status != FileStatus.UPLOADING
    return Upload(
        id=UPLOAD_PREFIX + row.id.removeprefix(FILE_PREFIX),
        bytes=row.bytes,
        created_at=int(row.created_at),
        expires_at=int(expires_at),
        filename=row.name,
        purpose=row.purpose,
        status="cancelled" if cancelled else "completed" if completed else "pending",
        file=file_reply(row) if completed else None,
    )
