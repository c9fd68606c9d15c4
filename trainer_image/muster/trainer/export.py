"""python -m muster.trainer.export --checkpoint FOLDER --to DIRECTORY [--step best|last|N] [--dtype bf16] [--json]

Writes the weights of a commit as `transformers` loads them: a whole model, for adapters are not trained yet. Streams:
a few parts of 16 MiB are in memory at a time, whatever the model's size; needs neither torch nor an accelerator. What
was written is read back and compared.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np

from muster.contract.checkpoint import Commit, Piece
from muster.trainer import hugging_face
from muster.trainer.arguments import Arguments
from muster.trainer.checkpoint.commits import commit_in
from muster.trainer.checkpoint.fetch import Part, Reader, Span
from muster.trainer.checkpoint.readers import reading
from muster.trainer.checkpoint.shard_file import ITEM_BYTES, Slot, lay_out
from muster.trainer.checkpoint.store import Store, open_store
from muster.trainer.errors import StorageError, UserError, exit_code

_MODEL = "model/"
_TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True)
class Run:
    """Bytes of a file of the commit that follow each other in the tensor too. at: the byte of the tensor."""

    start: int
    length: int
    at: int


@dataclass(frozen=True)
class Target:
    """Where a tensor goes: an open file, its slot in it, and whether fp32 becomes bf16 on the way."""

    file: int
    path: Path
    slot: Slot
    narrow: bool


def export(
    store: Store,
    step: int | Literal["best", "last"],
    directory: Path,
    dtype: Literal["keep", "bf16"] = "keep",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Write a model directory that must not exist yet; it appears whole or not at all. progress: (bytes read, of all).

    Raises UserError, CheckpointError (also where the commit's bytes do not verify) or StorageError.
    """
    if directory.exists():
        raise UserError(f"{directory} is there already; choose another directory, or remove it")
    commit = commit_in(store, step)
    unfinished = directory.with_name(f"{directory.name}.unfinished-{os.getpid()}")
    try:
        with _explained(unfinished), reading(store, commit.step):
            unfinished.mkdir(parents=True)
            report = _write_model(store, commit, unfinished, dtype, progress)
            _write_descriptions(commit, unfinished, report)
            os.rename(unfinished, directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return {"step": commit.step, "directory": str(directory), **report}


def _write_model(
    store: Store, commit: Commit, directory: Path, dtype: str, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    weights = {n.removeprefix(_MODEL): e for n, e in commit.tensors.items() if n.startswith(_MODEL)}
    theirs = hugging_face.names({n: e.dtype for n, e in weights.items()})
    kinds = {n: "BF16" if dtype == "bf16" and e.dtype == "F32" else e.dtype for n, e in weights.items()}
    sizes = {n: prod(e.shape) * ITEM_BYTES[kinds[n]] for n, e in weights.items()}
    groups = hugging_face.files(sizes)
    targets: dict[str, Target] = {}
    index: dict[str, str] = {}
    with contextlib.ExitStack() as open_files:
        for number, group in enumerate(groups):
            path = directory / hugging_face.file_name(number, len(groups))
            layout = lay_out((theirs[n], kinds[n], tuple(weights[n].shape)) for n in group)
            file = open_files.enter_context(path.open("w+b", buffering=0)).fileno()
            os.truncate(file, layout.size)
            os.pwrite(file, layout.header, 0)
            for n in group:
                targets[n] = Target(file, path, layout.slots[theirs[n]], kinds[n] != weights[n].dtype)
                index[theirs[n]] = path.name
        written = _stream(store, commit, targets, progress)
        for target in {target.file: target for target in targets.values()}.values():
            os.fsync(target.file)
        _compare(written)
    if len(groups) > 1:
        listing = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index}
        (directory / "model.safetensors.index.json").write_text(json.dumps(listing, indent=2, sort_keys=True))
    dominant = max(sizes, key=lambda n: sizes[n])
    return {
        "files": sorted({*index.values()}),
        "bytes": sum(sizes.values()),
        "tensors": len(sizes),
        "dtype": _TORCH_NAMES.get(kinds[dominant], kinds[dominant]),
    }


Written = tuple[Target, int, int, int]  # (where, byte of the file, length, CRC-32)


def _stream(
    store: Store, commit: Commit, targets: dict[str, Target], progress: Callable[[int, int], None]
) -> list[Written]:
    """Read each needed part once, verified, and put its bytes where they belong."""
    reader = Reader(store, commit)
    runs = _runs_by_file(commit, reader, targets)
    spans = [Span(file, run.start, run.start + run.length) for file, found in runs.items() for _, run in found]
    parts = reader.parts_of(spans)
    total, done = sum(reader.bounds(part)[1] for part in parts), 0

    def move(part: Part) -> tuple[int, list[Written]]:
        start, length = reader.bounds(part)
        data = memoryview(bytearray(length))
        reader.read(part, data)
        cut = ((target, _cut(run, start, start + length)) for target, run in runs[part.file])
        return length, [_put(target, run, data, start) for target, run in cut if run is not None]

    written: list[Written] = []
    with ThreadPoolExecutor(store.streams) as threads:
        # As many parts at a time as there are threads: the rest would only wait in memory.
        for begin in range(0, len(parts), store.streams):
            for length, put in threads.map(move, parts[begin : begin + store.streams]):
                written += put
                done += length
                progress(done, total)
    return written


def _runs_by_file(commit: Commit, reader: Reader, targets: dict[str, Target]) -> dict[int, list[tuple[Target, Run]]]:
    found: dict[int, list[tuple[Target, Run]]] = {}
    for name, target in targets.items():
        entry = commit.tensors[_MODEL + name]
        for piece in entry.pieces:
            start = piece.start
            if start is None:
                start = reader.starts(piece.file, [piece.name])[0][piece.name]
            runs = found.setdefault(piece.file, [])
            runs += [(target, run) for run in runs_of(piece, tuple(entry.shape), ITEM_BYTES[entry.dtype], start)]
    return found


def runs_of(piece: Piece, shape: tuple[int, ...], item_bytes: int, start: int) -> Iterator[Run]:
    """The pieces of a box that are contiguous both in its file (which begins at `start`) and in the whole tensor."""
    offset, extent = tuple(piece.offset), tuple(piece.extent)
    # Trailing dimensions that the box has whole are contiguous, and so are rows of the one before them.
    inner = len(shape)
    while inner > 0 and extent[inner - 1] == shape[inner - 1]:
        inner -= 1
    split = max(inner - 1, 0)
    length = prod(extent[split:]) * item_bytes
    strides = [prod(shape[d + 1 :]) * item_bytes for d in range(len(shape))]
    for number, outer in enumerate(itertools.product(*(range(e) for e in extent[:split]))):
        place = [o + i for o, i in zip(offset, outer, strict=False)] + list(offset[split:])
        if length:
            yield Run(start + number * length, length, sum(p * s for p, s in zip(place, strides, strict=True)))


def _cut(run: Run, start: int, end: int) -> Run | None:
    """The part of a run that lies in bytes [start, end) of its file."""
    first, last = max(run.start, start), min(run.start + run.length, end)
    return Run(first, last - first, run.at + first - run.start) if last > first else None


def _put(target: Target, run: Run, data: memoryview, base: int) -> Written:
    found: memoryview | bytes = data[run.start - base : run.start - base + run.length]
    at = run.at
    if target.narrow:
        found, at = to_bf16(found), at // 2
    position = target.slot.start + at
    view = memoryview(found)
    while len(view):
        count = os.pwrite(target.file, view, position)
        view, position = view[count:], position + count
    return target, target.slot.start + at, len(found), zlib.crc32(found)


def to_bf16(data: memoryview | bytes) -> bytes:
    """fp32 to bf16, rounded to nearest even; NaN stays NaN. Little-endian, as safetensors is."""
    bits = np.frombuffer(data, "<u4")
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype("<u2")
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, np.uint16(0x7FC0), rounded).astype("<u2").tobytes()


