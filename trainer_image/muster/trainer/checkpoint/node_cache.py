"""The newest commit's files of this node, kept on the node: a restart here reads nothing from afar that is still good.

A copy is believed only when its checksum is the COMMIT's, so a stale or broken one costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path

from muster.words.address import parse_address
from muster.words.checkpoint import FileEntry, is_frozen_key, step_name
from muster.words.names import Env

FREE_SHARE_MIN = 0.1  # of the disk: the cache is a convenience, a full disk is not


class NodeCache:
    """Copies of one job's files in a folder on a disk of this node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_into(self, entry: FileEntry, start: int, into: memoryview) -> bool:
        """Bytes [start, start + len(into)) of the copy of a file; False where there is none of the right size."""
        try:
            with open(self._folder / entry.key, "rb", buffering=0) as file:
                return os.fstat(file.fileno()).st_size == entry.bytes and os.preadv(
                    file.fileno(), [into], start
                ) == len(into)
        except OSError:
            return False

    def keep(self, key: str, data: memoryview) -> bool:
        """Copy a file that was just stored; False where the disk has no room or refuses. Never raises: it is a copy."""
        path = self._folder / key
        beside = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            room = shutil.disk_usage(path.parent)
            if room.free - len(data) < FREE_SHARE_MIN * room.total:
                return False
            with open(beside, "wb", buffering=0) as file:
                while len(data):
                    data = data[file.write(data) :]
            os.replace(beside, path)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            return False
        return True

    def drop_all_but(self, step: int, frozen_too: bool = False) -> None:
        """Remove the copies of other steps, because this one is committed now.

        `frozen_too` tells that the frozen weights were written with this step, so their older copies go as well; else
        they stay where they are.
        """
        for path in self._folder.glob("step-*/attempt-*/*"):
            key = path.relative_to(self._folder).as_posix()
            if path.parts[-3] != step_name(step) and (frozen_too or not is_frozen_key(key)):
                with contextlib.suppress(OSError):
                    path.unlink()
        for folder in (*self._folder.glob("step-*/attempt-*"), *self._folder.glob("step-*")):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def node_cache(uri: str, job_uid: str) -> NodeCache | None:
    """The cache for a job whose checkpoints are at `uri`, beside the node's prepared data.

    None where they are on a disk anyway, or the node keeps no prepared data.
    """
    cache = os.environ.get(Env.CACHE_DIR)
    return NodeCache(Path(cache) / "checkpoints" / job_uid) if cache and parse_address(uri).scheme == "s3" else None
