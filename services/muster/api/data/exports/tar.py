"""A folder as a tar archive that nobody writes: any stretch of it can be read, and it is the same every time."""

from __future__ import annotations

import hashlib
import tarfile
from dataclasses import dataclass
from pathlib import Path

BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class _ArchivePiece:
    """A stretch of the archive, from `start` on: bytes that are known, or those of a file, and zeros up to `length`."""

    start: int
    length: int
    head: bytes
    file: Path | None = None


class TarArchive:
    """The files below `folder`, by name, under the name `root` in the archive. They do not change."""

    def __init__(self, folder: Path, root: str) -> None:
        self._pieces: list[_ArchivePiece] = []
        at, digest = 0, hashlib.sha256()
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            about = path.stat()
            info = tarfile.TarInfo(f"{root}/{path.relative_to(folder).as_posix()}")
            info.size, info.mode, info.mtime = about.st_size, 0o644, int(about.st_mtime)
            head = info.tobuf(tarfile.PAX_FORMAT)
            digest.update(head)
            self._pieces.append(_ArchivePiece(at, len(head), head))
            at += len(head)
            padded = -(-about.st_size // BLOCK) * BLOCK
            self._pieces.append(_ArchivePiece(at, padded, b"", path))
            at += padded
        self._pieces.append(_ArchivePiece(at, 2 * BLOCK, b""))
        self.bytes = at + 2 * BLOCK
        self.tag = digest.hexdigest()

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop). Raises OSError if a file is gone."""
        content = bytearray()
        for piece in self._pieces:
            first, last = max(start, piece.start), min(stop, piece.start + piece.length)
            if first < last:
                content += _of(piece, first - piece.start, last - piece.start)
        return bytes(content)


def _of(piece: _ArchivePiece, start: int, stop: int) -> bytes:
    if piece.file is None:
        content = piece.head[start:stop]
    else:
        with open(piece.file, "rb") as file:
            file.seek(start)
            content = file.read(stop - start)
    return content + bytes(stop - start - len(content))
