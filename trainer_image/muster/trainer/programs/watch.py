"""The folder that a program writes its checkpoints to, and which of them are complete.

A checkpoint is a folder in the watched folder, or all files there that end in .pt, .pth, .ckpt or .safetensors; names
with a leading dot are none. It is complete when the program says so, by a rename into place or by `muster.run`; or when
the library that writes it leaves its mark and every rank of this worker has taken a later step since the last write.
Anything else stays unpublished: a folder that is written in place looks the same half way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from muster.trainer.programs import WorkerOrders, read_document
from muster.trainer.programs.listing import (
    CHECKPOINT_SUFFIXES,
    FileFacts,
    FileListing,
    UnfitFolder,
    entries_of,
    has_marker,
    is_checkpoint_file,
    look_at,
    step_of,
)
from muster.trainer.programs.renames import RenameWatch
from muster.words.names import PREPARED, PROGRESS, RANKS_ENDED, SAVE_REQUEST

# Of files that a checkpoint has: other folders (logs, a cache) are nobody's loss.
WEIGHTS_SUFFIXES = (*CHECKPOINT_SUFFIXES, ".bin", ".distcp", ".npz", ".msgpack", ".pkl")
IN_PLACE = (
    "it was written in place, and nothing in it says that it is whole; write it under another name and rename it, or "
    "use `with run.checkpoint(step) as folder` of muster.run"
)


@dataclass(frozen=True)
class RankProgress:
    """Steps of this worker's ranks. `everyone_since` is when the slowest rank finished its newest step; None while a
    rank has reported none, or there is no telling. `has_ended_well` says that all ranks ended with exit code 0."""

    step: int | None = None
    everyone_since: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    has_ended_well: bool = False

    def is_later(self, changed_at: float) -> bool:
        """Return whether every rank has finished a step since then, or all have ended well."""
        return self.has_ended_well or (self.everyone_since is not None and self.everyone_since > changed_at)


class FolderWatch:
    def __init__(self, around: WorkerOrders, refuse: Callable[[str | None, str], None]) -> None:
        """Begin to watch, before the program starts. `refuse` is called with a checkpoint that is complete and can't be
        published, and the reason."""
        self._around, self._refuse = around, refuse
        self._renamed: set[str] = set()  # names that came by a rename, and are not handled yet
        self._sound: set[FileFacts] = set()  # files in the watched folder itself that are complete
        self._handled: dict[str | None, FileListing] = {}  # as it was when it was copied, refused or passed over
        self._in_place: set[str] = set()  # folders that nothing says to be complete, and that was said
        self._has_folders = False
        self._renames: RenameWatch | None = None
        prepared = read_document(around.worker_dir / PREPARED) or {}
        if "entry" in prepared:  # what the program resumes from is published already
            self._has_folders = prepared["entry"] is not None
            with contextlib.suppress(UnfitFolder):
                if (listing := look_at(around.watched, prepared["entry"])) is not None:
                    self._handled[prepared["entry"]] = listing

    def follow(self) -> None:
        """Raises OSError where the kernel can't report renames into the folder."""
        self._renames = RenameWatch(self._around.watched)

    def wait(self, seconds: float) -> None:
        """Return after a rename, or after so many seconds."""
        if self._renames is None:
            return time.sleep(seconds)
        names = [name for name in self._renames.wait(seconds) if not name.startswith(".")]
        with contextlib.suppress(OSError):  # it is removed just now
            self._renames.follow()
        self._renamed |= {name for name in names if is_checkpoint_file(name) or (self._around.watched / name).is_dir()}

    def complete(self, progress: RankProgress) -> list[FileListing]:
        """Checkpoints that are complete and not handled, oldest first."""
        watched, requests = self._around.watched, self.requests()
        try:
            names: list[str | None] = [*entries_of(watched)]
        except FileNotFoundError:
            return []
        listings = []
        for name in [*names, None]:
            try:
                listing = look_at(watched, name)
            except UnfitFolder as unfit:
                if name in self._renamed or name in requests:
                    self._renamed.discard(name or "")
                    self._refuse(name, str(unfit))
                continue
            if listing is None or not listing.files or self._is_handled(listing):
                continue
            if self.is_complete(listing, progress):
                self._has_folders |= name is not None
                listings.append(listing)
            elif name is not None and name not in self._in_place and progress.is_later(listing.changed_at):
                self._in_place.add(name)
                if any(file.path.endswith(WEIGHTS_SUFFIXES) for file in listing.files):
                    self._refuse(name, IN_PLACE)
        if self._has_folders:  # beside folders, files are a model's, or a log's
            listings = [listing for listing in listings if listing.entry is not None]
        return sorted(listings, key=lambda listing: listing.changed_at)

    def is_complete(self, listing: FileListing, progress: RankProgress) -> bool:
        """The rule. Of a worker other than the first: of a checkpoint that worker 0 holds for complete."""
        later = progress.is_later(listing.changed_at)
        if listing.entry is not None:
            if listing.entry in self._renamed or listing.entry in self.requests():
                return True
            return later and (self._around.worker > 0 or has_marker(self._around.watched, listing))
        self._sound |= {file for file in listing.files if file.path in self._renamed}
        rest = tuple(file for file in listing.files if file not in self._sound)
        if rest and later and has_marker(self._around.watched, replace(listing, files=rest)):
            self._sound |= set(rest)
        return self._sound.issuperset(listing.files)

    def handle(self, listing: FileListing) -> None:
        """Take no notice of this checkpoint until it changes."""
        self._handled[listing.entry] = listing
        self._renamed -= {listing.entry} if listing.entry is not None else {file.path for file in listing.files}

    def _is_handled(self, listing: FileListing) -> bool:
        """Return whether nothing of a checkpoint is new since it was handled: a folder that lost files since then is
        being deleted."""
        handled = self._handled.get(listing.entry)
        if handled is None or listing.entry is None:
            return handled == listing
        return set(listing.files) <= set(handled.files)

    def superseded_by(self, listing: FileListing, step: int) -> str | None:
        """Return the name of a newer checkpoint that was written before this one last changed; None without one.

        Programs delete old checkpoints once they have a newer one. A folder that has lost some of its files looks as
        complete as before, and stays so if the program is killed over that. So call this after the copy: what is
        half deleted at the time of the listing has a newer one beside it by then.
        """
        if listing.entry is None:
            return None
        watched, requests = self._around.watched, self.requests()
        with contextlib.suppress(FileNotFoundError):
            for name in entries_of(watched):
                with contextlib.suppress(UnfitFolder):
                    other = look_at(watched, name) if name != listing.entry else None
                    if other is None or not other.files:
                        continue
                    of = requests[name]["step"] if name in requests else step_of(watched, other)
                    written_at = max(file.changed_at for file in other.files) / 1e9
                    if of is not None and of > step and written_at <= listing.changed_at:
                        return name
        return None

    def requests(self) -> dict[str, dict[str, Any]]:
        """The newest request of muster.run for each folder, by the folder's name."""
        newest: dict[str, dict[str, Any]] = {}
        for path in self._around.worker_dir.glob(SAVE_REQUEST.format(step="*")):
            request = read_document(path) or {}
            if isinstance(request.get("folder"), str) and isinstance(request.get("step"), int):
                name = Path(request["folder"]).name
                if request["step"] >= newest.get(name, {}).get("step", -1):
                    newest[name] = request
        return newest

    def progress(self) -> RankProgress:
        """Steps of this worker's ranks, by their own files."""
        documents = [read_document(path) for path in sorted(self._around.worker_dir.glob(PROGRESS.format(rank="*")))]
        reports = [report for report in documents if report is not None and isinstance(report.get("step"), int)]
        if not reports:
            return RankProgress(has_ended_well=self.has_ended_well())
        numbers = {**(reports[0].get("values") or {}), "loss": reports[0].get("loss")}
        tokens = reports[0].get("tokens")
        times = [at for report in reports if isinstance(at := report.get("progressedAt"), int | float)]
        everyone = len(reports) >= self._around.ranks and len(times) == len(reports)
        return RankProgress(
            step=min(int(report["step"]) for report in reports),
            everyone_since=min(times) if everyone else None,
            values={str(name): float(value) for name, value in numbers.items() if isinstance(value, int | float)},
            tokens=tokens if isinstance(tokens, int) and tokens >= 0 else 0,
            has_ended_well=self.has_ended_well(),
        )

    def ranks_ended(self) -> bool:
        return (self._around.worker_dir / RANKS_ENDED).exists()

    def has_ended_well(self) -> bool:
        """Return whether all ranks are known to have ended with exit code 0."""
        ranks = (read_document(self._around.worker_dir / RANKS_ENDED) or {}).get("ranks")
        if not isinstance(ranks, list) or not ranks:
            return False
        return all(isinstance(rank, dict) and rank.get("exitCode") == 0 for rank in ranks)
