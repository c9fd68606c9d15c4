"""Sandbox of a worker on this machine: its own folders, what its job names, the system it runs on, and its memory.

The operator says it in the worker's environment (MUSTER_SANDBOX), and the launcher gives up all the rest before it does
anything else. What lies in the state folder is never reached by way of a folder around it, nor by a link.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from glob import has_magic, iglob
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from muster.local import capabilities, mounts, seccomp
from muster.local.landlock import READ, WRITE, FileAccess, LandlockRules, version
from muster.words.address import AddressError, parse_address
from muster.words.base import DocumentProblem, Many, Record, dump
from muster.words.job import JobSpec
from muster.words.state_folder import StateFolder

# Programs, libraries, certificates, name resolution, and what the kernel tells of processes and devices.
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix/store", "/snap", "/proc", "/sys",
    "/run/systemd/resolve", "/run/resolvconf", "/run/nscd",
)  # fmt: skip
# GPUs and fast networks are driven through device files; /dev/shm is the machine's shared memory.
_DEVICES = (
    "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/shm",  # noqa: S108
    "/dev/nvidia*", "/dev/dri", "/dev/kfd", "/dev/infiniband", "/dev/gdrdrv",
)  # fmt: skip
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
ADVICE = (
    "a worker on this machine reads the system, its own folders and what its job names, and writes its own folders; "
    "MUSTER_OPERATOR_WORKER_PATHS of `muster up` names more to read. One that runs as root opens what root owns or "
    "everybody may read, for it has none of root's privileges"
)
_SIGNALS_SINCE = 6  # Landlock's version in Linux 6.12


class Sandbox(Record):
    """Access of one worker besides the system, as absolute paths. Missing paths are skipped.

    `memory_bytes` is what its processes may hold together; None is no limit. Its launcher sees to it.
    """

    state: str  # the state folder, out of reach but for `own`
    read: Many[str]  # named by the job or by who runs the platform: whatever of it lies in the state folder is left out
    own_read: Many[str]  # the job's, also in the state folder
    own_write: Many[str]  # made where they are not there
    refused: str = ""  # why the job may not run at all: it names what lies in the state folder
    memory_bytes: int | None = None


def available() -> bool:
    """Return whether this kernel can isolate workers from each other."""
    return version() > 0


class ProcessFence(NamedTuple):
    """Isolation of this process from the rest of the machine."""

    keeps_files: bool  # within what the sandbox names
    gaps: tuple[str, ...]  # what it is not kept from, each the second half of a sentence about a job


def gaps() -> tuple[str, ...]:
    """Return what this machine can't keep a job from, each as the end of a sentence for its administrator."""
    return _gaps(mounts.available())


def _gaps(keeps_modes: bool) -> tuple[str, ...]:
    gaps, landlock = [], version()
    if not landlock:
        gaps.append("can read what you can, for this kernel has no Landlock")
    if landlock < _SIGNALS_SINCE:
        gaps.append("can end your other processes, for this kernel's Landlock keeps no signal back (Linux 6.12 does)")
    if not seccomp.has_filter():
        gaps.append(
            "can limit and slow your other processes and change the owners of your files, for this machine has no "
            "seccomp filter (Linux on x86-64 or ARM64 has)"
        )
    if not keeps_modes:
        gaps.append(
            "can change modes and times of your files, for this machine lets you have no mounts of your own (it takes "
            "user namespaces, or root's CAP_SYS_ADMIN)"
        )
    return tuple(gaps)


def enter(sandbox: Sandbox) -> ProcessFence:
    """Give up all but what the sandbox names, for good: to write to other folders, to open other files, root's
    privileges, and system calls that reach other processes. This process has one thread yet.

    Raises OSError where the kernel takes no filter though it says that it does: nothing runs unfenced for that.
    """
    for own in map(Path, sandbox.own_write):
        with contextlib.suppress(OSError):  # who writes there says what is wrong
            own.mkdir(parents=True, exist_ok=True)
    keeps_modes = _protect_files(sandbox)
    if keeps_files := available():
        _give_up_files(sandbox)
    capabilities.give_up()
    if seccomp.has_filter():
        seccomp.enter_worker()
    return ProcessFence(keeps_files, _gaps(keeps_modes))


