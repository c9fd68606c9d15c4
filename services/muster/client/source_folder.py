"""A program's source folder as one archive. The same content gives the same bytes, so that it is uploaded once.

The folder is listed, packed, and listed again: an archive is kept only if nothing changed meanwhile, for else it would
hold a state that the folder never had. Left out are what `.gitignore` names, as git reads it, and what is of no use on
another machine: `.git`, `__pycache__` and virtual environments.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import os
import stat
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from muster.client.errors import InvalidRequest
from muster.words.text import plural, size

if TYPE_CHECKING:
    import pathspec

PURPOSE: Final = "source"  # of the uploaded file, as the API knows it
# Each worker fetches and unpacks the folder before its program starts. Code has some megabytes; what is larger is data
# or an environment, which belong into a store and an image.
BYTES_MAX: Final = 512 << 20
ENTRIES_MAX: Final = 50_000
LARGEST_NAMED: Final = 5
TRIES: Final = 3
_COMPRESSION: Final = 6
_SECRETS: Final = (
    ".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519",
    "credentials", "credentials.json", "credentials.yaml", "credentials.yml", "service-account*.json", ".netrc",
    ".pypirc", ".npmrc", ".git-credentials", ".htpasswd", "kubeconfig", "*.kubeconfig",
)  # fmt: skip
_EXAMPLES: Final = (".env.example", ".env.sample", ".env.template", ".env.dist")


@dataclass(frozen=True)
class SourceArchive:
    """An archive at `path`, under the `name` that it is uploaded by. `secrets` are the entries whose names are those of
    secrets, and `left_out` those that are of no use elsewhere."""

    path: Path
    name: str
    sha256: str
    files: int
    secrets: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _FolderEntry:
    """A folder, file or link, as it was when the folder was listed. `link` is its target, and None for what is none."""

    path: str
    mode: int
    size: int
    changed_at: int
    inode: int
    link: str | None


@dataclass
class _FolderListing:
    entries: list[_FolderEntry] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    ignored: list[_IgnoreFile] = field(default_factory=list)


@dataclass(frozen=True)
class _IgnoreFile:
    """A `.gitignore`, whose patterns are relative to its own folder: that is `below`, a folder in the source, or one
    above the source, in which the source is `above`."""

    below: str
    above: str
    patterns: pathspec.GitIgnoreSpec

    def verdict(self, path: str) -> bool | None:
        """Return whether it leaves the path out; None if it says nothing of it."""
        if self.below and not path.startswith(f"{self.below}/"):
            return None
        inner = self.above + (path[len(self.below) + 1 :] if self.below else path)
        return self.patterns.check_file(inner).include


class _FolderChanged(Exception):
    """The folder is another one than when it was listed."""


def pack(folder: Path, into: Path) -> SourceArchive:
    """Pack the folder as a tar.gz in the folder `into`.

    Raises InvalidRequest for what is no folder, is too large, holds something else than files, folders and links within
    it, or does not stay as it is for long enough.
    """
    if not folder.is_dir():
        raise _refused(f"{folder} {'is a file' if folder.exists() else 'is not there'}", "name the program's folder")
    last = ""
    try:
        for _ in range(TRIES):
            try:
                return _packed(folder, into)
            except _FolderChanged as changed:
                last = str(changed)
            except FileNotFoundError as gone:  # since its folder was listed
                last = str(gone.filename)
    except OSError as error:
        what = f"{error.filename or folder} can't be packed: {(error.strerror or str(error)).lower()}"
        raise _refused(what, "make it readable, or name it in .gitignore") from None
    what = f"{folder} does not stay as it is while it is packed: {last} changed ({TRIES} tries)"
    raise _refused(what, "submit again when nobody writes to it, or name what is written in .gitignore")


def _packed(folder: Path, into: Path) -> SourceArchive:
    listing = _listed(folder)
    _refuse_large(folder, listing.entries)
    if not any(entry.link is None and stat.S_ISREG(entry.mode) for entry in listing.entries):
        raise _refused(f"{folder} has no file that is not ignored", "name the program's folder")
    path = into / "source.tar.gz"
    # Neither a time nor an owner is in it: only names, contents, links and whether a file is executable.
    with (
        path.open("wb") as raw,
        gzip.GzipFile("", "wb", _COMPRESSION, raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
    ):
        for entry in listing.entries:
            _add(archive, folder, entry)
    _compare(listing.entries, _listed(folder).entries)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    stem = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in folder.resolve().name)
    return SourceArchive(
        path=path,
        name=f"{stem[:60] or 'source'}-{digest[:16]}.tar.gz",
        sha256=digest,
        files=sum(not stat.S_ISDIR(entry.mode) for entry in listing.entries),
        secrets=tuple(entry.path for entry in listing.entries if _names_a_secret(entry)),
        left_out=tuple(listing.left_out),
    )


def _add(archive: tarfile.TarFile, folder: Path, entry: _FolderEntry) -> None:
    member = tarfile.TarInfo(entry.path)
    if entry.link is not None:
        member.type, member.linkname, member.mode = tarfile.SYMTYPE, entry.link, 0o777
        archive.addfile(member)
    elif stat.S_ISDIR(entry.mode):
        member.type, member.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(member)
    else:
        member.size, member.mode = entry.size, 0o755 if entry.mode & stat.S_IXUSR else 0o644
        try:
            # Not through a link, and not waiting for a FIFO's writer, that took its place since it was listed.
            opened = os.open(folder / entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if isinstance(error, PermissionError):
                raise
            raise _FolderChanged(entry.path) from None
        with os.fdopen(opened, "rb") as file:
            if _stamp(os.fstat(opened)) != (entry.mode, entry.size, entry.changed_at, entry.inode):
                raise _FolderChanged(entry.path)
            try:
                archive.addfile(member, file)
            except OSError as error:  # it became shorter
                if error.errno is None:
                    raise _FolderChanged(entry.path) from None
                raise


def _compare(before: list[_FolderEntry], after: list[_FolderEntry]) -> None:
    if before != after:
        differing = {each.path for each in set(before) ^ set(after)}
        files = {each.path for each in {*before, *after} if not stat.S_ISDIR(each.mode)}
        raise _FolderChanged(min(differing & files or differing))


_IGNORE: Final = "name what the program does not need in .gitignore; data belongs into a store, packages into the image"


def _listed(folder: Path) -> _FolderListing:
    """List what is packed, in an order that depends on the names alone."""
    listing = _FolderListing(ignored=list(_ignored_above(folder.resolve())))
    _list(folder, "", listing)
    listing.entries.sort(key=lambda entry: entry.path.encode())
    return listing


def _list(folder: Path, inside: str, listing: _FolderListing) -> None:
    with os.scandir(folder / inside) as scanned:
        entries = sorted(scanned, key=lambda each: each.name)
    if (own := _ignore_file(folder / inside)) is not None:
        listing.ignored.append(_IgnoreFile(inside, "", own))
    for each in entries:
        path = f"{inside}/{each.name}" if inside else each.name
        is_folder = each.is_dir(follow_symlinks=False)
        if is_folder and _is_of_no_use(folder / path):
            if each.name != "__pycache__":
                listing.left_out.append(path)
        elif not _is_ignored(listing.ignored, f"{path}/" if is_folder else path):
            listing.entries.append(_entry(folder, path))
            if len(listing.entries) > ENTRIES_MAX:
                raise _refused(f"{folder} has more than {plural(ENTRIES_MAX, 'entry', 'entries')}", _IGNORE)
            if is_folder:
                _list(folder, path, listing)


def _entry(folder: Path, path: str) -> _FolderEntry:
    try:
        path.encode()
    except UnicodeEncodeError:
        raise _refused(f"{folder} holds {path!r}, whose name is no UTF-8", "rename it") from None
    about = os.lstat(folder / path)
    if stat.S_ISLNK(about.st_mode):
        target = os.readlink(folder / path)
        if _leaves(folder, path, target):
            what = f"{folder / path} is a link to {target}, which is outside the folder: a worker has only the folder"
            raise _refused(what, "put a copy in its place, or name it in .gitignore")
        return _FolderEntry(path, stat.S_IFLNK, 0, 0, 0, target)
    if stat.S_ISDIR(about.st_mode):
        return _FolderEntry(path, stat.S_IFDIR, 0, 0, 0, None)
    if not stat.S_ISREG(about.st_mode):
        raise _refused(f"{folder / path} is no file, folder or link", "remove it, or name it in .gitignore")
    mode, length, changed_at, inode = _stamp(about)
    return _FolderEntry(path, mode, length, changed_at, inode, None)


def _stamp(about: os.stat_result) -> tuple[int, int, int, int]:
    return about.st_mode, about.st_size, about.st_mtime_ns, about.st_ino


def _leaves(folder: Path, path: str, target: str) -> bool:
    """Return whether a link leads out of the folder: by its words, for the folder has another name and place in a
    worker, or through another link."""
    if target.startswith("/"):
        return True
    depth = path.count("/")
    for part in PurePosixPath(target).parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return True
    root = os.path.realpath(folder)
    reached = os.path.realpath(os.path.join(folder, os.path.dirname(path), target))
    return reached != root and not reached.startswith(f"{root}/")


def _is_of_no_use(folder: Path) -> bool:
    """Return whether a folder is never packed: history, bytecode, and a virtual environment, which works in its own
    place alone."""
    return folder.name in (".git", "__pycache__") or (folder / "pyvenv.cfg").is_file()


def _is_ignored(ignored: list[_IgnoreFile], path: str) -> bool:
    """As git decides: the last pattern of the nearest file that says something of the path."""
    for each in reversed(ignored):
        if (verdict := each.verdict(path)) is not None:
            return verdict
    return False


def _ignored_above(folder: Path) -> Iterator[_IgnoreFile]:
    """The `.gitignore` files between the repository that the folder is a part of, and the folder."""
    above: list[Path] = []
    for parent in (folder, *folder.parents):
        if parent != folder:
            above.append(parent)
        if (parent / ".git").exists():
            break
    else:
        return
    for parent in reversed(above):
        if (patterns := _ignore_file(parent)) is not None:
            yield _IgnoreFile("", f"{folder.relative_to(parent).as_posix()}/", patterns)


def _ignore_file(folder: Path) -> pathspec.GitIgnoreSpec | None:
    path = folder / ".gitignore"
    if not path.is_file():
        return None
    import pathspec

    try:
        return pathspec.GitIgnoreSpec.from_lines(path.read_text(errors="surrogateescape").splitlines())
    except ValueError as error:
        raise _refused(f"{path} can't be read: {error}", "mend the pattern") from None


def _names_a_secret(entry: _FolderEntry) -> bool:
    name = PurePosixPath(entry.path).name.lower()
    return name not in _EXAMPLES and any(fnmatch.fnmatchcase(name, pattern) for pattern in _SECRETS)


def _refuse_large(folder: Path, entries: list[_FolderEntry]) -> None:
    total = sum(entry.size for entry in entries)
    if total <= BYTES_MAX:
        return
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[entry.path.partition("/")[0]] += entry.size
    largest = ", ".join(f"{name} {size(count)}" for name, count in sizes.most_common(LARGEST_NAMED))
    raise _refused(
        f"{folder} has {size(total)}, and a source may have {size(BYTES_MAX)}; the largest: {largest}", _IGNORE
    )


def _refused(what: str, next_step: str) -> InvalidRequest:
    return InvalidRequest(what, "bad-source", next_step=next_step)
