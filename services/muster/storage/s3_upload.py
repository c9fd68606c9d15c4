"""Uploads to a bucket: large objects in parts, several at a time, each with the checksum that it must arrive with."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from muster.storage.checksum import PART_BYTES, combine, crc32, parts_of
from muster.storage.errors import StoreError
from muster.storage.s3_bucket import BrokenUpload, S3Bucket
from muster.storage.s3_failures import ArrivedDamaged
from muster.storage.s3_probe import StoreServer, crc32_header, etag_is, etag_of_parts, md5, probe

UPLOAD_PART_BYTES_MAX = 64 << 20
SLICE_BYTES = 1 << 20
UPLOADS_MAX = 5
PARTS_WANTED_MAX = 1_000  # S3 allows 10,000; fewer and larger ones cost fewer requests


class S3Uploads:
    """`doubtful` holds the keys of objects that the server put together without showing that it did so rightly."""

    def __init__(self, bucket: S3Bucket) -> None:
        self._bucket = bucket
        self.doubtful: set[str] = set()

    @functools.cached_property
    def server(self) -> StoreServer:
        """Return the server's behaviour, probed once; needs permission to write."""
        bucket = self._bucket
        ask = functools.partial(bucket.call, "", "write")
        return probe(bucket.client, bucket.name, bucket.prefix, bucket.encryption(), ask)

    @functools.cached_property
    def threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._bucket.settings.streams, thread_name_prefix="s3")

    def write(self, key: str, data: memoryview, sent: Callable[[int], None]) -> list[tuple[str, int]]:
        """Write as Store.write does. Returns checksum and length of each of the 16 MiB parts that a COMMIT names."""
        part_bytes = upload_part_bytes(len(data))
        if len(data) > part_bytes:
            return self._write_in_parts(key, data, part_bytes, sent)
        checksums = _checksums(data)
        self.put(key, data, combine(checksums))
        sent(len(data))
        return checksums

    def _write_in_parts(
        self, key: str, data: memoryview, part_bytes: int, sent: Callable[[int], None]
    ) -> list[tuple[str, int]]:
        """Upload in parts, from the start again where a server does not take a part twice."""
        for _ in range(UPLOADS_MAX - 1):
            with contextlib.suppress(BrokenUpload):
                return self._write_parts(key, data, part_bytes, sent)
        return self._write_parts(key, data, part_bytes, sent)

    def _write_parts(
        self, key: str, data: memoryview, part_bytes: int, sent: Callable[[int], None]
    ) -> list[tuple[str, int]]:
        """Upload in parts; return the checksums of the 16 MiB parts that a COMMIT names."""
        at: dict[str, Any] = self._bucket.at(key)
        kind = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"} if self.server.integrity == "crc32" else {}
        upload = self._bucket.call(
            key, "write", lambda: self._bucket.client.create_multipart_upload(**at, **kind, **self._bucket.encryption())
        )
        at["UploadId"] = upload["UploadId"]

        def send(number: int, start: int, length: int) -> tuple[dict[str, Any], list[tuple[str, int]]]:
            part = data[start : start + length]
            checksums = _checksums(part)
            upload_part = functools.partial(self._bucket.client.upload_part, **at, PartNumber=number)
            answer, checked = self._send(key, part, combine(checksums), upload_part)
            sent(length)
            return {"PartNumber": number, "ETag": answer["ETag"], **checked}, checksums

        try:
            pieces = [(n, start, length) for n, (start, length) in enumerate(parts_of(len(data), part_bytes), 1)]
            done = list(self.threads.map(lambda piece: send(*piece), pieces))
            checksums = [checksum for _, of_part in done for checksum in of_part]
            self._complete(key, at, [part for part, _ in done], len(data), combine(checksums))
        except BaseException:
            self.abort(key, at["UploadId"])
            raise
        return checksums

    def _complete(self, key: str, at: dict[str, Any], parts: list[dict[str, Any]], size: int, checksum: str) -> None:
        whole = {}
        if self.server.integrity == "crc32":
            whole = {"ChecksumCRC32": crc32_header(checksum), "ChecksumType": "FULL_OBJECT", "MpuObjectSize": size}
        complete = functools.partial(self._bucket.client.complete_multipart_upload, **at, **whole)
        answer: dict[str, Any] = {}
        try:
            answer = self._bucket.call(key, "write", lambda: complete(MultipartUpload={"Parts": parts}))
        except StoreError:
            # The answer to a request that succeeded may have been lost: the next try finds no such upload.
            if not self._holds(key, size):
                raise
        if self.server.integrity == "etag" and not etag_is(answer, etag_of_parts([part["ETag"] for part in parts])):
            self.doubtful.add(key)

    def abort(self, key: str, upload: str) -> None:
        with contextlib.suppress(StoreError):
            self._bucket.call(
                key,
                "clean up",
                lambda: self._bucket.client.abort_multipart_upload(**self._bucket.at(key), UploadId=upload),
            )

    def put(self, key: str, data: memoryview, checksum: str, **extra: str) -> None:
        at = {**self._bucket.at(key), **self._bucket.encryption(), **extra}
        self._send(key, data, checksum, functools.partial(self._bucket.client.put_object, **at))

    def _send(
        self, key: str, data: memoryview, checksum: str, request: Callable[..., dict[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Send a body until the server shows that it got these bytes, whose CRC-32 is `checksum`.

        Returns its answer, and the checksum argument that was sent.
        """
        checked = {"ChecksumCRC32": crc32_header(checksum)} if self.server.integrity == "crc32" else {}
        expected = md5(data) if self.server.integrity == "etag" else None

        def send() -> dict[str, Any]:
            answer = request(Body=SlicedBody(data), **checked)
            if expected is not None and not etag_is(answer, expected):
                raise ArrivedDamaged(f"the store got a body with MD5 {answer.get('ETag')}, not {expected}")
            return answer

        return self._bucket.call(key, "write", send), checked

    def _holds(self, key: str, size: int) -> bool:
        try:
            head = self._bucket.call(key, "look at", lambda: self._bucket.client.head_object(**self._bucket.at(key)))
            return int(head["ContentLength"]) == size
        except StoreError:
            return False


class SlicedBody:
    """Body of a request, sent without a copy, in slices: a socket's timeout is for the whole of what it is given at
    once, and a part that takes long is no reason to give up while bytes still move."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[memoryview]:
        return (self._data[at : at + SLICE_BYTES] for at in range(0, len(self._data), SLICE_BYTES))


def upload_part_bytes(size: int) -> int:
    """Return the bytes per part of an upload: 16 to 64 MiB, in steps of 16, so that the parts of the COMMIT are
    complete within them."""
    least = -(-size // PARTS_WANTED_MAX)
    steps = -(-least // PART_BYTES)
    largest_useful = UPLOAD_PART_BYTES_MAX // PART_BYTES
    needed = -(-size // (10_000 * PART_BYTES))  # S3's limit of parts wins over ours
    return max(min(max(steps, 1), largest_useful), needed) * PART_BYTES


def _checksums(data: memoryview) -> list[tuple[str, int]]:
    return [(crc32(data[start : start + length]), length) for start, length in parts_of(len(data))]
