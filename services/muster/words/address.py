"""Addresses of folders and files, and the one parser of them.

    /data/books, ~/books, books                 a path, taken literally
    file:///data/my%20books                     a path of this machine, percent-encoded (RFC 8089)
    s3://bucket/folder                          everything after the bucket is the key, taken literally
    https://host/file.jsonl                     a file of the web, for reading
    hf://[datasets/]owner/name[@revision][/path]  a repository of the Hugging Face hub, for reading
    builtin://python-stdlib                     data that every installation has

No part of an address is cut off: `#` and `?` belong to a file's path and to a key, where a URL parser would end them.
Two programs that read the same text always mean the same place, and `parse_address(str(address)) == address`.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import quote, unquote_to_bytes

from muster.words.base import UserError

Scheme = Literal["file", "s3", "https", "hf", "builtin"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_WEB_HOST = re.compile(r"[A-Za-z0-9.-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")
_HUB = re.compile(
    r"(?:(?P<kind>datasets|spaces|models)/)?(?P<repository>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_WEB_URL = re.compile(r"\s*https?://(?:[^/@]*@)?([^/?#]+)", re.IGNORECASE)
_IP_ADDRESS = re.compile(r"\s*((?:\d{1,3}(?:\.\d{1,3}){3}|\[[\da-f:.]+\])(?::\d+)?)\s*(?:/|$)", re.IGNORECASE)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_METADATA_NAMES = frozenset({"metadata", "metadata.google.internal", "metadata.goog", "instance-data.ec2.internal"})
_METADATA_ADDRESSES = frozenset({"fd00:ec2::254", "fd20:ce::254", "100.100.100.200"})  # AWS, Google, Alibaba
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class AddressError(UserError, ValueError):
    """Error for text that is no address, or not one for this purpose. The message names the address and says what to
    write."""


@dataclass(frozen=True)
class StorageAddress:
    """Parsed address of a folder or file."""

    scheme: Scheme
    host: str  # the bucket of s3, the host of https, else empty
    # Of the file system (file), the key without its first slash (s3), what follows the host (https) or the scheme (hf,
    # builtin).
    path: str

    def __str__(self) -> str:
        if self.scheme != "file":
            return f"{self.scheme}://{self.host}{'/' if self.host and self.path else ''}{self.path}"
        return f"file://{quote(self.path)}" if self.path.startswith("/") else self.path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def local(self) -> Path:
        """The path on this machine, `~` expanded. Only of a file address."""
        assert self.scheme == "file", f"{self} is no path"
        try:
            return Path(self.path).expanduser()
        except RuntimeError as error:
            raise AddressError(f"{self.path}: {error}; write the path out") from None

    @property
    def is_absolute(self) -> bool:
        """Return False for a path relative to the working directory, which other processes do not share."""
        return self.scheme != "file" or self.path.startswith(("/", "~"))

    def child(self, name: str) -> StorageAddress:
        """Return the address of `name` in this folder."""
        return replace(self, path=f"{self.path.rstrip('/')}/{name}" if self.path else name)


@dataclass(frozen=True)
class HubPath:
    """Target of an hf:// address: a file or folder in a repository of the Hugging Face hub."""

    kind: str | None  # `datasets`, `spaces` or `models`; None where the address says none
    repository: str  # `owner/name`
    revision: str | None  # None where the address names none
    path: str  # inside the repository


def parse_address(text: str) -> StorageAddress:
    """Raises AddressError for what is no address of a known scheme."""
    _must_be_quoted(text, text)
    if not (match := _SCHEME.fullmatch(text)):
        return _plain(text)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "file":
        return _file(text, rest)
    if scheme == "s3":
        return _s3(text, rest)
    if scheme == "https":
        host, _, path = rest.partition("/")
        if "@" in host or not _WEB_HOST.fullmatch(host):
            raise AddressError(f"{_quoted(text)}: names no host, or more than a host; write https://host/path")
        if is_metadata_host(_host_name(host)):
            raise AddressError(f"{_quoted(text)}: is a machine's own metadata service, which no job may read")
        return StorageAddress("https", host.lower(), path)
    if scheme == "hf":
        if not _HUB.fullmatch(rest):
            raise AddressError(
                f"{_quoted(text)}: names no repository; write hf://owner/name or hf://datasets/owner/name"
            )
        return StorageAddress("hf", "", rest)
    if scheme == "builtin":
        return StorageAddress("builtin", "", rest)
    raise AddressError(
        f"{_quoted(text)}: nothing reads {scheme}://; there are file:///folder, s3://bucket/folder and, to read from, "
        "https:// and hf://"
    )


