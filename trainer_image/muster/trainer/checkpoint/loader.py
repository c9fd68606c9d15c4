"""Loading: read the commit, compare, fetch and verify every byte that is needed, agree, and only then touch the
model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from muster.storage.commits import refuse_folder
from muster.storage.errors import StoreError
from muster.storage.listing import steps_in
from muster.storage.opening import open_store
from muster.storage.readers import reading
from muster.storage.store import Store
from muster.trainer.checkpoint.chunks import TensorChunk
from muster.trainer.checkpoint.commits import parse, read_and_parse
from muster.trainer.checkpoint.control_group import ControlGroup
from muster.trainer.checkpoint.failures import (
    CheckpointError,
    CheckpointMismatch,
    DamagedCommit,
    GoneCommit,
    UnknownFormat,
    UnusableCommit,
)
from muster.trainer.checkpoint.fetch import CommitReader, FileSpan, read_all
from muster.trainer.checkpoint.fit import ExpectedTensor, differences
from muster.trainer.checkpoint.node_cache import node_cache
from muster.trainer.checkpoint.node_memory import NodeMemory, SharedBuffer, share
from muster.trainer.checkpoint.optimizer_state import (
    adopt_settings,
    adopt_state,
    expect_whole_state,
    settings_to_adopt,
    state_to_fill,
    wanted_state,
)
from muster.trainer.checkpoint.quarantine import first_good, put_back_newest
from muster.trainer.checkpoint.tensors import ATTACHED_BYTES, DTYPES, LocalChunk, attached_name, localize, model_tensors
from muster.words.checkpoint import Commit, Slice

Trained = tuple[nn.Module, torch.optim.Optimizer]
Starts = dict[tuple[int, str], int]  # (file, name): the byte at which a slice begins


@dataclass(frozen=True)
class NeededSlice:
    """Part of one slice that this rank needs."""

    target: LocalChunk
    slice: Slice
    chunk: TensorChunk  # the slice's own
    shared: TensorChunk  # the part of it that lies in `target`


def load(folder: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Commit:
    """Load exactly this commit into a live model, and optimizer unless None (then weights only). Collective.

    Any sharding loads into any other. Raises CheckpointError (DamagedCommit where bytes do not verify) and
    CheckpointMismatch (another model) on every rank, with the model and the optimizer as they were.
    """
    with contextlib.closing(ControlGroup()) as group, contextlib.closing(SharedBuffer()) as buffer:
        trained = None if optimizer is None else (model, optimizer)
        return _load(open_store(folder, links=False), step, dict(model_tensors(model)), trained, group, buffer)


def load_attached(folder: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Commit, bytes]:
    """Load a program's commit as `load` does, from a folder that nobody else changes, and return the bytes that this
    rank attached to it; rank 0's, where it was made by another number of ranks. Collective."""
    with contextlib.closing(ControlGroup()) as group, contextlib.closing(SharedBuffer()) as buffer:
        attached: dict[str, torch.Tensor] = {}
        store = open_store(folder, links=False)
        weights = dict(model_tensors(model))
        commit = _load(store, step, weights, (model, optimizer), group, buffer, attached=attached)
        framed = b"".join(bytes(tensor.numpy()) for tensor in attached.values())
        start = ATTACHED_BYTES.size
        return commit, framed[start : start + ATTACHED_BYTES.unpack_from(framed)[0]] if framed else b""


def load_weights(
    folder: str, step: int, weights: Mapping[str, torch.Tensor], without: frozenset[str] = frozenset()
) -> Commit:
    """Load all weights of exactly this commit but those named `without`, and nothing else, into live tensors by name
    (`model/…`). Collective. Raises as `load` does."""
    with contextlib.closing(ControlGroup()) as group, contextlib.closing(SharedBuffer()) as buffer:
        return _load(open_store(folder, links=False), step, weights, None, group, buffer, without=without)


