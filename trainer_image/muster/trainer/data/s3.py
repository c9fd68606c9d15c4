"""Objects of an S3 store as input: listing, and reads that survive a dropped connection.

Credentials come by boto3's own chain. AWS_ENDPOINT_URL_S3 names another store than Amazon's, as for every AWS client.
"""

from __future__ import annotations

import fnmatch
import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from muster.trainer.errors import StorageError, UserError

RECONNECTS = 5
_MAGIC = frozenset("*?[")
_MISSING = frozenset({"404", "NoSuchKey", "NoSuchBucket", "NotFound"})
_DENIED = frozenset({"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"})


@dataclass(frozen=True)
class Object:
    """etag: changes whenever the content does; it stands for the content in the key of a token store."""

    bucket: str
    key: str
    size: int
    etag: str

    @property
    def address(self) -> str:
        return f"s3://{self.bucket}/{self.key}"

    def open(self) -> io.BufferedReader:
        return io.BufferedReader(_Stream(self), 1 << 20)


def find(address: str) -> list[Object]:
    """The object at the address, or all objects under it as a folder, or those that match it as a glob; sorted by key.

    Raises UserError (no such bucket, no access, no credentials) or StorageError (the store did not answer).
    """
    bucket, key = _split(address)
    if _MAGIC & set(key):
        literal = key[: min(key.index(mark) for mark in _MAGIC if mark in key)]
        return [found for found in _list(bucket, literal) if fnmatch.fnmatchcase(found.key, key)]
    if key and not key.endswith("/"):
        exact = [found for found in _list(bucket, key) if found.key == key]
        if exact:
            return exact
        key += "/"
    return list(_list(bucket, key))


def read(address: str) -> bytes | None:
    """The whole object; None when there is none. Raises UserError or StorageError."""
    bucket, key = _split(address)
    try:
        body: bytes = _client().get_object(Bucket=bucket, Key=key)["Body"].read()
        return body
    except Exception as error:
        if _code(error) in _MISSING:
            return None
        raise _explained(error, address) from error


class _Stream(io.RawIOBase):
    """An object's bytes in order. After a dropped connection it goes on where it was, if the object is the same."""

    def __init__(self, source: Object) -> None:
        self._source = source
        self._at = 0
        self._body: Any = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        for attempt in range(RECONNECTS + 1):
            try:
                data: bytes = self._connected().read(len(buffer)) if self._at < self._source.size else b""
                buffer[: len(data)] = data
                self._at += len(data)
                if data or self._at >= self._source.size:
                    return len(data)
                raise ConnectionError(f"the connection ended after {self._at} of {self._source.size} bytes")
            except Exception as error:
                self._body = None
                if attempt == RECONNECTS or _code(error):  # an answer of the store is final, a broken connection is not
                    raise _explained(error, self._source.address) from error
        raise AssertionError("unreachable")

    def _connected(self) -> Any:
        if self._body is None:
            wanted = {"Bucket": self._source.bucket, "Key": self._source.key, "IfMatch": self._source.etag}
            self._body = _client().get_object(**wanted, Range=f"bytes={self._at}-")["Body"]
        return self._body


def _list(bucket: str, prefix: str) -> Iterator[Object]:
    try:
        for page in _client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for entry in page.get("Contents", ()):
                if not entry["Key"].endswith("/"):  # the empty object that some tools make for a folder
                    yield Object(bucket, entry["Key"], entry["Size"], entry["ETag"])
    except Exception as error:
        raise _explained(error, f"s3://{bucket}/{prefix}") from error


@cache
def _client() -> Any:
    import boto3  # half a second to import, and most jobs read no S3
    from botocore.config import Config

    return boto3.client("s3", config=Config(retries={"mode": "standard"}))


def _split(address: str) -> tuple[str, str]:
    # A `?` or `#` of a key belongs to the key, so no URL parser may cut it off.
    bucket, _, key = address.partition("://")[2].partition("/")
    if not bucket:
        raise UserError(f"{address}: names no bucket; write s3://bucket/key")
    return bucket, key


def _code(error: Exception) -> str:
    """The store's own error code; empty when the error is not an answer of the store."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _explained(error: Exception, address: str) -> UserError | StorageError:
    code = _code(error)
    if code in _MISSING:
        return UserError(f"{address}: does not exist ({code}); check bucket and key")
    if code in _DENIED:
        return UserError(f"{address}: access refused ({code}); give the job credentials that may list and read it")
    if code in ("412", "PreconditionFailed"):
        return UserError(f"{address}: was replaced while it was being read; start again when nobody writes to it")
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "NoRegionError", "ProfileNotFound"):
        return UserError(f"{address}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod a role")
    return StorageError(f"{address}: can't be read: {error}")
