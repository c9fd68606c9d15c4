"""Which commits a job has: the `commits` folder of its checkpoint address, on disk or in S3.

Only names and a few fields are read, and each COMMIT once: it is immutable, so what was read of it stays true until its
name is gone from the listing.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from muster.contract.checkpoint import COMMITS, FORMAT_VERSION, commit_key, parse_commit, step_of_commit_key


class CommitsUnreadable(OSError):
    """The listing failed, so nothing is known: not the same as "no commits". The message names address and cause."""


@dataclass(frozen=True)
class CommitSeen:
    """committed_at: seconds since the epoch, by the committer's clock. best: so marked when it was committed."""

    step: int
    attempt: int
    committed_at: float
    best: bool


class Commits:
    """Reads the commits of any number of jobs; safe to ask from several threads."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], CommitSeen] = {}
        self._stores: dict[str, Store] = {}
        self._s3 = _S3()

    def read(self, folder: str) -> tuple[CommitSeen, ...]:
        """Ascending by step. folder: `<checkpoint uri>/<job uid>`. A COMMIT that can't be parsed is not a commit.

        Raises CommitsUnreadable when the store doesn't answer.
        """
        store = self._store(folder)
        listed = dict(store.listing())  # name → tag
        found = [
            self._known.get((folder, tag)) or self._parse(store, folder, name, tag) for name, tag in listed.items()
        ]
        self._forget(folder, set(listed.values()))
        return tuple(sorted((seen for seen in found if seen), key=lambda seen: seen.step))

    def _store(self, folder: str) -> Store:
        if folder not in self._stores:
            self._stores[folder] = _open_store(folder, self._s3)
        return self._stores[folder]

    def _parse(self, store: Store, folder: str, name: str, tag: str) -> CommitSeen | None:
        text = store.read(name)
        seen = _seen(name, text) if text is not None else None
        if seen:
            self._known[(folder, tag)] = seen
        return seen

    def _forget(self, folder: str, tags: set[str]) -> None:
        for key in [key for key in self._known.copy() if key[0] == folder and key[1] not in tags]:
            self._known.pop(key, None)


class Store(Protocol):
    def listing(self) -> Iterator[tuple[str, str]]:
        """(name, tag) of every COMMIT; a tag changes when the bytes do."""

    def read(self, name: str) -> bytes | None:
        """None: gone meanwhile."""


def _open_store(folder: str, s3: _S3) -> Store:
    """The store behind `file://…`, a plain path or `s3://…`. Raises CommitsUnreadable for any other address."""
    scheme, separator, rest = folder.partition("://")
    if not separator:
        return FolderStore(Path(folder))
    if scheme == "file":
        return FolderStore(Path(rest))
    if scheme == "s3":
        bucket, _, prefix = rest.partition("/")
        return S3Store(s3.client(folder), bucket, prefix.strip("/"))
    raise CommitsUnreadable(f"{folder}: checkpoints lie under file:// or s3://, not {scheme}://")


class FolderStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / COMMITS

    def listing(self) -> Iterator[tuple[str, str]]:
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if step_of_commit_key(entry.name) is not None:
                        stat = entry.stat()
                        yield entry.name, f"{entry.name}:{stat.st_ino}:{stat.st_mtime_ns}:{stat.st_size}"
        except FileNotFoundError:
            return  # nothing was ever committed
        except OSError as error:
            raise CommitsUnreadable(f"can't list the commits in {self._folder}: {error.strerror}") from error

    def read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CommitsUnreadable(f"can't read {self._folder / name}: {error.strerror}") from error


class _S3:
    """One client for all jobs: it is safe to share between threads, and each one costs megabytes."""

    def __init__(self) -> None:
        self._making = threading.Lock()
        self._client: Any = None

    def client(self, folder: str) -> Any:
        """Credentials, region and endpoint as boto3 finds them (AWS_*, AWS_ENDPOINT_URL)."""
        with self._making:
            if self._client is None:
                self._client = self._make(folder)
            return self._client

    def _make(self, folder: str) -> Any:
        try:
            import boto3
            from botocore.config import Config
        except ImportError:
            raise CommitsUnreadable(f"{folder}: reading S3 needs boto3; install muster-train[operator]") from None
        settings = Config(connect_timeout=5, read_timeout=10, retries={"mode": "standard", "max_attempts": 3})
        return boto3.client("s3", config=settings)


class S3Store:
    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self._client, self._bucket, self._prefix = client, bucket, f"{prefix}/{COMMITS}/"

    def listing(self) -> Iterator[tuple[str, str]]:
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            for entry in (entry for page in pages for entry in page.get("Contents", ())):
                name = entry["Key"].rsplit("/", 1)[-1]
                if step_of_commit_key(name) is not None:
                    yield name, f"{name}:{entry['ETag']}"
        except Exception as error:  # botocore raises a class per service error, made at run time
            raise CommitsUnreadable(f"can't list s3://{self._bucket}/{self._prefix}: {error}") from error

    def read(self, name: str) -> bytes | None:
        try:
            body: bytes = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"].read()
            return body
        except Exception as error:
            if getattr(error, "response", {}).get("Error", {}).get("Code") in ("NoSuchKey", "404"):
                return None
            raise CommitsUnreadable(f"can't read s3://{self._bucket}/{self._prefix}{name}: {error}") from error


def _seen(name: str, text: bytes) -> CommitSeen | None:
    try:
        commit = json.loads(text)
        # The trainer would not resume from what was changed after it was written. A newer trainer's format is for the
        # trainer to judge: not to believe it would mean to begin again at step 0.
        if "seal" in commit and commit["version"] <= FORMAT_VERSION:
            parse_commit(text)
        seen = CommitSeen(
            step=int(commit["step"]),
            attempt=int(commit["attempt"]),
            committed_at=float(commit["committedAt"]),
            best=bool(commit.get("best", False)),
        )
    except (ValueError, TypeError, KeyError):
        return None
    return seen if commit_key(seen.step).endswith(f"/{name}") else None