def resume(
    folder: str,
    at_most: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    report: Callable[[str], None],
) -> Commit:
    """Load the newest commit that verifies, of those up to step `at_most`. Collective.

    A commit that was set aside earlier, and verifies now, is put back first, and tried also where it is newer: when
    `at_most` was chosen nobody could see it. A commit that does not verify is set aside (quarantine/), one that
    somebody has just removed, that the store does not give, that a newer Muster wrote or that is of another model
    is passed over, and the one before it is tried; `report` is told each time, on rank 0. Raises what
    `load` raises, and CheckpointError where no commit is left.
    """
    store = open_store(folder)
    weights, trained = dict(model_tensors(model)), None if optimizer is None else (model, optimizer)
    with contextlib.closing(ControlGroup()) as group, contextlib.closing(SharedBuffer()) as buffer:
        return first_good(
            store,
            _candidates(store, at_most, group, report),
            at_most,
            lambda step: _load(store, step, weights, trained, group, buffer, own=True),
            report if group.speaks else None,
        )


def _load(
    store: Store,
    step: int,
    weights: Mapping[str, torch.Tensor],
    trained: Trained | None,
    group: ControlGroup,
    buffer: SharedBuffer,
    own: bool = False,
    without: frozenset[str] = frozenset(),
    attached: dict[str, torch.Tensor] | None = None,
) -> Commit:
    """`attached` is filled with the bytes that a program's rank attached; such a folder is read without a mark."""
    commit = _agreed_commit(store, step, group, own)
    _compare(commit, weights, trained, without, f"{store.uri} step {step}")
    with _all_or_none(group):
        if trained is not None:
            expect_whole_state(commit, *trained, f"{store.uri} step {step}")
    settings = settings_to_adopt(commit, *trained, f"{store.uri} step {step}") if trained is not None else []
    state = state_to_fill(commit, *trained) if trained is not None else {}
    if attached is not None:
        name = attached_name(group.rank if commit.world_size == group.world_size else 0)
        if name in commit.tensors:
            attached[name] = torch.empty(tuple(commit.tensors[name].shape), dtype=torch.uint8)
        weights = {**weights, **attached}
    live = [*weights.items(), *(named for tensors in state.values() for named in tensors.items())]
    targets = [localize(name, tensor, group.world_size) for name, tensor in live if tensor.numel()]
    needed = [NeededSlice(target, *shared) for target in targets for shared in _overlaps(commit, target)]
    memory, starts = _fetched(store, commit, needed, group, buffer, marked=attached is None)
    with torch.no_grad():
        for one in needed:
            _fill(one, memory, starts)
    if trained is not None:
        adopt_state(trained[1], state)
        adopt_settings(trained[1], settings)
    return commit


def _fetched(
    store: Store, commit: Commit, needed: Sequence[NeededSlice], group: ControlGroup, buffer: SharedBuffer, marked: bool
) -> tuple[NodeMemory, Starts]:
    """All bytes that this rank needs, verified; returns only when every rank has its own."""
    reader = CommitReader(store, commit, node_cache(store.uri, commit.job_uid))
    with _as_reader(store, commit.step, group) if marked else contextlib.nullcontext():
        with _all_or_none(group):
            # The headers of the files that this rank needs are read too, to be compared with the COMMIT.
            headers = [reader.header_span(file) for file in sorted({one.slice.file for one in needed})]
            starts = _starts(reader, needed, headers)
            needed_parts = reader.parts_of([*(_span(one, starts) for one in needed), *headers])
        memory = share(group, commit, needed_parts, buffer)
        with _all_or_none(group):
            read_all(reader, memory.jobs(reader), store.streams)
        with _all_or_none(group):
            for header in headers:
                reader.starts(header.file, memory.bytes_of(header.file, header.start, header.end))
    return memory, starts


def _candidates(store: Store, at_most: int, group: ControlGroup, report: Callable[[str], None]) -> list[int]:
    """Steps to try, newest first, as rank 0 sees them."""
    steps: list[int] = []
    with _all_or_none(group):
        if group.speaks:
            back = put_back_newest(store, report)
            steps = [step for step in reversed(steps_in(store)) if step <= at_most or step in back]
    newest: list[int] = group.gather(steps)[0]
    return newest


