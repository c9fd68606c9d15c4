"""What this S3 server really does, found out by trying: servers that call themselves compatible ignore what they
don't know."""

from __future__ import annotations

import base64
import hashlib
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from muster.trainer.checkpoint.s3_failures import Answer, judge

# crc32: the server refuses a body that does not match the CRC-32 it was sent with, and keeps it. md5: the same with
# Content-MD5. read_back: it checks neither, so what was written is read again.
Integrity = Literal["crc32", "md5", "read_back"]


@dataclass(frozen=True)
class Server:
    """conditional: `If-None-Match: *` on a write is honoured."""

    conditional: bool
    integrity: Integrity


def probe(client: Any, bucket: str, prefix: str, call: Callable[[Callable[[], Any]], Any]) -> Server:
    """Write a few bytes under `prefix` and remove them. `call` makes a request with retries."""
    key = f"{prefix}probe-{uuid.uuid4().hex}"
    body = b"muster"

    def refuses(**wrong: str) -> bool:
        try:
            client.put_object(Bucket=bucket, Key=key, Body=body, **wrong)
        except Exception as error:
            # A refusal of the checksum, and not for another reason that a retry or a person must deal with.
            code = getattr(error, "response", {}).get("Error", {}).get("Code", "")
            if code in ("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "InvalidRequest"):
                return True
            raise
        return False

    def honours_conditions() -> bool:
        try:
            client.put_object(Bucket=bucket, Key=key, Body=body, IfNoneMatch="*")
        except Exception as error:
            if judge(error).answer is Answer.TAKEN:
                return True
            if getattr(error, "response", {}).get("Error", {}).get("Code") in ("NotImplemented", "InvalidArgument"):
                return False
            raise
        return False

    call(lambda: client.put_object(Bucket=bucket, Key=key, Body=body))
    conditional = bool(call(honours_conditions))
    integrity: Integrity = "read_back"
    if call(lambda: refuses(ChecksumCRC32=crc32_header(f"{zlib.crc32(b'other'):08x}"))):
        integrity = "crc32"
    elif call(
        lambda: refuses(ContentMD5=base64.b64encode(hashlib.md5(b"other", usedforsecurity=False).digest()).decode())
    ):
        integrity = "md5"
    call(lambda: client.delete_object(Bucket=bucket, Key=key))
    return Server(conditional, integrity)


def crc32_header(checksum: str) -> str:
    """S3 writes a CRC-32 as base64 of its four bytes."""
    return base64.b64encode(bytes.fromhex(checksum)).decode()