def _protect_files(sandbox: Sandbox) -> bool:
    state, outer = Path(sandbox.state), list[Path]()
    for own in sorted({*map(Path, sandbox.own_write), _SHARED_MEMORY}):
        if not any(own.is_relative_to(each) for each in outer):
            outer.append(own)
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(_opened(own, state, inside=True)) for own in outer]
        folders = [each for each in opened if each is not None and stat.S_ISDIR(os.fstat(each).st_mode)]
        return mounts.protect(folders)


def _give_up_files(sandbox: Sandbox) -> None:
    rules, state = LandlockRules(), Path(sandbox.state)
    for path in (*_SYSTEM, *_interpreter(), *sandbox.read):
        for outside in _around(Path(path), state):
            _allow(rules, outside, READ, state)
    for named in map(Path, sandbox.read):
        # A glob beside the state folder must be able to list. What names lie in the state folder shows then, no more.
        if named != state and state.is_relative_to(named):
            _allow(rules, named, FileAccess.READ_DIR, state, beside=True)
    for pattern in _DEVICES:
        for device in iglob(pattern):
            _allow(rules, Path(device), WRITE, state)
    for own in map(Path, sandbox.own_read):
        _allow(rules, own, READ, state, inside=True)
    for own in map(Path, sandbox.own_write):
        _allow(rules, own, WRITE, state, inside=True)
    rules.enter()


def state_problems(spec: JobSpec, state: StateFolder, project: str | None = None) -> tuple[DocumentProblem, ...]:
    """The addresses of the job that lie in the platform's state folder, where only commits may be named, and, where the
    `project` is given, by the API alone the files that were uploaded to it."""
    own = uploaded(spec, state, project) if project is not None else ()
    commits = _commits(state)
    root, problems = commits.parent, []
    for place, text in _texts_of_work(spec):
        path = _named(text)
        is_commit = _names_commits(place) and path is not None and path.parent == commits
        if path is not None and path.is_relative_to(root) and not is_commit and str(path) not in own:
            problems.append(
                DocumentProblem(f"spec.{place}", "lies in Muster's own state folder, which no job may read; copy it")
            )
    path = _named(spec.checkpoint.uri) if spec.checkpoint.uri else None
    if path is not None and path.is_relative_to(root) and path != commits:
        why = "lies in Muster's own state folder; leave it out, or name a folder elsewhere"
        problems.append(DocumentProblem("spec.checkpoint.uri", why))
    return tuple(problems)


def _names_commits(place: str) -> bool:
    return place.endswith(".from.uri") or (place.startswith("program.inputs.") and place.endswith(".uri"))


def commits_of(uri: str, state: StateFolder) -> str | None:
    """The uid of the job whose commits lie at this address, among those in the state folder; None for another place."""
    path = _named(uri)
    return path.name if path is not None and path.parent == _commits(state) else None


def uploaded(spec: JobSpec, state: StateFolder, project: str) -> tuple[str, ...]:
    """The files of the project, among those in the state folder, that the job reads."""
    folder = _commits(state).parent / state.files.name / project
    return tuple(path for path in named_paths(spec) if Path(path).parent == folder)


def named_paths(spec: JobSpec) -> tuple[str, ...]:
    """The files and folders of this machine that the job names; for a glob, the folder that it begins in; for a
    program's script, the folder that it imports its neighbours from."""
    paths = (_named(text) for _, text in _texts_of_work(spec))
    scripts = _script_folders(spec) if spec.program is not None else ()
    return (*(str(path) for path in paths if path is not None), *scripts)


