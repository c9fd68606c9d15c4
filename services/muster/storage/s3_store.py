"""Objects in a bucket, as a Store."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from muster.storage.checksum import PART_BYTES, combine, crc32, parts_of
from muster.storage.errors import NotFound, StoreError, TooLarge, TruncatedObject
from muster.storage.retry import StoreRetry
from muster.storage.s3_bucket import S3Bucket
from muster.storage.s3_probe import StoreServer, crc32_header
from muster.storage.s3_upload import S3Uploads
from muster.storage.settings import S3Settings
from muster.storage.store import SMALL_BYTES_MAX, ObjectStream, StoredObject, expect_all, nobody
from muster.words.address import StorageAddress
from muster.words.checkpoint import FileEntry

WRITES_MAX = 5  # of a small object that reads back differently


class S3Store:
    """A folder of a bucket as a Store."""

    def __init__(
        self, address: StorageAddress, settings: S3Settings | None = None, retry: StoreRetry | None = None
    ) -> None:
        self._bucket = S3Bucket(address, settings, retry)
        self._uploads = S3Uploads(self._bucket)
        self.uri = self._bucket.uri
        self.streams = self._bucket.settings.streams

    @property
    def server(self) -> StoreServer:
        """Return the server's behaviour, probed once; needs permission to write."""
        return self._uploads.server

    def warm_up(self) -> None:
        """Connect, and ask the server what it does, before the first save needs it."""
        _ = self.server

    def write(self, key: str, data: memoryview, sent: Callable[[int], None] = nobody) -> FileEntry:
        checksums = self._uploads.write(key, data, sent)
        return FileEntry(
            key=key,
            bytes=len(data),
            checksum=combine(checksums),
            part_bytes=PART_BYTES,
            parts=tuple(checksum for checksum, _ in checksums),
        )

    def verify(self, entry: FileEntry) -> None:
        """Verify by the server's means: it stores the checksum, it checked every part on arrival, or everything is read
        again."""
        if self.server.integrity == "crc32":
            self._compare_kept_checksum(entry)
        elif self.server.integrity == "read_back" or entry.key in self._uploads.doubtful:
            self._read_back(entry)
            self._uploads.doubtful.discard(entry.key)

    def see_all(self, entries: Iterable[FileEntry], prefix: str) -> None:
        if self.server.integrity == "etag":
            # Completing an upload names the MD5 of each part, so it says all that a listing would; and servers of this
            # kind (rclone, some gateways) hash every object again to answer one.
            return
        expect_all(entries, {item.key: item.bytes for item in self.objects(prefix)}, self.uri)

    def create(self, key: str, data: bytes) -> bool:
        only_if_new = {"IfNoneMatch": "*"} if self.server.conditional else {}
        if not self.server.conditional:
            with contextlib.suppress(NotFound):
                self.about(key)
                return False
        try:
            self._put(key, data, **only_if_new)
        except FileExistsError:
            return False
        return True

    def replace(self, key: str, data: bytes) -> None:
        self._put(key, data)

    def read(self, key: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        def get() -> bytes:
            answer = self._bucket.client.get_object(**self._bucket.at(key))
            if (size := answer["ContentLength"]) > bytes_max:
                answer["Body"].close()
                where = self._bucket.where(key)
                raise TooLarge(f"{where}: holds {size} bytes, more than the {bytes_max} that are read")
            body: bytes = answer["Body"].read()
            if len(body) != answer["ContentLength"]:
                raise EOFError(f"the answer ended after {len(body)} of {answer['ContentLength']} bytes")
            return body

        return self._bucket.call(key, "read", get)

    def read_into(self, key: str, start: int, into: memoryview, tag: str | None = None) -> None:
        if len(into):
            self._bucket.call(key, "read", lambda: self._get_range(key, start, into, tag))

    def open(self, entry: StoredObject) -> io.BufferedReader:
        def connect(at: int) -> Any:
            options = {"Range": f"bytes={at}-", "IfMatch": entry.tag}
            return self._bucket.client.get_object(**self._bucket.at(entry.key), **options)["Body"]

        call = functools.partial(self._bucket.call, entry.key, "read")
        return io.BufferedReader(ObjectStream(entry.bytes, connect, call), 1 << 20)

    def about(self, key: str) -> StoredObject:
        head = self._bucket.call(key, "look at", lambda: self._bucket.client.head_object(**self._bucket.at(key)))
        return StoredObject(key, head["ContentLength"], head["LastModified"].timestamp(), head["ETag"])

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        for page in self._bucket.pages(prefix, self._bucket.client.list_objects_v2, ("ContinuationToken",)):
            for entry in page.get("Contents", ()):
                key, modified_at = entry["Key"][len(self._bucket.prefix) :], entry["LastModified"].timestamp()
                yield StoredObject(key, entry["Size"], modified_at, entry["ETag"])

    def delete(self, key: str) -> None:
        with contextlib.suppress(NotFound):
            self._bucket.call(key, "delete", lambda: self._bucket.client.delete_object(**self._bucket.at(key)))

    def drop_unfinished(self, is_over: Callable[[str], bool]) -> None:
        pages = self._bucket.pages("", self._bucket.client.list_multipart_uploads, ("KeyMarker", "UploadIdMarker"))
        for upload in [upload for page in pages for upload in page.get("Uploads", ())]:
            key = upload["Key"][len(self._bucket.prefix) :]
            if is_over(key):
                self._uploads.abort(key, upload["UploadId"])

    def _put(self, key: str, data: bytes, **extra: str) -> None:
        """Write a small object; if the server reports nothing of what arrived, read it again, and write it again where
        it is another."""
        self._uploads.put(key, memoryview(data), crc32(data), **extra)
        if self.server.integrity != "read_back":
            return
        for _ in range(WRITES_MAX):
            if self.read(key, max(len(data), SMALL_BYTES_MAX)) == data:
                return
            self._uploads.put(key, memoryview(data), crc32(data))
        raise StoreError(f"{self._bucket.where(key)}: written {WRITES_MAX} times, and read back differently")

    def _get_range(self, key: str, start: int, into: memoryview, tag: str | None) -> None:
        options = {"Range": f"bytes={start}-{start + len(into) - 1}", **({"IfMatch": tag} if tag else {})}
        answer, where = self._bucket.client.get_object(**self._bucket.at(key), **options), self._bucket.where(key)
        if answer["ContentLength"] < len(into):
            raise TruncatedObject(
                f"{where}: ends {len(into) - answer['ContentLength']} bytes too early; it was truncated"
            )
        if answer["ContentLength"] > len(into):
            raise StoreError(f"{where}: the store ignores ranges: {answer['ContentLength']} bytes for {len(into)}")
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

    def _compare_kept_checksum(self, entry: FileEntry) -> None:
        at, where = {**self._bucket.at(entry.key), "ChecksumMode": "ENABLED"}, self._bucket.where(entry.key)
        about = self._bucket.call(entry.key, "look at", lambda: self._bucket.client.head_object(**at))
        kept, expected = about.get("ChecksumCRC32", ""), crc32_header(entry.checksum)
        if about["ContentLength"] != entry.bytes:
            raise StoreError(f"{where}: holds {about['ContentLength']} bytes, not {entry.bytes}")
        # `…-12` is a checksum of checksums, which says nothing about ours; the parts were checked on arrival.
        if kept and "-" not in kept and kept != expected:
            raise StoreError(f"{where}: the store has checksum {kept}, not {expected}")

    def _read_back(self, entry: FileEntry) -> None:
        def check(part: tuple[tuple[int, int], str]) -> None:
            (start, length), checksum = part
            buffer = memoryview(bytearray(length))
            self.read_into(entry.key, start, buffer)
            if crc32(buffer) != checksum:
                raise StoreError(
                    f"{self._bucket.where(entry.key)}: bytes {start} to {start + length} read back differently"
                )

        list(self._uploads.threads.map(check, zip(parts_of(entry.bytes), entry.parts, strict=True)))
