"""A folder of a bucket: its client, and requests that are made again where that helps."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from muster.storage.errors import NotFound, ReplacedObject, StoreError, StoreRefusal, TruncatedObject
from muster.storage.retry import StoreRetry
from muster.storage.s3_failures import FailureKind, classify
from muster.storage.settings import S3Settings, s3_client
from muster.words.address import StorageAddress

T = TypeVar("T")


class BrokenUpload(StoreError):
    """This upload in parts can't go on; another one may."""


class S3Bucket:
    """`name` is the bucket's. `prefix` begins every key of the folder: it is empty, or has a `/` at its end."""

    def __init__(self, address: StorageAddress, settings: S3Settings | None, retry: StoreRetry | None) -> None:
        folder = address.path.strip("/")
        self.name, self.prefix = address.host, f"{folder}/" if folder else ""
        self.uri = f"s3://{self.name}/{self.prefix}".rstrip("/")
        self.settings = settings or S3Settings.from_environment(os.environ)
        self._retry = retry or StoreRetry(self.settings.retry_seconds)

    @functools.cached_property
    def client(self) -> Any:
        return s3_client(self.settings)

    def at(self, key: str) -> dict[str, str]:
        """The arguments of the client that name an object."""
        return {"Bucket": self.name, "Key": self.prefix + key}

    def encryption(self) -> dict[str, str]:
        """The arguments of the client that say how what is written is encrypted."""
        key_id = self.settings.kms_key_id
        return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key_id} if key_id else {}

    def where(self, key: str) -> str:
        """The object's address, for messages; the folder's for no key."""
        return f"{self.uri}/{key}" if key else self.uri

    def pages(self, prefix: str, ask: Callable[..., Any], marks: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """Yield all pages of a listing; a page names where the next begins as `Next<mark>`."""
        begin: dict[str, str] = {}
        while True:
            request = functools.partial(ask, Bucket=self.name, Prefix=self.prefix + prefix, **begin)
            page: dict[str, Any] = self.call(prefix, "list", request)
            yield page
            if not page.get("IsTruncated"):
                return
            begin = {mark: page[f"Next{mark}"] for mark in marks}

    def call(self, key: str, doing: str, request: Callable[[], T]) -> T:
        """Make a request, again where that helps. Raises StoreError, NotFound, Truncated, or FileExistsError (412)."""

        def wait_for(error: Exception) -> tuple[bool, float | None] | None:
            if isinstance(error, StoreError):
                return None
            failure = classify(error)
            if failure.kind not in (FailureKind.AGAIN, FailureKind.SLOWER):
                return None
            return failure.kind is FailureKind.SLOWER, failure.retry_after_seconds

        try:
            return self._retry.call(request, wait_for)
        except StoreError:
            raise
        except Exception as error:
            failure = classify(error)
            if failure.kind is FailureKind.GONE:
                raise NotFound(f"{self.where(key)}: there is no such object") from error
            if failure.kind is FailureKind.BEYOND:
                raise TruncatedObject(f"{self.where(key)}: {failure.message}; it was truncated") from error
            if failure.kind is FailureKind.TAKEN and doing == "read":
                raise ReplacedObject(f"{self.where(key)}: was replaced while it was being read") from error
            if failure.kind is FailureKind.TAKEN:
                raise FileExistsError(key) from error
            error_type = {FailureKind.BROKEN: BrokenUpload, FailureKind.FINAL: StoreRefusal}.get(
                failure.kind, StoreError
            )
            raise error_type(f"{self.where(key)}: can't {doing} it: {failure.message}") from error
