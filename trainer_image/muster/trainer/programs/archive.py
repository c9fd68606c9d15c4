"""Unpacking of a program's source. The archive is a user's: nothing of it may land outside the folder, by an absolute
path, a path upwards or a link, and nothing but files, folders and links within the folder is made."""

from __future__ import annotations

import os
import posixpath
import tarfile
from pathlib import Path
from typing import Final

from muster.trainer.errors import UserError

# As the client packs at most (client/source_folder.py), with room for what others pack.
UNPACKED_BYTES_MAX: Final = 4 << 30
ENTRIES_MAX: Final = 100_000


def unpack(archive: Path, folder: Path, where: str) -> None:
    """Unpack a .tar.gz into a folder that does not exist yet. `where` names the archive. Raises UserError."""
    try:
        with tarfile.open(archive, "r:gz") as opened:
            members = _checked(opened, where)
            folder.mkdir(parents=True)
            if hasattr(tarfile, "data_filter"):
                opened.extractall(folder, members, filter="data")
            else:  # Python before 3.11.4, such as Debian 12's
                opened.extractall(folder, [_plain(member) for member in members])  # noqa: S202 - checked above
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{where}: can't be unpacked ({error}); pack the source again as .tar.gz") from None


def _checked(opened: tarfile.TarFile, where: str) -> list[tarfile.TarInfo]:
    members: list[tarfile.TarInfo] = []
    size, links = 0, set[str]()
    for member in opened:
        name = posixpath.normpath(member.name)
        if member.name.startswith("/") or name == ".." or name.startswith("../"):
            raise UserError(f"{where}: {member.name[:200]!r} leads out of the folder; pack the source again")
        if not (member.isreg() or member.isdir() or member.issym()):
            raise UserError(f"{where}: {name[:200]!r} is no file, folder or symbolic link; leave it out of the source")
        if any(above in links for above in _above(name)):
            raise UserError(f"{where}: {name[:200]!r} lies behind a link; pack the source again")
        if member.issym():
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))
            if member.linkname.startswith("/") or target == ".." or target.startswith("../"):
                raise UserError(
                    f"{where}: the link {name[:200]!r} leads out of the folder, to {member.linkname[:200]!r}; put what "
                    "it leads to into the source"
                )
            links.add(name)
        size += member.size
        members.append(member)
        if size > UNPACKED_BYTES_MAX or len(members) > ENTRIES_MAX:
            raise UserError(
                f"{where}: has more than {UNPACKED_BYTES_MAX >> 30} GiB or {ENTRIES_MAX:,} files unpacked; put data "
                "into a store and libraries into the image"
            )
    return members


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return the member with what the filter `data` would leave of it: nobody's but ours, without special bits."""
    executable = member.isdir() or bool(member.mode & 0o100)
    member.mode = 0o755 if executable else 0o644
    member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    return member


def _above(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
