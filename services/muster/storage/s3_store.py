"""Objects in a bucket: large ones in parts, several at a time, each with the checksum that it must arrive with."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from muster.contract.address import Address
from muster.contract.checkpoint import FileEntry
from muster.storage.checksum import PART_BYTES, combine, crc32, parts_of
from muster.storage.errors import NotFound, Refused, Replaced, StoreError, TooLarge, Truncated
from muster.storage.retry import Retry
from muster.storage.s3_failures import ArrivedDamaged, FailureKind, classify
from muster.storage.s3_probe import Server, crc32_header, etag_is, etag_of_parts, md5, probe
from muster.storage.settings import S3Settings, s3_client
from muster.storage.store import SMALL_BYTES_MAX, Object, Stream, expect_all, nobody

T = TypeVar("T")

UPLOAD_PART_BYTES_MAX = 64 << 20
SLICE_BYTES = 1 << 20
UPLOADS_MAX = 5
PARTS_WANTED_MAX = 1_000  # S3 allows 10,000; fewer and larger ones cost fewer requests


class S3Store:
    """address: of an s3:// folder."""

    def __init__(self, address: Address, settings: S3Settings | None = None, retry: Retry | None = None) -> None:
        folder = address.path.strip("/")
        self._bucket, self._prefix = address.host, f"{folder}/" if folder else ""
        self._settings = settings or S3Settings.from_environment(os.environ)
        self._retry = retry or Retry(self._settings.retry_seconds)
        self._doubtful: set[str] = set()  # keys that the server put together without showing that it did so rightly
        self.uri = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        self.streams = self._settings.streams

    @functools.cached_property
    def _client(self) -> Any:
        return s3_client(self._settings)

    @functools.cached_property
    def server(self) -> Server:
        """What the server does, asked once; needs permission to write."""
        ask = functools.partial(self._call, "", "write")
        return probe(self._client, self._bucket, self._prefix, self._encryption(), ask)

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.streams, thread_name_prefix="s3")

    def warm_up(self) -> None:
        """Connect, and ask the server what it does, before the first save needs it."""
        _ = self.server

    def write(self, key: str, data: memoryview, sent: Callable[[int], None] = nobody) -> FileEntry:
        part_bytes = upload_part_bytes(len(data))
        if len(data) <= part_bytes:
            checksums = _checksums(data)
            self._put(key, data, combine(checksums))
            sent(len(data))
        else:
            checksums = self._write_anew(key, data, part_bytes, sent)
        return FileEntry(
            key=key,
            bytes=len(data),
            checksum=combine(checksums),
            part_bytes=PART_BYTES,
            parts=tuple(checksum for checksum, _ in checksums),
        )

    def verify(self, entry: FileEntry) -> None:
        """By what the server does: it keeps the checksum, it checked every part on arrival, or all is read again."""
        if self.server.integrity == "crc32":
            self._compare_kept_checksum(entry)
        elif self.server.integrity == "read_back" or entry.key in self._doubtful:
            self._read_back(entry)
            self._doubtful.discard(entry.key)

    def see_all(self, entries: Iterable[FileEntry], prefix: str) -> None:
        if self.server.integrity == "etag":
            # Completing an upload names the MD5 of each part, so it says all that a listing would; and servers of this
            # kind (rclone, some gateways) hash every object again to answer one.
            return
        expect_all(entries, {found.key: found.bytes for found in self.objects(prefix)}, self.uri)

    def create(self, key: str, data: bytes) -> bool:
        only_if_new = {"IfNoneMatch": "*"} if self.server.conditional else {}
        if not self.server.conditional:
            with contextlib.suppress(NotFound):
                self.about(key)
                return False
        try:
            self._put(key, memoryview(data), crc32(data), **only_if_new)
        except FileExistsError:
            return False
        return True

    def replace(self, key: str, data: bytes) -> None:
        self._put(key, memoryview(data), crc32(data))

    def read(self, key: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        def get() -> bytes:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(key))
            if (size := answer["ContentLength"]) > bytes_max:
                answer["Body"].close()
                raise TooLarge(f"{self._where(key)}: holds {size} bytes, more than the {bytes_max} that are read")
            body: bytes = answer["Body"].read()
            if len(body) != answer["ContentLength"]:
                raise EOFError(f"the answer ended after {len(body)} of {answer['ContentLength']} bytes")
            return body

        return self._call(key, "read", get)

    def read_into(self, key: str, start: int, into: memoryview, tag: str | None = None) -> None:
        if len(into):
            self._call(key, "read", lambda: self._get_range(key, start, into, tag))

    def open(self, entry: Object) -> io.BufferedReader:
        def connect(at: int) -> Any:
            wanted = {"Range": f"bytes={at}-", "IfMatch": entry.tag}
            return self._client.get_object(Bucket=self._bucket, Key=self._key(entry.key), **wanted)["Body"]

        call = functools.partial(self._call, entry.key, "read")
        return io.BufferedReader(Stream(entry.bytes, connect, call), 1 << 20)

    def about(self, key: str) -> Object:
        found = self._call(key, "look at", lambda: self._client.head_object(Bucket=self._bucket, Key=self._key(key)))
        return Object(key, found["ContentLength"], found["LastModified"].timestamp(), found["ETag"])

    def objects(self, prefix: str) -> Iterator[Object]:
        for page in self._pages(prefix, self._client.list_objects_v2, ("ContinuationToken",)):
            for entry in page.get("Contents", ()):
                key, modified_at = entry["Key"][len(self._prefix) :], entry["LastModified"].timestamp()
                yield Object(key, entry["Size"], modified_at, entry["ETag"])

    def delete(self, key: str) -> None:
        with contextlib.suppress(NotFound):
            self._call(key, "delete", lambda: self._client.delete_object(Bucket=self._bucket, Key=self._key(key)))

    def drop_unfinished(self, is_over: Callable[[str], bool]) -> None:
        pages = self._pages("", self._client.list_multipart_uploads, ("KeyMarker", "UploadIdMarker"))
        for upload in [upload for page in pages for upload in page.get("Uploads", ())]:
            key = upload["Key"][len(self._prefix) :]
            if is_over(key):
                self._abort(key, upload["UploadId"])

    def _pages(self, prefix: str, ask: Callable[..., Any], marks: tuple[str, ...]) -> Iterator[dict[str, Any]]:
        """All pages of a listing; a page names where the next begins as `Next<mark>`."""
        begin: dict[str, str] = {}
        while True:
            request = functools.partial(ask, Bucket=self._bucket, Prefix=self._key(prefix), **begin)
            page: dict[str, Any] = self._call(prefix, "list", request)
            yield page
            if not page.get("IsTruncated"):
                return
            begin = {mark: page[f"Next{mark}"] for mark in marks}

    def _write_anew(
        self, key: str, data: memoryview, part_bytes: int, sent: Callable[[int], None]
    ) -> list[tuple[str, int]]:
        """Upload in parts, from the start again where a server does not take a part twice."""
        for _ in range(UPLOADS_MAX - 1):
            with contextlib.suppress(_Broken):
                return self._write_parts(key, data, part_bytes, sent)
        return self._write_parts(key, data, part_bytes, sent)

    def _write_parts(
        self, key: str, data: memoryview, part_bytes: int, sent: Callable[[int], None]
    ) -> list[tuple[str, int]]:
        """Upload in parts; return the checksums of the 16 MiB parts that a COMMIT names."""
        at = {"Bucket": self._bucket, "Key": self._key(key)}
        kind = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"} if self.server.integrity == "crc32" else {}
        upload = self._call(
            key, "write", lambda: self._client.create_multipart_upload(**at, **kind, **self._encryption())
        )
        at["UploadId"] = upload["UploadId"]

        def send(number: int, start: int, length: int) -> tuple[dict[str, Any], list[tuple[str, int]]]:
            part = data[start : start + length]
            checksums = _checksums(part)
            upload_part = functools.partial(self._client.upload_part, **at, PartNumber=number)
            answer, checked = self._send(key, part, combine(checksums), upload_part)
            sent(length)
            return {"PartNumber": number, "ETag": answer["ETag"], **checked}, checksums

        try:
            pieces = [(n, start, length) for n, (start, length) in enumerate(parts_of(len(data), part_bytes), 1)]
            done = list(self._threads.map(lambda piece: send(*piece), pieces))
            checksums = [checksum for _, of_part in done for checksum in of_part]
            self._complete(key, at, [part for part, _ in done], len(data), combine(checksums))
        except BaseException:
            self._abort(key, at["UploadId"])
            raise
        return checksums

    def _complete(self, key: str, at: dict[str, Any], parts: list[dict[str, Any]], size: int, checksum: str) -> None:
        whole = {}
        if self.server.integrity == "crc32":
            whole = {"ChecksumCRC32": crc32_header(checksum), "ChecksumType": "FULL_OBJECT", "MpuObjectSize": size}
        complete = functools.partial(self._client.complete_multipart_upload, **at, **whole)
        answer: dict[str, Any] = {}
        try:
            answer = self._call(key, "write", lambda: complete(MultipartUpload={"Parts": parts}))
        except StoreError:
            # The answer to a request that succeeded may have been lost: the next try finds no such upload.
            if not self._holds(key, size):
                raise
        if self.server.integrity == "etag" and not etag_is(answer, etag_of_parts([part["ETag"] for part in parts])):
            self._doubtful.add(key)

    def _abort(self, key: str, upload: str) -> None:
        with contextlib.suppress(StoreError):
            self._call(
                key,
                "clean up",
                lambda: self._client.abort_multipart_upload(Bucket=self._bucket, Key=self._key(key), UploadId=upload),
            )

    def _put(self, key: str, data: memoryview, checksum: str, **extra: str) -> None:
        at = {"Bucket": self._bucket, "Key": self._key(key), **self._encryption(), **extra}
        self._send(key, data, checksum, functools.partial(self._client.put_object, **at))

    def _send(
        self, key: str, data: memoryview, checksum: str, request: Callable[..., dict[str, Any]]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Send a body until the server shows that it got these bytes. checksum: their CRC-32.

        Returns its answer, and the checksum argument that was sent.
        """
        checked = {"ChecksumCRC32": crc32_header(checksum)} if self.server.integrity == "crc32" else {}
        expected = md5(data) if self.server.integrity == "etag" else None

        def send() -> dict[str, Any]:
            answer = request(Body=Body(data), **checked)
            if expected is not None and not etag_is(answer, expected):
                raise ArrivedDamaged(f"the store got a body with MD5 {answer.get('ETag')}, not {expected}")
            return answer

        return self._call(key, "write", send), checked

    def _get_range(self, key: str, start: int, into: memoryview, tag: str | None) -> None:
        wanted = {"Range": f"bytes={start}-{start + len(into) - 1}", **({"IfMatch": tag} if tag else {})}
        answer = self._client.get_object(Bucket=self._bucket, Key=self._key(key), **wanted)
        if answer["ContentLength"] < len(into):
            raise Truncated(
                f"{self._where(key)}: ends {len(into) - answer['ContentLength']} bytes too early; it was truncated"
            )
        if answer["ContentLength"] > len(into):
            raise StoreError(
                f"{self._where(key)}: the store ignores ranges: {answer['ContentLength']} bytes for {len(into)}"
            )
        raw = answer["Body"]._raw_stream
        # Straight from the socket into memory: the layers between would each make a copy.
        done = 0
        while done < len(into):
            count = raw._fp.readinto(into[done:])
            if not count:
                answer["Body"].close()
                raise EOFError(f"the answer ended after {done} of {len(into)} bytes")
            done += count
        raw.release_conn()

    def _holds(self, key: str, size: int) -> bool:
        try:
            return self.about(key).bytes == size
        except StoreError:
            return False

    def _compare_kept_checksum(self, entry: FileEntry) -> None:
        at = {"Bucket": self._bucket, "Key": self._key(entry.key), "ChecksumMode": "ENABLED"}
        about = self._call(entry.key, "look at", lambda: self._client.head_object(**at))
        kept, wanted = about.get("ChecksumCRC32", ""), crc32_header(entry.checksum)
        if about["ContentLength"] != entry.bytes:
            raise StoreError(f"{self._where(entry.key)}: holds {about['ContentLength']} bytes, not {entry.bytes}")
        # `…-12` is a checksum of checksums, which says nothing about ours; the parts were checked on arrival.
        if kept and "-" not in kept and kept != wanted:
            raise StoreError(f"{self._where(entry.key)}: the store has checksum {kept}, not {wanted}")

    def _read_back(self, entry: FileEntry) -> None:
        def check(part: tuple[tuple[int, int], str]) -> None:
            (start, length), checksum = part
            buffer = memoryview(bytearray(length))
            self.read_into(entry.key, start, buffer)
            if crc32(buffer) != checksum:
                raise StoreError(f"{self._where(entry.key)}: bytes {start} to {start + length} read back differently")

        list(self._threads.map(check, zip(parts_of(entry.bytes), entry.parts, strict=True)))

    def _encryption(self) -> dict[str, str]:
        key_id = self._settings.kms_key_id
        return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key_id} if key_id else {}

    def _key(self, key: str) -> str:
        return self._prefix + key

    def _where(self, key: str) -> str:
        return f"{self.uri}/{key}" if key else self.uri

    def _call(self, key: str, doing: str, request: Callable[[], T]) -> T:
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
                raise NotFound(f"{self._where(key)}: there is no such object") from error
            if failure.kind is FailureKind.BEYOND:
                raise Truncated(f"{self._where(key)}: {failure.message}; it was truncated") from error
            if failure.kind is FailureKind.TAKEN and doing == "read":
                raise Replaced(f"{self._where(key)}: was replaced while it was being read") from error
            if failure.kind is FailureKind.TAKEN:
                raise FileExistsError(key) from error
            error_type = {FailureKind.BROKEN: _Broken, FailureKind.FINAL: Refused}.get(failure.kind, StoreError)
            raise error_type(f"{self._where(key)}: can't {doing} it: {failure.message}") from error


class _Broken(StoreError):
    """This upload in parts can't go on."""


class Body:
    """What a request sends, without a copy, in slices: a socket's timeout is for the whole of what it is given at once,
    and a part that takes long is no reason to give up while bytes still move."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[memoryview]:
        return (self._data[at : at + SLICE_BYTES] for at in range(0, len(self._data), SLICE_BYTES))


def upload_part_bytes(size: int) -> int:
    """Bytes per part of an upload: 16 to 64 MiB, in steps of 16, so that the parts of the COMMIT lie whole within
    them."""
    wanted = -(-size // PARTS_WANTED_MAX)
    steps = -(-wanted // PART_BYTES)
    largest_useful = UPLOAD_PART_BYTES_MAX // PART_BYTES
    needed = -(-size // (10_000 * PART_BYTES))  # S3's limit of parts wins over ours
    return max(min(max(steps, 1), largest_useful), needed) * PART_BYTES


def _checksums(data: memoryview) -> list[tuple[str, int]]:
    return [(crc32(data[start : start + length]), length) for start, length in parts_of(len(data))]
