"""Format of a checkpoint and layout of its files. The specification is docs/checkpoint-format.md.

    <folder>/step-00001200/attempt-7/shard-00003-of-00008.safetensors     immutable, written first
    <folder>/step-00000100/attempt-1/frozen-00003-of-00008.safetensors    what is never trained: written once in a job
    <folder>/step-00001200/attempt-7/files/<path>                        what a program left in its checkpoint folder
    <folder>/commits/step-00001200.json                                  the COMMIT, written last, one object
    <folder>/pins/step-00001200                                          a person's wish to keep that commit
    <folder>/reference/<SHA-256>.safetensors                             what a reference model says of the data: once
    <folder>/parts/attempt-7/…                                           what workers upload of one folder checkpoint
    <folder>/resume/attempt-7.json                                       the step that a program's workers resume from
    <folder>/quarantine/step-00001200.json                               a COMMIT whose bytes did not verify, and why

`<folder>` is `<spec.checkpoint.uri>/<job uid>`. Only what a COMMIT names exists.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from muster.words.base import Many, Record

# Checkpoints of Muster's trainer are of version 1. A program's are of version 2, so that a Muster that knows no
# programs leaves them alone instead of taking them for damaged ones.
FORMAT_VERSION = 2
TRAINER_VERSION, PROGRAM_VERSION = 1, 2
COMMITS = "commits"
PINS = "pins"
READERS = "readers"
QUARANTINE = "quarantine"
REFERENCE = "reference"
PARTS = "parts"  # of a folder that a program's workers write on several nodes: what each has uploaded
RESUME = "resume"  # of a program's attempt on several nodes: the step that all its workers resume from
# Bytes of one element, by the dtype as safetensors spells it.
ITEM_BYTES: Final = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
# 2^50 bytes: 200 times the largest object that S3 takes, and far below where sums of sizes leave 64 bits.
BYTES_MAX: Final = 1 << 50
_COMMIT_FILE = re.compile(r"step-([0-9]{8,18})\.json")
_FOLDER_FILE = re.compile(r"step-[0-9]{8,18}/attempt-[0-9]+/files/(.+)")
_FROZEN_FILE = re.compile(r"[^/]+/[^/]+/frozen-[^/]+")

# Numbers of a COMMIT are whole, never text or true, and bounded: arithmetic on them is exact and quick everywhere.
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 63)]
Size = Annotated[int, Field(strict=True, ge=0, le=BYTES_MAX)]
FiniteNumber = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00-\x1f\x7f]+$")]


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def commit_key(step: int) -> str:
    return f"{COMMITS}/{step_name(step)}.json"


def reference_key(digest: str) -> str:
    """Return the key of the reference model's log-probabilities, by the SHA-256 of the file."""
    return f"{REFERENCE}/{digest}.safetensors"


def attempt_prefix(step: int, attempt: int) -> str:
    return f"{step_name(step)}/attempt-{attempt}"


def shard_key(step: int, attempt: int, shard: int, shards: int) -> str:
    return f"{attempt_prefix(step, attempt)}/shard-{shard:05d}-of-{shards:05d}.safetensors"


def frozen_key(step: int, attempt: int, shard: int, shards: int) -> str:
    """Return the key of the frozen weights. The first commit writes them; later commits name the same file."""
    return f"{attempt_prefix(step, attempt)}/frozen-{shard:05d}-of-{shards:05d}.safetensors"


def is_frozen_key(key: str) -> bool:
    return _FROZEN_FILE.fullmatch(key) is not None


def folder_file_key(step: int, attempt: int, path: str) -> str:
    """Return the key of a file of a folder checkpoint; `path` is relative to the program's folder."""
    return f"{attempt_prefix(step, attempt)}/files/{path}"


def path_in_folder(key: str) -> str | None:
    """Return the path of a folder checkpoint's file relative to the folder; None for any other key."""
    match = _FOLDER_FILE.fullmatch(key)
    return match[1] if match else None


def step_of_commit_key(key: str) -> int | None:
    """The step of `…/step-00001200.json`; None for any other key."""
    match = _COMMIT_FILE.fullmatch(key.rsplit("/", 1)[-1])
    return int(match[1]) if match else None


