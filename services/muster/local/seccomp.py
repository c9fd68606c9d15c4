"""seccomp: a process gives up system calls, for itself and for good (Linux 3.17; no privilege is needed).

https://docs.kernel.org/userspace-api/seccomp_filter.html. What is given up here is all that reaches beyond the process:
the network, other processes, and new programs. Threads may still be started.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Final, NamedTuple

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of classic BPF
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000  # numbers from here on are of the x32 ABI, which does the same under other numbers


class _Machine(NamedTuple):
    audit: int  # AUDIT_ARCH_*
    clone: int
    refused: frozenset[int]


_EVERYWHERE: Final = frozenset({424, 425, 434, 438, 440})  # pidfd_send_signal, io_uring, pidfd_open, _getfd, madvise
_CLONE3: Final = 435  # its flags lie in memory, where a filter can't see them; libc goes on with clone
_MACHINES: Final = {
    # socket, connect, shmget, fork, vfork, execve, kill, msgget, ptrace, rt_sigqueueinfo, setpriority, setrlimit,
    # mount, tkill, tgkill, add_key, keyctl, unshare, rt_tgsigqueueinfo, perf_event_open, prlimit64, process_vm_*,
    # setns, memfd_create, bpf, execveat, userfaultfd, sched_setaffinity
    "x86_64": _Machine(
        0xC000003E,
        56,
        frozenset({41, 42, 29, 57, 58, 59, 62, 68, 101, 129, 141, 160, 165, 200, 234, 248, 250, 272, 297, 298, 302})
        | {310, 311, 308, 319, 321, 322, 323, 203},
    ),
    "aarch64": _Machine(
        0xC00000B7,
        220,
        frozenset({198, 203, 194, 221, 129, 186, 117, 138, 140, 164, 40, 130, 131, 217, 219, 97, 240, 241, 261, 270})
        | {271, 268, 279, 280, 281, 282, 122},
    ),
}


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def known() -> bool:
    """Whether there is a filter for this machine. Whether its kernel takes one is seen when it is entered."""
    return platform.system() == "Linux" and platform.machine() in _MACHINES


def enter() -> None:
    """Give the calls up: they fail with EPERM from now on. Raises OSError where the kernel does not take the filter."""
    filters = _filter(_MACHINES[platform.machine()])
    program = _Program(len(filters) // 8, filters)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _filter(machine: _Machine) -> bytes:
    """The program: struct sock_filter (code, jump if true, jump if false, operand), each jump counted from the next."""
    refused = sorted(machine.refused | _EVERYWHERE)
    allow, refuse, absent, kill = range(len(refused) + 9, len(refused) + 13)
    lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 0, kill, machine.audit), (_LOAD, 0, 0, _NUMBER)]
    lines += [(_AT_LEAST, kill, 0, _X32), (_EQUAL, absent, 0, _CLONE3), (_EQUAL, len(refused) + 7, 0, machine.clone)]
    lines += [(_EQUAL, refuse, 0, number) for number in refused]
    lines += [(_RETURN, 0, 0, _ALLOW)]
    lines += [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_ANY_BIT, allow, refuse, _CLONE_THREAD)]
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    lines += [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS), (_RETURN, 0, 0, _KILL_PROCESS)]

    def jump(target: int, here: int) -> int:
        return target - here - 1 if target else 0  # 0 is the next line

    return b"".join(
        struct.pack("HBBI", code, jump(true, here), jump(false, here), operand)
        for here, (code, true, false, operand) in enumerate(lines)
    )
