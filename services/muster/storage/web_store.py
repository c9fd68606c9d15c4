"""Files of the web, for reading: one https host, whose paths are the keys."""

from __future__ import annotations

import email.utils
import functools
import http.client
import io
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from muster.storage.errors import NotFound, ReplacedObject, StoreError, StoreRefusal, TooLarge, TruncatedObject
from muster.storage.retry import StoreRetry
from muster.storage.settings import S3Settings
from muster.storage.store import SMALL_BYTES_MAX, ObjectStream, StoredObject
from muster.words.address import StorageAddress, is_metadata_host
from muster.words.redaction import without_query

T = TypeVar("T")

SECONDS_MAX = 30.0  # between two packets
RETRY_SECONDS = 60.0


def patient_as(settings: S3Settings, address: StorageAddress) -> WebStore:
    """A store that waits for its server as long as these settings let S3 be waited for."""
    return WebStore(address, StoreRetry(settings.retry_seconds), settings.read_seconds)


class WebStore:
    """The files below an https:// address. Nothing can be listed on the web, so a caller has to know its keys."""

    streams = 8

    def __init__(
        self, address: StorageAddress, retry: StoreRetry | None = None, read_seconds: float = SECONDS_MAX
    ) -> None:
        self.uri = str(address).rstrip("/")
        self._retry, self._read_seconds = retry or StoreRetry(RETRY_SECONDS), read_seconds
        self._web = urllib.request.build_opener(_GuardedHandler(), _GuardedRedirects())

    def about(self, key: str) -> StoredObject:
        def head() -> StoredObject | None:
            try:
                with self._ask(key, method="HEAD") as answer:
                    return _object(key, answer, answer.headers.get("Content-Length", ""))
            except urllib.error.HTTPError as error:
                if error.code not in _NO_HEAD:
                    raise
                error.close()
                return None

        def get_first_byte() -> StoredObject | None:
            try:
                with self._ask(key, {"Range": "bytes=0-0"}) as answer:
                    whole = answer.headers.get("Content-Range", "").rpartition("/")[2]
                    is_part = answer.status == http.client.PARTIAL_CONTENT
                    if item := _object(key, answer, whole if is_part else answer.headers.get("Content-Length", "")):
                        return item
                with self._ask(key) as answer:  # a part of nobody says what; the head of the whole is enough
                    return _object(key, answer, answer.headers.get("Content-Length", ""))
            except urllib.error.HTTPError as error:
                with error:
                    if error.code == 416:  # an empty file has no first byte
                        return _object(key, error, error.headers.get("Content-Range", "").rpartition("/")[2])
                    raise

        # A presigned link is signed for GET alone.
        if (item := self._call(key, head) or self._call(key, get_first_byte)) is None:
            where = self._where(key)
            raise StoreError(f"{where}: its server does not say how large it is; copy it to a folder or S3")
        return item

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        raise StoreRefusal(f"{self._where(prefix)}: the web has no folders to list; name each file")

    def read(self, key: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        def get() -> bytes:
            with self._ask(key) as answer:
                data: bytes = answer.read(bytes_max + 1)
            if len(data) > bytes_max:
                raise TooLarge(f"{self._where(key)}: holds more than the {bytes_max} bytes that are read of it")
            return data

        return self._call(key, get)

    def read_into(self, key: str, start: int, into: memoryview, tag: str | None = None) -> None:
        if len(into):
            self._call(key, lambda: self._fill(key, start, into, tag))

    def open(self, entry: StoredObject) -> io.BufferedReader:
        connect = functools.partial(self._from, entry.key, tag=entry.tag)
        return io.BufferedReader(ObjectStream(entry.bytes, connect, functools.partial(self._call, entry.key)), 1 << 20)

    def _fill(self, key: str, start: int, into: memoryview, tag: str | None) -> None:
        done = 0
        with self._from(key, start, start + len(into), tag) as answer:
            while done < len(into):
                count = answer.readinto(into[done:])
                if not count:
                    raise TruncatedObject(f"{self._where(key)}: ends at byte {start + done}; it was truncated")
                done += count

    def _from(self, key: str, start: int, end: int | None = None, tag: str | None = None) -> Any:
        """The body from byte `start` on, up to `end`."""
        answer = self._ask(key, {"Range": f"bytes={start}-{'' if end is None else end - 1}"})
        if tag is not None and _tag(answer) != tag:
            answer.close()
            raise ReplacedObject(f"{self._where(key)}: was replaced while it was being read")
        if start and answer.status != http.client.PARTIAL_CONTENT:
            answer.close()
            raise StoreError(f"{self._where(key)}: its server does not give parts of a file; copy it to a folder or S3")
        return answer

    def _ask(self, key: str, headers: dict[str, str] | None = None, method: str = "GET") -> Any:
        # Not compressed on its way: sizes and ranges are of the file.
        asked = {"Accept-Encoding": "identity", "User-Agent": "muster", **(headers or {})}
        url = f"{self.uri}/{key}" if key else self.uri
        request = urllib.request.Request(url, headers=asked, method=method)  # noqa: S310 (https alone)
        return self._web.open(request, timeout=self._read_seconds)

    def _where(self, key: str) -> str:
        """The file's address, for messages."""
        return without_query(f"{self.uri}/{key}" if key else self.uri)

    def _call(self, key: str, request: Callable[[], T]) -> T:
        try:
            return self._retry.call(request, _wait_for)
        except StoreError:
            raise
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (404, 410):
                raise NotFound(f"{self._where(key)}: there is no such file") from None
            if error.code == 416:
                raise TruncatedObject(f"{self._where(key)}: ends before the range; it was truncated") from None
            kind = StoreRefusal if error.code < 500 and error.code not in _PASSING else StoreError
            raise kind(f"{self._where(key)}: can't read it: {error.code} {error.reason}") from None
        except (OSError, http.client.HTTPException, EOFError) as error:
            raise StoreError(f"{self._where(key)}: can't read it: {error}") from error


class _GuardedConnection(http.client.HTTPSConnection):
    """Whatever name leads there, a machine's metadata service is not spoken to."""

    def connect(self) -> None:
        super().connect()
        peer = self.sock.getpeername()[0]
        if is_metadata_host(peer.partition("%")[0]):
            self.close()
            raise StoreRefusal(
                f"https://{self.host}: is {peer}, a machine's own metadata service, which no job may read"
            )


class _GuardedHandler(urllib.request.HTTPSHandler):
    def __init__(self) -> None:
        self._tls = ssl.create_default_context()
        super().__init__(context=self._tls)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_GuardedConnection, request, context=self._tls)


