"""Actual behaviour of this S3 server, found by trying: servers that call themselves compatible ignore what they
don't know."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from muster.storage.checksum import crc32
from muster.storage.s3_failures import FailureKind, classify, error_code

# crc32: the server refuses a body that does not match the CRC-32 it was sent with, and keeps it. etag: it answers with
# the MD5 of what arrived, which we compare (a Content-MD5 would say the same, and have it hash everything twice).
# read_back: it tells nothing, so what was written is read again.
Integrity = Literal["crc32", "etag", "read_back"]

PROBE_RETRIES = 2  # a body that was damaged on its way has another MD5, and says nothing of the server

# What a store answers to a checksum that is not the body's. The first two say so of a body that was damaged on its way,
# too; the last two also stand for headers that it does not take.
_DAMAGED = ("BadDigest", "XAmzContentChecksumMismatch")
_REFUSALS_OF_A_CHECKSUM = (*_DAMAGED, "InvalidDigest", "InvalidRequest")


@dataclass(frozen=True)
class StoreServer:
    """`conditional` says whether the server honours `If-None-Match: *` on a write."""

    conditional: bool
    integrity: Integrity


def probe(
    client: Any, bucket: str, prefix: str, encryption: dict[str, str], call: Callable[[Callable[[], Any]], Any]
) -> StoreServer:
    """Write a few bytes under `prefix`, as shards are written, and remove them. `call` makes a request with retries."""
    body = b"muster"
    at = {"Bucket": bucket, "Key": f"{prefix}probe-{uuid.uuid4().hex}", **encryption}

    def accepts_crc32(checksum: str) -> bool | None:
        """Return whether the store accepts the checksum, or None if it does not know checksums."""
        try:
            client.put_object(**at, Body=body, ChecksumCRC32=crc32_header(checksum))
        except Exception as error:
            # A refusal of the checksum, and not for another reason that a retry or a person must deal with.
            if (code := error_code(error)) == "NotImplemented":
                return None
            if code in _REFUSALS_OF_A_CHECKSUM and (checksum != crc32(body) or code not in _DAMAGED):
                return False
            raise
        return True

    def honours_conditions() -> bool:
        try:
            client.put_object(**at, Body=body, IfNoneMatch="*")
        except Exception as error:
            if classify(error).kind is FailureKind.TAKEN:
                return True
            if error_code(error) in ("NotImplemented", "InvalidArgument"):
                return False
            raise
        return False

    def tells_md5() -> bool:
        return etag_is(call(lambda: client.put_object(**at, Body=body)), md5(body))

    tells = tells_md5()
    conditional = bool(call(honours_conditions))
    integrity: Integrity = "read_back"
    # Some stores refuse whatever has a checksum, so the right one is tried as well.
    refused = call(lambda: accepts_crc32(crc32(b"other"))) is False
    if refused and call(lambda: accepts_crc32(crc32(body))):
        integrity = "crc32"
    elif tells or any(tells_md5() for _ in range(PROBE_RETRIES)):
        integrity = "etag"
    call(lambda: client.delete_object(Bucket=bucket, Key=at["Key"]))
    return StoreServer(conditional, integrity)


def crc32_header(checksum: str) -> str:
    """S3 writes a CRC-32 as base64 of its four bytes."""
    return base64.b64encode(bytes.fromhex(checksum)).decode()


def md5(data: memoryview | bytes) -> str:
    """Return the digest in hex; releases the GIL while it counts."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def etag_is(answer: dict[str, Any], value: str) -> bool:
    return str(answer.get("ETag", "")).strip('"').lower() == value


def etag_of_parts(etags: Sequence[str]) -> str:
    """Return the ETag that such a server gives a multipart object: the MD5 of the parts' MD5s, and their number."""
    return f"{md5(bytes.fromhex(''.join(etag.strip(chr(34)) for etag in etags)))}-{len(etags)}"
