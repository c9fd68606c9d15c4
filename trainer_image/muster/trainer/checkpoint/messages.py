"""Messages between the processes of a save.

    rank                                        its upload process
      ── UploadInit, NewMemory, NewLayout, ──►
         NewFrozen, FrozenNamed, SaveOrder,
         EndOrder
      ◄── UploadReady, SaveProgress, SaveResult ──

    upload process of a rank                    coordinator, in the upload process of rank 0
      ── PeerHello, PriorityRequest, ──►
         StepsLeft, ShareReport
      ◄── GoAhead, StepChosen, SaveResult ──

A rank reaches its upload process over a pair of sockets, an upload process the coordinator over TCP. A `SaveOrder` also
lies behind a snapshot in shared memory, for the upload process of a rank that died.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, TypeAdapter

from muster.trainer.checkpoint.channel import MessageChannel
from muster.trainer.checkpoint.entries import Entries
from muster.words.checkpoint import FileEntry
from muster.words.job import Keep

# Of each tensor by its name: dtype, global shape, offset, extent, and the byte of the file at which it starts.
TensorSlices = dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class UploadInit:
    """Facts for an upload process about its rank. Rank 0's comes with the socket on which the coordinator listens."""

    kind: Literal["init"] = "init"
    uri: str  # of the job's folder
    rank: int
    world_size: int
    job_uid: str
    attempt: int
    worker: int
    incarnation: int
    fence: str | None  # where the current attempt is written; None checks nothing
    token: str  # that the coordinator asks for
    host: str  # of the coordinator
    port: int
    keep: Keep
    identity: dict[str, Any]  # the fields of the COMMIT that stay the same; rank 0 has them
    entries: Entries | None


@dataclass(frozen=True, kw_only=True)
class NewMemory:
    """Shared memory for copies, whose descriptor comes with the message."""

    kind: Literal["memory"] = "memory"
    slot: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class NewLayout:
    """Layout of the files that orders name by its number."""

    kind: Literal["layout"] = "layout"
    number: int
    bytes: int
    slices: TensorSlices
    stateless: list[str]  # trained parameters that have no optimizer state yet
    groups: list[list[str]]  # the parameters of each of the optimizer's groups; rank 0 has them


@dataclass(frozen=True, kw_only=True)
class NewFrozen:
    """Copy of the rank's frozen weights, in memory whose descriptor comes with the message, for the next save to
    write."""

    kind: Literal["frozen"] = "frozen"
    memory: int  # bytes of the memory
    bytes: int  # of the file in it
    slices: TensorSlices


@dataclass(frozen=True, kw_only=True)
class FrozenNamed:
    """The commit of `step` names the frozen weights."""

    kind: Literal["frozen-named"] = "frozen-named"
    step: int


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """Order to store a copy of the rank's share, and on rank 0 to publish the commit."""

    kind: Literal["save"] = "save"
    seq: int  # counts the saves and snapshots of an attempt
    step: int
    deadline_seconds: float
    at: float = 0.0  # when it was given, by the machine's monotonic clock
    layout: int = 0
    slot: int = -1  # of the memory that holds the copy
    rng: dict[str, Any] = field(default_factory=dict)
    first: tuple[int, ...] = ()  # ranks whose nodes are about to go: the others let them write first
    first_seconds: float = 0.0  # for at most so long
    records: tuple[str, ...] = ()  # lines of the step log that may not be written yet; rank 0 has them
    commit: dict[str, Any] = field(default_factory=dict)  # the fields of the COMMIT that change; rank 0 has them
    settings: list[dict[str, Any]] = field(default_factory=list)  # of the optimizer's groups; rank 0 has them
    again: bool = False  # an earlier process may have stored and even published it
    failed: str | None = None  # why there is no copy: nothing is stored, and rank 0 hears why


@dataclass(frozen=True, kw_only=True)
class EndOrder:
    """The rank ends, and needs nothing of what lies in its memory."""

    kind: Literal["end"] = "end"


@dataclass(frozen=True, kw_only=True)
class UploadReady:
    """The upload process can save. `refused` says why the store will take no save, where it has said so."""

    kind: Literal["ready"] = "ready"
    refused: str | None