class FileEntry(Record):
    """One file of a checkpoint."""

    key: Name  # relative to the job's checkpoint folder
    bytes: Size
    checksum: str  # of the whole file, in hex, by the algorithm that the Commit names
    # The checksum of each successive part_bytes of the file, so that a reader can verify only what it needs.
    part_bytes: Annotated[int, Field(strict=True, ge=1, le=BYTES_MAX)] | None = None  # None: there are no parts
    parts: Many[str] = ()


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="ignore"))
class Slice:
    """A chunk of one tensor inside one file.

    It is a dataclass and not a Record, because a checkpoint may have 100,000 of them and each takes half the memory so.
    """

    file: Count  # index into Commit.files
    name: Name  # the tensor's name inside that safetensors file, which has one slice by that name
    offset: tuple[Size, ...]  # per dimension, in elements: where the chunk begins in the tensor
    extent: tuple[Size, ...]  # per dimension, in elements: how large the chunk is
    start: Size | None = None  # the byte of the file at which the slice begins; None: the safetensors header says it


class TensorEntry(Record):
    """One tensor of a checkpoint, and where its chunks lie."""

    dtype: str  # as safetensors spells it (F32, BF16 …)
    shape: Many[Size]  # of the whole tensor, over all ranks
    slices: Many[Slice] = Field(alias="pieces")  # disjoint chunks that cover the shape


class DataCursor(Record):
    """Position in the data, independent of world size: the next global sample of this epoch.

    The order of samples follows from (seed, epoch) alone.
    """

    seed: Count
    epoch: Count
    sample: Count


class LossScaleState(Record):
    """The state of fp16's loss scaling."""

    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # the factor by which the loss is multiplied
    good_steps: Count  # optimizer steps since the value last changed


class BestState(Record):
    """The best evaluation so far, by which early stopping decides."""

    metric: str = "loss"  # that it is judged by
    better: Literal["lower", "higher"] = "lower"
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None  # the metric's value; None: no evaluation yet
    step: Count | None = None  # None: there was no evaluation yet
    without_improvement: Count = 0  # evaluations since then


class NumericGuardState(Record):
    """The state of the guard that skips batches whose numbers are none, and that finds a diverged model."""

    losses: Many[FiniteNumber] = ()  # of the last usual steps
    run: Many[FiniteNumber] = ()  # of the usual steps since the last run of them was complete
    lowest: Many[FiniteNumber] = ()  # of each run of usual steps
    raised: Many[FiniteNumber] = ()  # of the steps up to now whose loss was far above the usual ones
    first: Many[FiniteNumber] = ()  # of the job's first steps
    norms: Many[FiniteNumber] = ()  # of the last gradients, as clipped; only where spikes are skipped
    in_a_row: Count = 0  # batches up to now whose numbers were none, without a sound one in between
    spikes_in_a_row: Count = 0  # batches up to now that were skipped for the size of their gradient
    skipped: Count = 0  # batches that were skipped in this job


class SkippedData(Record):
    """Samples of an epoch, from `sample` on, that the job does not learn from."""

    epoch: Count
    sample: Count
    samples: Count


class OptimizerGroup(Record):
    """Settings (rate, decay and the like) that an optimizer has for some of the parameters that it trains."""

    parameters: Many[Name]
    settings: dict[str, Any]  # by torch's names; JSON only


class RunState(Record):
    """Commit.state as the trainer writes it."""

    scaler: LossScaleState
    best: BestState
    numerics: NumericGuardState
    passed_over: Many[SkippedData]
    steps: Count  # of the whole run
    data: str  # the fingerprint of the training data
    reference: str | None = None  # the SHA-256 of the stored log-probabilities of the reference; None: there are none
    # Which weights a second model has (address, revision, checksums), by what it is; None: there is none.
    teacher: dict[str, Any] | None = None
    reward_model: dict[str, Any] | None = None
    reference_model: dict[str, Any] | None = None