def _compare(written: list[Written]) -> None:
    """Read all back. Raises StorageError where the disk has something else than what was verified at the source."""
    for target, position, length, checksum in written:
        if zlib.crc32(os.pread(target.file, length, position)) != checksum:
            raise StorageError(
                f"{target.path}: bytes {position} to {position + length} read back differently; check the disk"
            )


def _write_descriptions(commit: Commit, directory: Path, report: dict[str, Any]) -> None:
    described = hugging_face.config(commit, report["dtype"])
    (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    if commit.tokenizer.get("kind") == "huggingface":
        (directory / "tokenizer.json").write_text(commit.tokenizer["json"])
    origin = {"job": commit.job, "jobUid": commit.job_uid, "step": commit.step, "metrics": commit.metrics}
    (directory / "muster.json").write_text(json.dumps({**origin, "tokenizer": commit.tokenizer.get("kind")}, indent=2))


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{path}: can't write the exported model: {error.strerror or error}") from error


def _checked(chosen: argparse.Namespace) -> tuple[Store, int | Literal["best", "last"]]:
    """Raises UserError for what argparse can't tell is wrong."""
    if chosen.format == "peft":
        raise UserError(
            "there is no adapter to export: this version trains whole models, so a commit holds every weight; "
            "leave --format out to get the whole model"
        )
    if chosen.format != "transformers":
        raise UserError(f"--format must be transformers, not {chosen.format!r}")
    if chosen.step not in ("best", "last") and not chosen.step.isdigit():
        raise UserError(f"--step must be best, last or a number, not {chosen.step!r}")
    return open_store(chosen.checkpoint), int(chosen.step) if chosen.step.isdigit() else chosen.step


def main(arguments: list[str]) -> int:
    parser = Arguments(prog="python -m muster.trainer.export", description=__doc__)
    parser.add_argument("--checkpoint", required=True, help="<checkpoint.uri>/<job uid>")
    parser.add_argument("--to", required=True, type=Path, help="directory to make")
    parser.add_argument("--step", default="best", help="best, last or a number (default: best)")
    parser.add_argument("--dtype", choices=("keep", "bf16"), default="keep")
    parser.add_argument("--format", default="transformers", help="transformers, a whole model (default)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")

    def show(done: int, total: int) -> None:
        if "--json" not in arguments and sys.stderr.isatty():
            print(f"\r{done / 1e6:,.0f} of {total / 1e6:,.0f} MB", end="\n" if done == total else "", file=sys.stderr)

    try:
        chosen = parser.parse_args(arguments)
        store, step = _checked(chosen)
        report = export(store, step, chosen.to, chosen.dtype, show)
    except Exception as error:
        code = exit_code(error)
        if code == 1:
            raise
        print(json.dumps({"error": str(error)}) if "--json" in arguments else f"error: {error}", file=sys.stderr)
        return code
    words = (
        f"step {report['step']} exported to {report['directory']}: {report['bytes'] / 1e6:,.1f} MB, {report['dtype']}"
    )
    print(json.dumps(report) if chosen.json else words)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