@dataclass(frozen=True, kw_only=True)
class SaveProgress:
    """The store has taken `sent` more bytes of a save."""

    kind: Literal["progress"] = "progress"
    seq: int
    sent: int


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """Result of a save."""

    kind: Literal["result"] = "result"
    seq: int
    step: int
    committed: bool = False
    error: str | None = None  # why there is no commit
    stale: bool = False  # another attempt is the current one
    refused: bool = False  # the store will take no save before a person changes something
    frozen_missing: bool = False  # every rank must write its frozen weights again
    bytes: int = 0  # written by this rank
    seconds: float = 0.0  # that the upload process took


@dataclass(frozen=True, kw_only=True)
class PeerHello:
    """First message of an upload process to the coordinator."""

    kind: Literal["hello"] = "hello"
    token: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class PriorityRequest:
    """Request to hear when the ranks in `first` have reported, in at most so many seconds."""

    kind: Literal["priority"] = "priority"
    seq: int
    first: tuple[int, ...]
    first_seconds: float


@dataclass(frozen=True, kw_only=True)
class GoAhead:
    """Answer to a PriorityRequest."""

    kind: Literal["go-ahead"] = "go-ahead"
    seq: int


StepTimes = dict[int, tuple[int, float]]  # by step: the number and the time of the order for it


@dataclass(frozen=True, kw_only=True)
class StepsLeft:
    """The rank is dead, and its memory holds whole copies of these steps."""

    kind: Literal["steps-left"] = "steps-left"
    left: StepTimes


@dataclass(frozen=True, kw_only=True)
class StepChosen:
    """Answer to StepsLeft: the step that all save; None where none can be saved, or none is worth it."""

    kind: Literal["step-chosen"] = "step-chosen"
    step: int | None


@dataclass(frozen=True, kw_only=True)
class ShareReport:
    """Report of a rank on its share of a save: what it wrote, or the error."""

    kind: Literal["report"] = "report"
    seq: int
    step: int
    again: bool = False  # it may have been reported before
    error: str | None = None
    refused: bool = False  # the store will never take it
    file: FileEntry | None = None
    slices: TensorSlices = field(default_factory=dict)
    stateless: list[str] = field(default_factory=list)
    groups: list[list[str]] = field(default_factory=list)
    rng: dict[str, Any] = field(default_factory=dict)
    frozen_file: FileEntry | None = None  # of frozen weights that no COMMIT names yet
    frozen_slices: TensorSlices = field(default_factory=dict)
    frozen_named: bool = False  # a COMMIT names this rank's frozen weights


SaveMessage = (
    UploadInit
    | NewMemory
    | NewLayout
    | NewFrozen
    | FrozenNamed
    | SaveOrder
    | EndOrder
    | UploadReady
    | SaveProgress
    | SaveResult
    | PeerHello
    | PriorityRequest
    | GoAhead
    | StepsLeft
    | StepChosen
    | ShareReport
)
_MESSAGES: Final[TypeAdapter[SaveMessage]] = TypeAdapter(Annotated[SaveMessage, Field(discriminator="kind")])


def encode(message: SaveMessage) -> bytes:
    """The message as JSON. Raises TypeError or ValueError where it holds what JSON can't."""
    return json.dumps(_plain(message), default=_plain, allow_nan=False, separators=(",", ":")).encode()


def decode(body: bytes) -> SaveMessage:
    """The message that `encode` wrote. Raises ValueError."""
    return _MESSAGES.validate_json(body)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not of JSON's types")


class SaveChannel:
    """Channel for the messages of a save. A message that is none of them raises ValueError."""

    def __init__(self, connection: socket.socket) -> None:
        self._channel = MessageChannel(connection)

    def send(self, message: SaveMessage, descriptor: int | None = None) -> None:
        """Raises ChannelClosed."""
        self._channel.send_bytes(encode(message), descriptor)

    def receive(self, timeout_seconds: float | None = None) -> SaveMessage | None:
        """The next message; None when none came in time. Raises ChannelClosed."""
        body = self._channel.receive_bytes(timeout_seconds)
        return None if body is None else decode(body)

    def take_descriptor(self) -> int:
        """The oldest descriptor that came and was not taken; one sent with a message is here when the message is."""
        return self._channel.take_descriptor()

    def close(self) -> None:
        self._channel.close()