class Commit(Record):
    """One checkpoint: where its tensors lie, and all that training needs besides them to go on.

    A checkpoint of the trainer `program` has tensors as one of Muster's trainer does, and nothing else of that.
    One of the kind `folder` is what a program of the user's own left in a folder: its files are opaque, and
    nothing is known of tensors, data or configuration.
    """

    version: Annotated[int, Field(strict=True, ge=1)] = TRAINER_VERSION
    kind: Literal["tensors", "folder"] = "tensors"
    trainer: Literal["muster", "program"] = "muster"  # whose state it is: Muster's trainer's, or a program's
    # The name that the program gave the folder, by which it is put back; None: the files lay in the watched folder.
    entry: Name | None = None
    job: Name
    job_uid: Name
    # The last part of the address of the job's checkpoint folder. It need not be job_uid, because an API names folders
    # by ids of its own, and a cluster that is restored gives its objects new uids.
    folder: Name | None = None
    attempt: Count
    step: Annotated[int, Field(strict=True, ge=0, lt=10**18)]
    committed_at: Annotated[float, Field(ge=0, lt=1e11, allow_inf_nan=False)]  # seconds since the epoch
    world_size: Annotated[int, Field(strict=True, ge=1, le=1 << 24)]
    mesh: dict[str, Any] = {}  # the parallelism that it was saved under, for the reader's information
    checksum_algorithm: Literal["sha256", "blake2b", "crc32"] = "crc32"
    files: Many[FileEntry]
    tensors: dict[Name, TensorEntry] = {}  # `model/<parameter>`, `optimizer/<parameter>/<exp_avg | exp_avg_sq | step>`,
    # and `attached/<rank>`: bytes of a program's, behind their number (8 bytes, the least significant first)
    stateless: Many[Name] = ()  # trained parameters that had no optimizer state yet; every other one has it
    optimizer_groups: Many[OptimizerGroup] = ()  # none in what an older Muster wrote
    cursor: DataCursor = DataCursor(seed=0, epoch=0, sample=0)
    tokens: Count = 0  # trained so far
    state: dict[str, Any] = {}  # schedule, scaler, early stopping and the like, as in RunState; JSON only
    rng: Many[dict[str, Any]] = ()  # per rank, JSON only; used when the world size is the same
    config: dict[str, Any] = {}  # the resolved TrainingConfig
    architecture: dict[str, Any] = {}  # the decoder's shape, also where config.model says `from`
    tokenizer: dict[str, Any] = {}  # {"kind": "bytes"} or {"kind": "huggingface", "sha256": …, "json": …}
    metrics: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}  # loss, evaluation_loss …
    best: bool = False  # the best evaluation loss so far, when it was committed
    versions: dict[str, str] = {}

    @property
    def bytes(self) -> int:
        """Return the bytes of all its files, including those that earlier commits name too."""
        return sum(file.bytes for file in self.files)

    @property
    def added_bytes(self) -> int:
        """Return the bytes of the files that were written for this commit."""
        folder = attempt_prefix(self.step, self.attempt) + "/"
        return sum(file.bytes for file in self.files if file.key.startswith(folder))


# Fields that every checkpoint of Muster's trainer has. A program's has none of them, and a folder no tensors either.
OF_TRAINER: Final = frozenset({"tensors", "cursor", "config", "architecture"})
_OF_FOLDERS: Final = frozenset({"kind", "entry"})
_NOT_OF_PROGRAMS: Final = frozenset({"cursor", "config", "architecture", "tokenizer"})
_NOT_OF_FOLDERS: Final = _NOT_OF_PROGRAMS | {"tensors", "mesh", "stateless", "optimizer_groups", "rng"}


def sealed(commit: Commit) -> bytes:
    """The bytes of a COMMIT: one line of JSON with sorted keys, whose `seal` is the SHA-256 of the same without it."""
    left_out = _NOT_OF_FOLDERS if commit.kind == "folder" else _OF_FOLDERS | {"trainer"}
    if commit.kind == "tensors" and commit.trainer == "program":
        left_out = _OF_FOLDERS | _NOT_OF_PROGRAMS
    # None is kept: it may mean something in state and rng.
    document = commit.model_dump(mode="json", by_alias=True, exclude=set(left_out))
    return canonical({**document, "seal": seal_of(document)})


def seal_of(document: dict[str, Any]) -> str:
    """The seal of a COMMIT's document without one."""
    return hashlib.sha256(canonical(document)).hexdigest()


def canonical(document: dict[str, Any]) -> bytes:
    """The text that a seal is computed of."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
