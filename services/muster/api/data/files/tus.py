"""Headers of tus 1.0, the protocol of resumable uploads, for any of its clients.

https://tus.io/protocols/resumable-upload
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from email.utils import formatdate

from muster.api.core.database.tables import FileRow
from muster.api.core.errors import ApiError, invalid_parameter
from muster.api.data.files.service import NewFile
from muster.api.data.files.staging import CHECKSUMS, ExpectedChecksum, new_hash

VERSION = "1.0.0"
EXTENSIONS = "creation,creation-with-upload,termination,checksum,expiration"
MEDIA_TYPE = "application/offset+octet-stream"
METADATA_LENGTH_MAX = 2_048


@dataclass(frozen=True)
class AnnouncedUpload:
    """A POST that begins an upload."""

    bytes: int
    metadata: dict[str, str]
    upload_metadata: str


def must_speak(version: str | None) -> None:
    """Raises ApiError upload_protocol."""
    if version != VERSION:
        detail = f"Resumable uploads are sent by tus {VERSION}: send `Tus-Resumable: {VERSION}`, not {version!r}."
        raise ApiError("upload_protocol", detail, headers={"Tus-Version": VERSION})


def announced(length: str | None, metadata: str | None) -> AnnouncedUpload:
    """Raises ApiError invalid_parameter."""
    if length is None or not length.isascii() or not length.isdigit() or len(length) > 15:
        raise invalid_parameter("header.Upload-Length", "must be the whole file's size in bytes; it can't be deferred")
    return AnnouncedUpload(int(length), metadata_of(metadata or ""), metadata or "")


def metadata_of(text: str) -> dict[str, str]:
    """Upload-Metadata: `key base64, key base64, key`. Raises ApiError invalid_parameter."""
    at = "header.Upload-Metadata"
    if len(text) > METADATA_LENGTH_MAX:
        raise invalid_parameter(at, f"is longer than {METADATA_LENGTH_MAX} characters")
    pairs: dict[str, str] = {}
    for pair in filter(None, (each.strip() for each in text.split(","))):
        key, _, value = pair.partition(" ")
        if key in pairs:
            raise invalid_parameter(at, f"names {key[:40]!r} twice")
        try:
            pairs[key] = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, ValueError):
            raise invalid_parameter(at, f"the value of {key[:40]!r} is not the Base64 of UTF-8 text") from None
    return pairs


def new_file(said: AnnouncedUpload, home: str) -> NewFile:
    """The file that is announced. `home` is the project of one that names none. Raises ApiError invalid_parameter."""
    metadata = said.metadata
    return NewFile(
        project=metadata.get("project") or home,
        name=metadata.get("filename") or metadata.get("name") or "",
        purpose=metadata.get("purpose", ""),
        bytes=said.bytes,
        sha256=metadata.get("sha256") or None,
        lifetime_seconds=lifetime(metadata.get("lifetimeSeconds")),
        upload_metadata=said.upload_metadata,
    )


def lifetime(text: str | None) -> float | None:
    """Raises ApiError invalid_parameter."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 10**9:
        raise invalid_parameter("lifetimeSeconds", "must be a number of seconds from 1 to 10^9")
    return seconds


def checksum_of(header: str | None) -> ExpectedChecksum | None:
    """Upload-Checksum: `sha256 <base64>`. Raises ApiError invalid_parameter."""
    if header is None:
        return None
    algorithm, _, text = header.strip().partition(" ")
    try:
        digest = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):
        digest = b""
    if algorithm not in CHECKSUMS or len(digest) != len(new_hash(algorithm).digest()):
        words = f"must be one of {', '.join(CHECKSUMS)}, a space, and the digest in Base64"
        raise invalid_parameter("header.Upload-Checksum", words)
    return ExpectedChecksum(algorithm, digest)


def offset_of(header: str | None) -> int:
    """Raises ApiError invalid_parameter."""
    if header is None or not header.isascii() or not header.isdigit() or len(header) > 15:
        raise invalid_parameter("header.Upload-Offset", "must be the number of bytes that have arrived")
    return int(header)


def headers_of(row: FileRow, offset: int) -> dict[str, str]:
    """Return the headers of a reply about an upload."""
    headers = {"Tus-Resumable": VERSION, "Upload-Offset": str(offset), "Cache-Control": "no-store"}
    if offset < row.bytes and row.expires_at is not None:
        headers["Upload-Expires"] = formatdate(row.expires_at, usegmt=True)
    return headers
