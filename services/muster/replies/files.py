"""Replies of the API about files, shared by server and client."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from muster.replies.jobs import Reply
from muster.words.base import Time


class Purpose(StrEnum):
    """Purpose of a file, in OpenAI's words where it has one."""

    FINE_TUNE = "fine-tune"  # data that a job trains on: read through when it has arrived
    EVALS = "evals"  # data that a job is evaluated on: the same
    SOURCE = "source"  # a program's folder, packed as tar.gz: kept as it is
    USER_DATA = "user_data"  # anything else, such as a tokenizer.json: kept as it is

    @property
    def is_data(self) -> bool:
        return self in (Purpose.FINE_TUNE, Purpose.EVALS)


class FileStatus(StrEnum):
    """State of a file."""

    UPLOADING = "uploading"  # bytes are still to come
    CHECKING = "checking"  # all have arrived, and are put away and read through
    READY = "ready"  # a job may read it
    FAILED = "failed"  # nothing can be learnt from it; `fault` says why and where


class File(Reply):
    """A file of a project. `received` are the bytes that have arrived for certain, of `bytes` in all. Of data, `format`
    is what the records look like, `samples` how many there are, and `uncompressed_bytes` their size as they are read;
    null before they were read through, and for other files; `unchecked` says why data could not be. `tokens_estimated`
    is a quarter of the bytes of their text. Tokens depend on a job's tokenizer: `muster data inspect` counts them."""

    id: str
    project: str
    owner: str
    name: str
    purpose: Purpose
    status: FileStatus
    bytes: int
    received: int
    sha256: str | None = Field(description="In hex; null before the last byte has arrived.")
    fault: str | None
    format: str | None
    samples: int | None
    uncompressed_bytes: int | None
    tokens_estimated: int | None = Field(
        default=None,
        description="Bytes of text by 4, as English has them in usual vocabularies; no tokenizer is asked.",
    )
    unchecked: str | None
    created_at: Time
    expires_at: Time | None


class FileList(Reply):
    """`next_cursor` asks for the next page; it is null on the last."""

    items: list[File]
    next_cursor: str | None
