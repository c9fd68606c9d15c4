"""A checkpoint in the program's folder: its files as they are now, and whether they are all there and whole."""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# Formats that tell by themselves whether they are whole, and that hold nothing but tensors and their like.
CHECKPOINT_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".safetensors")
DCP_METADATA: Final = ".metadata"  # written last by torch.distributed.checkpoint
TRAINER_STATE: Final = "trainer_state.json"  # by Hugging Face's Trainer
FILES_MAX: Final = 100_000
_STEP_IN_NAME = re.compile(r"(?:^|[^a-z])(?:global_?step|step|iter|iteration|checkpoint|ckpt)[-_=]?0*(\d{1,17})(?!\d)")
_HEADER_BYTES_MAX: Final = 100_000_000


class UnfitFolder(Exception):
    """The folder can't be kept as it is. The message says why, and what to do."""


@dataclass(frozen=True, order=True)
class FileFacts:
    """One file of a checkpoint. As long as these stay the same, so does the file."""

    path: str  # relative to the checkpoint
    bytes: int
    changed_at: int  # in nanoseconds since the epoch
    number: int  # its inode


@dataclass(frozen=True)
class FileListing:
    """Files of a checkpoint. `entry` is its name in the watched folder; None: the files that lie there directly."""

    entry: str | None
    files: tuple[FileFacts, ...]
    changed_at: float  # seconds since the epoch: when a file or folder of it last changed

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def has(self, path: str) -> bool:
        return any(file.path == path for file in self.files)


def look_at(watched: Path, entry: str | None) -> FileListing | None:
    """List a checkpoint; None where there is none by that name any more. Raises UnfitFolder."""
    try:
        if entry is None:
            return _root_files(watched)
        root = watched / entry
        files, newest = [], root.lstat().st_mtime_ns
        for path, about in _walk(root, ""):
            newest = max(newest, about.st_mtime_ns)
            if stat.S_ISDIR(about.st_mode):
                continue
            if not stat.S_ISREG(about.st_mode):
                what = "a link" if stat.S_ISLNK(about.st_mode) else "no regular file"
                raise UnfitFolder(f"{root / path} is {what}; a checkpoint is made of files: write a copy instead")
            files.append(_facts(path, about))
            if len(files) > FILES_MAX:
                raise UnfitFolder(f"{root} has more than {FILES_MAX:,} files; pack them into fewer")
        return FileListing(entry, tuple(sorted(files)), newest / 1e9)
    except FileNotFoundError:
        return None


def entries_of(watched: Path) -> list[str]:
    """The names of the folders in the watched folder; those with a leading dot are somebody's own. Raises
    FileNotFoundError."""
    with os.scandir(watched) as entries:
        return sorted(one.name for one in entries if one.is_dir(follow_symlinks=False) and not one.name.startswith("."))


def is_checkpoint_file(name: str) -> bool:
    return name.endswith(CHECKPOINT_SUFFIXES) and not name.startswith(".")


def has_marker(watched: Path, listing: FileListing) -> bool:
    """Return whether a checkpoint shows by its files that the library that writes it was done with it.

    torch.distributed.checkpoint writes `.metadata` after all data, so that data that are newer belong to a save that
    is under way. Of files that lie in the watched folder directly, each must be whole by its own format.
    """
    if listing.entry is None:
        return bool(listing.files) and all(_is_whole(watched / file.path) for file in listing.files)
    times = {file.path: file.changed_at for file in listing.files}
    if DCP_METADATA in times:
        return all(at <= times[DCP_METADATA] for path, at in times.items() if path.endswith(".distcp"))
    return TRAINER_STATE in times


def step_of(watched: Path, listing: FileListing) -> int | None:
    """The step that a checkpoint says it is of: by Hugging Face's own record, else by its name; None where neither
    does."""
    if listing.entry is None:
        return None
    if listing.has(TRAINER_STATE):
        step = _trainer_state(watched / listing.entry / TRAINER_STATE).get("global_step")
        if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 10**18:
            return step
    if match := _STEP_IN_NAME.search(listing.entry.lower()):
        return int(match[1])
    return int(listing.entry) if re.fullmatch(r"\d{1,17}", listing.entry) else None


def metrics_of(watched: Path, listing: FileListing) -> dict[str, float]:
    """The newest evaluation of Hugging Face's own record, `evaluation_loss` and the like."""
    if listing.entry is None or not listing.has(TRAINER_STATE):
        return {}
    state = _trainer_state(watched / listing.entry / TRAINER_STATE)
    history = [line for line in state.get("log_history") or () if isinstance(line, dict)]
    newest = next((line for line in reversed(history) if "eval_loss" in line), {})
    numbers = {f"evaluation_{key.removeprefix('eval_')}": v for key, v in newest.items() if key.startswith("eval_")}
    return {name: float(v) for name, v in numbers.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _root_files(watched: Path) -> FileListing:
    with os.scandir(watched) as entries:
        files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
        facts = [_facts(one.name, one.stat(follow_symlinks=False)) for one in files if is_checkpoint_file(one.name)]
    return FileListing(None, tuple(sorted(facts)), max((file.changed_at for file in facts), default=0) / 1e9)


def _walk(root: Path, below: str) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(root / below) as entries:
        for entry in entries:
            path = f"{below}/{entry.name}" if below else entry.name
            about = entry.stat(follow_symlinks=False)
            yield path, about
            if stat.S_ISDIR(about.st_mode):
                yield from _walk(root, path)


def _facts(path: str, about: os.stat_result) -> FileFacts:
    return FileFacts(path, about.st_size, about.st_mtime_ns, about.st_ino)


def _trainer_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _is_whole(path: Path) -> bool:
    """Return whether a file in the format of torch.save (a zip archive, whose index is written last) or of safetensors
    has all its bytes."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
            if start[:4] == b"PK\x03\x04":
                with zipfile.ZipFile(file) as archive:
                    return bool(archive.infolist())
            size = int.from_bytes(start, "little")
            if len(start) < 8 or not path.name.endswith(".safetensors") or size > _HEADER_BYTES_MAX:
                return False
            header = json.loads(file.read(size))
            ends = [about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"]
            return os.fstat(file.fileno()).st_size == 8 + size + max(ends, default=0)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, zipfile.BadZipFile):
        return False