@contextlib.contextmanager
def _as_reader(store: Store, step: int, group: ControlGroup) -> Iterator[None]:
    """Have retention spare the commit meanwhile."""
    with reading(store, step) if group.speaks else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _all_or_none(group: ControlGroup) -> Iterator[None]:
    """Collective. What fails on one rank fails on all, with the same kind of error and the failing rank's words."""
    failure: list[str] | None = None
    kinds = {kind.__name__: kind for kind in (DamagedCommit, GoneCommit, UnknownFormat, UnusableCommit)}
    try:
        yield
    except (CheckpointError, StoreError) as error:
        failure = [type(error).__name__, str(error)]
    for rank, (kind, words) in ((r, f) for r, f in enumerate(group.gather(failure)) if f is not None):
        where = f"rank {rank}: " if group.world_size > 1 else ""
        raise kinds.get(kind, CheckpointError)(where + words)


def _agreed_commit(store: Store, step: int, group: ControlGroup, own: bool) -> Commit:
    """Rank 0 reads the COMMIT, so that all load the same one."""
    data = b""
    with _all_or_none(group):
        if group.speaks:
            _, data = read_and_parse(store, step, own)
    commit = parse(group.gather(data)[0], store, step, own)
    refuse_folder(commit, store.uri)
    return commit


def _compare(
    commit: Commit, weights: Mapping[str, torch.Tensor], trained: Trained | None, without: frozenset[str], where: str
) -> None:
    expected = {
        name: ExpectedTensor(DTYPES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in weights.items()
        if tensor.numel()
    }
    there = {name: entry for name, entry in commit.tensors.items() if name.startswith("model/") and name not in without}
    if trained is not None:
        there |= {name: entry for name, entry in commit.tensors.items() if name.startswith("optimizer/")}
        expected |= wanted_state(commit, *trained)
    if problems := differences(expected, there):
        raise CheckpointMismatch(where, problems)


def _overlaps(commit: Commit, target: LocalChunk) -> Iterator[tuple[Slice, TensorChunk, TensorChunk]]:
    """(slice, its chunk, the part of it that lies on this rank)."""
    for slice_ in commit.tensors[target.name].slices:
        chunk = TensorChunk(slice_.offset, slice_.extent)
        if target.data.numel() and (shared := chunk.meets(target.chunk)) is not None:
            yield slice_, chunk, shared


def _starts(reader: CommitReader, needed: Iterable[NeededSlice], headers: Iterable[FileSpan]) -> Starts:
    """Return the byte at which each needed slice begins. Where the COMMIT does not say, it is read from the file's
    header."""
    spans = {header.file: header for header in headers}
    asked: dict[int, dict[str, int]] = {}
    starts: Starts = {}
    for one in needed:
        file, name, start = one.slice.file, one.slice.name, one.slice.start
        if start is None and file not in asked:
            asked[file] = reader.read_starts(spans[file])
        starts[file, name] = asked[file][name] if start is None else start
    return starts


def _span(one: NeededSlice, starts: Starts) -> FileSpan:
    """The bytes of the rows that this rank needs."""
    chunk, shared = one.chunk, one.shared
    rows = chunk.extent[0] if chunk.extent else 1
    row_bytes = chunk.elements // rows * one.target.data.element_size()
    first = shared.offset[0] - chunk.offset[0] if chunk.offset else 0
    count = shared.extent[0] if shared.extent else 1
    start = starts[one.slice.file, one.slice.name] + first * row_bytes
    return FileSpan(one.slice.file, start, start + count * row_bytes)


def _fill(one: NeededSlice, memory: NodeMemory, starts: Starts) -> None:
    data, chunk = one.target.data, one.chunk
    item, start = data.element_size(), starts[one.slice.file, one.slice.name]
    raw = torch.frombuffer(memory.bytes_of(one.slice.file, start, start + chunk.elements * item), dtype=torch.uint8)
    if raw.data_ptr() % item:  # another program's file may not be aligned
        raw = raw.clone()
    source = raw.view(data.dtype).view(chunk.extent)
    data[one.shared.within(one.target.chunk)].copy_(source[one.shared.within(chunk)])
