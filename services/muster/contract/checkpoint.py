"""What a commit is, and where its files lie. The format as a specification: docs/checkpoint-format.md.

    <folder>/step-00001200/attempt-7/shard-00003-of-00008.safetensors     immutable, written first
    <folder>/commits/step-00001200.json                                  the COMMIT, written last, one object
    <folder>/pins/step-00001200                                          a person's wish to keep that commit
    <folder>/quarantine/step-00001200.json                               a COMMIT whose bytes did not verify, and why

`<folder>` is `<spec.checkpoint.uri>/<job uid>`. Only what a COMMIT names exists.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, Literal

from pydantic import Field

from muster.contract.base import Many, Record

FORMAT_VERSION = 1
COMMITS = "commits"
PINS = "pins"
QUARANTINE = "quarantine"
_COMMIT_FILE = re.compile(r"step-(\d{8,})\.json")


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def commit_key(step: int) -> str:
    return f"{COMMITS}/{step_name(step)}.json"


def attempt_prefix(step: int, attempt: int) -> str:
    return f"{step_name(step)}/attempt-{attempt}"


def shard_key(step: int, attempt: int, shard: int, shards: int) -> str:
    return f"{attempt_prefix(step, attempt)}/shard-{shard:05d}-of-{shards:05d}.safetensors"


def step_of_commit_key(key: str) -> int | None:
    """The step of `…/step-00001200.json`; None for any other key."""
    match = _COMMIT_FILE.fullmatch(key.rsplit("/", 1)[-1])
    return int(match[1]) if match else None


class FileEntry(Record):
    """key: relative to the job's checkpoint folder. checksum: hex, of the whole file, as Commit says.

    parts: the same of each successive part_bytes of the file, so that a reader can verify only what it needs.
    """

    key: str
    bytes: int
    checksum: str
    part_bytes: int | None = None
    parts: Many[str] = ()


class Slice(Record):
    """A chunk of one tensor inside one file: `offset` and `extent` per dimension, in elements.

    name: the tensor's name inside the safetensors file; each rank writes at most one slice of a tensor per name.
    start: the byte of the file at which the slice begins, so that a reader needs no header; None: ask the header.
    """

    file: int  # index into Commit.files
    name: str
    offset: Many[int]
    extent: Many[int]
    start: int | None = None


class TensorEntry(Record):
    """dtype: as safetensors spells it (F32, BF16 …). slices: disjoint chunks that cover the global shape, in JSON
    `pieces`."""

    dtype: str
    shape: Many[int]
    slices: Many[Slice] = Field(alias="pieces")


class DataCursor(Record):
    """Where the data stands, free of world size: the next global sample of this epoch.

    The order of samples follows from (seed, epoch) alone.
    """

    seed: int
    epoch: int
    sample: int


class Commit(Record):
    """One checkpoint. Tensor names: `model/<parameter>`, `optimizer/<parameter>/<exp_avg | exp_avg_sq | step>`.

    mesh: the parallelism it was saved under, for the reader's information. state: schedule, scaler, early stopping and
    the like, JSON only. rng: per rank, JSON only; used when the world size is the same.
    """

    version: int = FORMAT_VERSION
    job: str
    job_uid: str
    attempt: int
    step: int
    committed_at: float
    world_size: int
    mesh: dict[str, Any] = {}
    checksum_algorithm: Literal["sha256", "blake2b", "crc32"] = "crc32"
    files: Many[FileEntry]
    tensors: dict[str, TensorEntry]
    cursor: DataCursor
    tokens: int = 0  # trained so far
    state: dict[str, Any] = {}
    rng: Many[dict[str, Any]] = ()
    config: dict[str, Any]  # the resolved TrainingConfig
    architecture: dict[str, Any]  # the decoder's shape, also where config.model says `from`
    tokenizer: dict[str, Any] = {}  # {"kind": "bytes"} or {"kind": "huggingface", "sha256": …, "json": …}
    metrics: dict[str, float] = {}  # loss, evaluation_loss …
    best: bool = False  # the best evaluation loss so far, when it was committed
    versions: dict[str, str] = {}


def sealed(commit: Commit) -> bytes:
    """The bytes of a COMMIT: one line of JSON with sorted keys, whose `seal` is the SHA-256 of the same without it."""
    document = commit.model_dump(mode="json", by_alias=True)  # None is kept: it may mean something in state and rng
    return _canonical({**document, "seal": _seal(document)})


def parse_commit(data: bytes) -> Commit:
    """Read a COMMIT. Raises ValueError, with the reason, for a newer format and for what is not as it was sealed."""
    document = json.loads(data)
    if not isinstance(document, dict) or not isinstance(version := document.get("version"), int):
        raise ValueError("it is no COMMIT")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"its format version is {version}, and this Muster reads up to {FORMAT_VERSION}; upgrade Muster"
        )
    seal = document.pop("seal", None)
    if seal != _seal(document):
        raise ValueError("its seal does not match: it was changed after it was written")
    return Commit.model_validate(document)


def _seal(document: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(document)).hexdigest()


def _canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