def _script_folders(spec: JobSpec) -> Iterator[str]:
    """Yield the folders of scripts that the command names, except those that hold a person's whole home: a script there
    is read by itself."""
    home = Path(os.path.realpath(Path.home()))
    for word in spec.program.command if spec.program is not None else ():
        path = _named(word) if word.endswith(".py") else None
        if path is not None and not home.is_relative_to(path.parent):
            yield str(path.parent)


def _texts_of_work(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Yield every text of the job's training or program with its path. Each word of a command may be a path: of the
    program itself, of its data or of its configuration."""
    if spec.training is not None:
        yield from _texts("training", dump(spec)["training"])
    elif spec.program is not None:
        yield from _texts("program", dump(spec.program))
        for index, word in enumerate(spec.program.command):  # --data=/data/corpus
            if word.startswith("-") and "=" in word:
                yield f"program.command[{index}]", word.partition("=")[2]


def _texts(place: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield every text of a document with its path: whatever field names an address, today's or a later one's."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _texts(f"{place}.{key}", each)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _texts(f"{place}[{index}]", each)


@lru_cache(maxsize=8)  # a process has one state folder, and each submission asks for it
def _commits(state: StateFolder) -> Path:
    return Path(os.path.realpath(state.root)) / state.checkpoints.name


def _named(text: str) -> Path | None:
    if not text.lower().startswith(("/", "~", "file:")):  # what is relative lies in the worker's own folder
        return None
    try:
        path = parse_address(text).local
    except AddressError:  # no address, or the home of nobody: whoever opens it says so
        return None
    return _resolved(path)


def _resolved(path: Path) -> Path:
    """Resolve the path with all links; for a glob, resolve the folder that it begins in."""
    if os.path.lexists(path):
        return Path(os.path.realpath(path))
    there, missing = _split_at_missing(path)
    below = tuple(takewhile(lambda part: not has_magic(part), missing))
    real = os.path.join(os.path.realpath(there), *below)
    return _resolved(Path(os.path.normpath(real))) if ".." in below else Path(real)


def _split_at_missing(path: Path) -> tuple[Path, tuple[str, ...]]:
    """The folder up to which the path is there, and the parts below. Below a missing part nothing is there, so halving
    finds the first one: a path of a thousand parts (`/usr/../usr/..` is there all along) costs ten looks."""
    parts = path.parts
    depth = 1 + bisect_left(range(1, len(parts)), True, key=lambda n: not os.path.lexists(Path(*parts[: n + 1])))
    return Path(*parts[:depth]), parts[depth:]


def _interpreter() -> Iterator[str]:
    """Return the folders of this Python and of everything that it imports."""
    yield from {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable))}
    yield from (path for path in sys.path if os.path.isabs(path))


def _around(folder: Path, state: Path) -> Iterator[Path]:
    """The folder; where the state folder lies in it, everything off the way there, links left out."""
    folder = Path(os.path.realpath(folder))
    if not state.is_relative_to(folder):
        yield folder
    elif folder != state:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_symlink():
                    yield from _around(Path(entry.path), state)


def _allow(
    rules: LandlockRules, path: Path, access: FileAccess, state: Path, inside: bool = False, beside: bool = False
) -> None:
    with _opened(path, state, inside, beside) as descriptor:
        if descriptor is not None:
            rules.allow(descriptor, access)


@contextlib.contextmanager
def _opened(path: Path, state: Path, inside: bool = False, beside: bool = False) -> Iterator[int | None]:
    """Open the path, and yield its descriptor, or None if it does not exist or is not permitted. The opened file is
    what is checked, not its name: a link may have been put there meanwhile. `inside` is for the job's own folders, and
    `beside` for a folder that contains the state folder."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | (os.O_NOFOLLOW if inside else 0))
    except OSError:
        yield None
        return
    try:
        real = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        is_own = inside and path.is_relative_to(state)
        yield descriptor if (real == path if is_own or beside else not _touches(real, state)) else None
    finally:
        os.close(descriptor)


def _touches(path: Path, state: Path) -> bool:
    return path.is_relative_to(state) or state.is_relative_to(path)