class _GuardedRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, request: Any, fp: Any, code: int, message: str, headers: Any, url: str) -> Any:
        if not url.startswith("https://"):
            fp.close()
            here, there = without_query(request.full_url), without_query(url)[:200]
            raise StoreRefusal(f"{here}: leads to {there}, which is not encrypted")
        return super().redirect_request(request, fp, code, message, headers, url)


_PASSING = (408, 425, 429)
_NO_HEAD = (400, 403, 405, 501)  # what servers answer to HEAD that would give the file


def _wait_for(error: Exception) -> tuple[bool, float | None] | None:
    """Answer for Retry.call whether the error passes, whether it concerns all requests, and how long to wait."""
    if isinstance(error, StoreError):
        return None
    if isinstance(error, urllib.error.HTTPError):
        after = error.headers.get("Retry-After", "")
        wait = float(after) if after.isdigit() else None
        return (error.code == 429, wait) if error.code >= 500 or error.code in _PASSING else None
    return False, None


def _object(key: str, answer: Any, size: str) -> StoredObject | None:
    """Return the object, or None if `size` is not a number."""
    if not size.isdigit():
        return None
    changed = answer.headers.get("Last-Modified")
    at = email.utils.parsedate_to_datetime(changed).timestamp() if changed else 0.0
    return StoredObject(key, int(size), at, _tag(answer))


def _tag(answer: Any) -> str:
    return str(answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "")
