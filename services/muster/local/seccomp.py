"""seccomp: a process gives up system calls, for itself and for good (Linux 3.17; no privilege is needed).

https://docs.kernel.org/userspace-api/seccomp_filter.html. There are two filters. A program that a model wrote gives up
all that reaches beyond its process: the network, other processes, new programs (`enter`). A worker gives up what
Landlock does not cover (`enter_worker`): it may not set the limits, priorities and cores of other processes (the kernel
ends a process beyond its limit of CPU time, whoever set it), change owners and attributes of files by their paths, or
use io_uring, whose operations no filter sees.

A filter sees the numbers that a call is given, never the memory that they point to, so it can't tell paths apart. Of
processes it lets 0 through, the caller itself: the caller's own number is known only once it runs.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

_PR_GET_SECCOMP, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 21, 22, 38, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of classic BPF
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_REFUSE, _ABSENT, _PRETEND = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS, _ERRNO | 0
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; an argument takes eight bytes
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000  # numbers from here on are of the x32 ABI, which does the same under other numbers

_Line = tuple[int, int, int, int]  # struct sock_filter: code, lines to skip if true, lines to skip if false, operand


class _FilterMachine(NamedTuple):
    audit: int  # AUDIT_ARCH_*
    program: frozenset[int]  # refused to a program that a model wrote
    clone: int
    worker: frozenset[int]  # refused to a worker
    of_a_process: frozenset[int]  # refused to a worker unless their first argument is 0, the caller itself
    sched_setaffinity: int
    prlimit64: int
    setpriority: int
    ioprio_set: int


_FOR_PROGRAMS: Final = frozenset({424, 425, 434, 438, 440})  # pidfd_send_signal, io_uring, pidfd_open, _getfd, madvise
# io_uring_setup, _enter, _register, setxattrat, removexattrat, file_setattr
_FOR_WORKERS: Final = frozenset({425, 426, 427, 463, 466, 469})
_CLONE3: Final = 435  # its flags lie in memory, where a filter can't see them; libc goes on with clone
_PRIO_PROCESS: Final = 0
_IOPRIO_WHO_PROCESS: Final = 1
_MACHINES: Final = {
    # program: socket, connect, shmget, fork, vfork, execve, kill, msgget, ptrace, rt_sigqueueinfo, setpriority,
    # setrlimit, mount, tkill, tgkill, add_key, keyctl, unshare, rt_tgsigqueueinfo, perf_event_open, prlimit64,
    # process_vm_*, setns, memfd_create, bpf, execveat, userfaultfd, sched_setaffinity
    # worker: chown, lchown, fchownat, setxattr, lsetxattr, removexattr, lremovexattr
    # of_a_process: sched_setparam, sched_setscheduler, sched_setattr
    "x86_64": _FilterMachine(
        0xC000003E,
        frozenset({41, 42, 29, 57, 58, 59, 62, 68, 101, 129, 141, 160, 165, 200, 234, 248, 250, 272, 297, 298, 302})
        | {310, 311, 308, 319, 321, 322, 323, 203},
        clone=56,
        worker=frozenset({92, 94, 260, 188, 189, 197, 198}),
        of_a_process=frozenset({142, 144, 314}),
        sched_setaffinity=203,
        prlimit64=302,
        setpriority=141,
        ioprio_set=251,
    ),
    "aarch64": _FilterMachine(
        0xC00000B7,
        frozenset({198, 203, 194, 221, 129, 186, 117, 138, 140, 164, 40, 130, 131, 217, 219, 97, 240, 241, 261, 270})
        | {271, 268, 279, 280, 281, 282, 122},
        clone=220,
        worker=frozenset({54, 5, 6, 14, 15}),
        of_a_process=frozenset({118, 119, 274}),
        sched_setaffinity=122,
        prlimit64=261,
        setpriority=140,
        ioprio_set=30,
    ),
}


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def has_filter() -> bool:
    """Return whether there is a filter for this machine and its kernel accepts one."""
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        return False
    return bool(ctypes.CDLL(None).prctl(_PR_GET_SECCOMP, 0, 0, 0, 0) >= 0)


def enter() -> None:
    """Give up all that reaches beyond the process: it fails with EPERM from now on. Threads may still be started.
    Raises OSError where the kernel does not take the filter."""
    _install(list(_of_programs(_MACHINES[platform.machine()])))


def enter_worker() -> None:
    """Give up what a worker has no use for and Landlock does not cover. Raises OSError where the kernel does not take
    the filter."""
    _install(list(_of_workers(_MACHINES[platform.machine()])))


def _install(lines: list[_Line]) -> None:
    program = _FilterProgram(len(lines), b"".join(struct.pack("HBBI", *line) for line in lines))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _of_programs(machine: _FilterMachine) -> Iterator[_Line]:
    yield from _start(machine)
    yield from _on(_CLONE3, [_answer(_ABSENT)])
    is_thread = [_load(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), _answer(_ALLOW), _answer(_REFUSE)]
    yield from _on(machine.clone, is_thread)
    for number in sorted(machine.program | _FOR_PROGRAMS):
        yield from _on(number, [_answer(_REFUSE)])
    yield _answer(_ALLOW)


def _of_workers(machine: _FilterMachine) -> Iterator[_Line]:
    yield from _start(machine)
    for number in sorted(machine.worker | _FOR_WORKERS):
        yield from _on(number, [_answer(_REFUSE)])
    for number in sorted(machine.of_a_process):
        yield from _on(number, [*_allow_if(0, 0), _answer(_REFUSE)])
    # libc binds OpenMP's threads by their numbers, and starts none whose binding is refused: so the call does nothing.
    yield from _on(machine.sched_setaffinity, [*_allow_if(0, 0), _answer(_PRETEND)])
    # Limits may be read: then the third argument, an address in both its halves, is null.
    is_read = [_load(2), (_EQUAL, 0, 3, 0), _load(2, upper=True), (_EQUAL, 0, 1, 0), _answer(_ALLOW)]
    yield from _on(machine.prlimit64, [*_allow_if(0, 0), *is_read, _answer(_REFUSE)])
    for number, process in ((machine.setpriority, _PRIO_PROCESS), (machine.ioprio_set, _IOPRIO_WHO_PROCESS)):
        is_own = [_load(0), (_EQUAL, 0, 3, process), *_allow_if(1, 0)]
        yield from _on(number, [*is_own, _answer(_REFUSE)])
    yield _answer(_ALLOW)


def _start(machine: _FilterMachine) -> Iterator[_Line]:
    """End a process that calls by another ABI, whose numbers mean something else; load the number of the call."""
    yield from ((_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, machine.audit), _answer(_KILL_PROCESS))
    yield from ((_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), _answer(_KILL_PROCESS))


def _on(number: int, lines: list[_Line]) -> list[_Line]:
    """Run `lines`, which end in an answer, for that call alone; all others skip them with their number still loaded."""
    return [(_EQUAL, 0, len(lines), number), *lines]


def _allow_if(argument: int, value: int) -> list[_Line]:
    return [_load(argument), (_EQUAL, 0, 1, value), _answer(_ALLOW)]


def _load(argument: int, upper: bool = False) -> _Line:
    """Both machines are little-endian. The kernel takes the lower half of what it declares as an int."""
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * argument + 4 * upper)


def _answer(what: int) -> _Line:
    return (_RETURN, 0, 0, what)