def is_metadata_host(host: str) -> bool:
    """Return whether a name or IP address is a cloud's metadata service, which hands out the machine's own credentials,
    or any other link-local address. `host` comes without port and brackets."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if (number := _ipv4_of(host.rstrip("."))) is None:
            return host.lower().rstrip(".") in _METADATA_NAMES
        address = number
    if isinstance(address, ipaddress.IPv6Address):
        translated = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
        address = address.ipv4_mapped or address.sixtofour or translated or address
    return address.is_link_local or str(address) in _METADATA_ADDRESSES


def _ipv4_of(host: str) -> ipaddress.IPv4Address | None:
    """An address as resolvers read it (inet_aton): one to four numbers, decimal, octal or hexadecimal; the last fills
    what is left."""
    *first, last = host.split(".")
    if len(first) > 3:
        return None
    try:
        numbers = [_number(part) for part in (*first, last)]
    except ValueError:
        return None
    if any(number > 0xFF for number in numbers[:-1]) or numbers[-1] >= 1 << 8 * (4 - len(first)):
        return None
    return ipaddress.IPv4Address(sum(n << 8 * (3 - at) for at, n in enumerate(numbers[:-1])) + numbers[-1])


def _number(text: str) -> int:
    if not text.isalnum() or not text.isascii():
        raise ValueError(text)
    if text.lower().startswith("0x"):
        return int(text[2:] or "0", 16)
    return int(text, 8 if text.startswith("0") else 10)


def refuse_metadata_url(text: str) -> None:
    """Raises AddressError for an http(s) URL of a machine's metadata service, or for its IP address, which proxies are
    named by; any other text passes."""
    match = _WEB_URL.match(text) or _IP_ADDRESS.match(text)
    if match and is_metadata_host(_host_name(match[1])):
        raise AddressError("is the address of a machine's own metadata service, which no job may name as an endpoint")


def checkpoint_address(text: str) -> StorageAddress:
    """The address of a folder that commits can be written to. Raises AddressError for any other."""
    address = parse_address(text)
    if address.scheme not in ("file", "s3") or (not address.path.startswith("/") and address.scheme == "file"):
        raise AddressError(f"must be file:///an/absolute/path or s3://bucket/folder, not {_quoted(text)}")
    return address


def data_address(text: str) -> StorageAddress:
    """The address of something to train on. Raises AddressError for what nobody reads."""
    address = parse_address(text)
    if address.scheme == "hf":
        raise AddressError(f"{_quoted(text)}: data is not read from the hub; download it, and name the folder")
    if address.scheme == "builtin" and address.path != "python-stdlib":
        raise AddressError(f"{_quoted(text)}: there is only builtin://python-stdlib")
    return address


def job_folder(base: str, uid: str) -> StorageAddress:
    """A job's own folder under a checkpoint address: `<base>/<uid>`. Raises AddressError."""
    if not _UID.fullmatch(uid):
        raise AddressError(f"{uid[:80]!r} is no uid of a job")
    return checkpoint_address(base).child(uid)


def hub_path(address: StorageAddress) -> HubPath:
    """The parts of an hf:// address."""
    match = _HUB.fullmatch(address.path)
    assert match is not None, f"{address} is no address of the hub"
    return HubPath(match["kind"], match["repository"], match["revision"], match["path"] or "")


def _host_name(host: str) -> str:
    """Return the host name of `name:port`, `[v6]:port` or a bare one."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _plain(text: str) -> StorageAddress:
    if not text or ("://" in text and not text.startswith(("/", "~", "."))):
        raise AddressError(f"{_quoted(text)}: is neither a path nor an address")
    return StorageAddress("file", "", _tidied(text))


def _file(text: str, rest: str) -> StorageAddress:
    host, slash, path = rest.partition("/")
    if host.lower() not in ("", "localhost") or not slash:
        raise AddressError(
            f"{_quoted(text)}: a file address is absolute and has three slashes, as in file:///data/books"
        )
    try:
        decoded = unquote_to_bytes(slash + path).decode()
    except UnicodeDecodeError:
        raise AddressError(
            f"{_quoted(text)}: its percent-encoding is not of UTF-8; write %25 for a percent sign"
        ) from None
    _must_be_quoted(decoded, text)
    return StorageAddress("file", "", _tidied(decoded))


def _tidied(path: str) -> str:
    """Return the path without empty parts and `.`; `..` is left to the file system."""
    return re.sub("^//", "/", str(PurePosixPath(path)))


def _s3(text: str, rest: str) -> StorageAddress:
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise AddressError(f"{_quoted(text)}: names no bucket; write s3://bucket/folder")
    if not _BUCKET.fullmatch(bucket):
        raise AddressError(f"{_quoted(text)}: its first part is no name of a bucket; write s3://bucket/folder")
    if {".", ".."} & set(key.split("/")):
        raise AddressError(f"{_quoted(text)}: has a part `.` or `..`, which S3 servers understand differently")
    return StorageAddress("s3", bucket, key)


def _must_be_quoted(text: str, address: str) -> None:
    """Line ends and NUL in a name are always a mistake, and a lone surrogate can't be written down."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise AddressError(f"{_quoted(address)}: is not Unicode text") from None
    if _CONTROL.search(text):
        raise AddressError(f"{_quoted(address)}: holds a control character")


def _quoted(text: str) -> str:
    """Return the address without a password."""
    return repr(re.sub(r"(://)[^/@]*@", r"\1***@", text)[:200])
