"""Traces that torch records of one rank's steps: the operators and kernels, and their use of memory."""

from __future__ import annotations

import gzip
import mmap
import shutil
from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from muster.storage.opening import open_store
from muster.storage.store import Store
from muster.trainer.errors import StorageError
from muster.trainer.train.records import say
from muster.words.base import dump_json
from muster.words.profiles import Profile, ProfileFile, RankProfile, rank_document

# Allocations and releases of CUDA's memory, the newest: some kilobytes each, so a few hundred megabytes at most.
MEMORY_EVENTS_MAX = 100_000
MEMORY_ROWS = 50  # of the table
TABLE_SECONDS_MAX = 60  # that torch may take to sum up its events


class StepTrace:
    """A recording that is under way. Its files go below `folder`, which is a new one."""

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        self._folder, self._rank, self._on_gpu = folder, rank, device.type == "cuda"
        self._step: record_function | None = None
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            record_shapes=True,
            profile_memory=True,
            post_processing_timeout_s=TABLE_SECONDS_MAX,
        )

    def start(self) -> None:
        self.remove()
        self._folder.mkdir(parents=True)
        self._profile.start()
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS_MAX)

    def at_boundary(self, step: int) -> None:
        """Begin the record of `step`, under the name that torch's own tools look for."""
        self._end_step()
        self._step = record_function(f"ProfilerStep#{step}")
        self._step.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> list[Path]:
        """End the recording. Returns the files that it left so far; the table of the memory is made by `table`."""
        try:
            self._end_step()
            self._profile.stop()
            files = [self._folder / f"rank-{self._rank}.trace.json"]
            self._profile.export_chrome_trace(str(files[0]))
            if self._on_gpu:
                files.append(self._folder / f"rank-{self._rank}.memory.pickle")  # for pytorch.org/memory_viz
                torch.cuda.memory._dump_snapshot(str(files[1]))  # type: ignore[no-untyped-call]
            return files
        finally:
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)

    def table(self) -> Path | None:
        """Write the memory that each operator allocated as a text table, and return its path; None on a GPU, whose
        snapshot says more."""
        if self._on_gpu:
            return None
        path = self._folder / f"rank-{self._rank}.memory.txt"
        path.write_text(self._profile.key_averages().table(sort_by="self_cpu_memory_usage", row_limit=MEMORY_ROWS))
        return path

    def remove(self) -> None:
        """Remove its files from here."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)


def keep_begun(folder: str, begun: Profile) -> None:
    """Write into the job's folder what is traced."""
    try:
        open_store(folder).replace(begun.key("profile.json"), dump_json(begun).encode())
    except StorageError as error:
        say(f"profile: warning: {error}")


def keep_trace(folder: str, of: Profile, done: RankProfile, files: tuple[Path, ...], trace: StepTrace | None) -> None:
    """Write a rank's files into the job's folder, and last the document that names them; then they go here."""
    kept, fault = [], done.fault
    try:
        store = open_store(folder)
        try:
            table = trace.table() if trace is not None and files else None
            for path in (*files, *([table] if table is not None else [])):
                path = _compressed(path) if path.suffix == ".json" else path
                _store(store, of.key(path.name), path)
                kept.append(ProfileFile(name=path.name, bytes=path.stat().st_size))
        except Exception as error:
            fault = fault or f"{type(error).__name__}: {error}"[:500]
        said = done.model_copy(update={"files": tuple(kept), "fault": fault})
        store.replace(of.key(rank_document(done.rank)), dump_json(said).encode())
        how = f"could not be kept whole: {fault}" if fault else f"is under {folder}/{of.key('')[:-1]}"
        say(f"profile: the trace of rank {done.rank} {how}")
    except StorageError as error:
        say(f"profile: warning: the trace of rank {done.rank} could not be kept: {error}")
    finally:
        if trace is not None:
            trace.remove()


def _compressed(path: Path) -> Path:
    target = path.with_name(f"{path.name}.gz")
    with path.open("rb") as source, gzip.open(target, "wb", compresslevel=5) as made:
        shutil.copyfileobj(source, made, 1 << 20)
    path.unlink()
    return target


def _store(store: Store, key: str, path: Path) -> None:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        try:
            store.write(key, view)
        finally:
            view.release()
