"""The process that runs what a model wrote: it gives up network, files, other processes and memory, then runs it.

`python -m muster.trainer.verify.shut_in` reads its order from stdin. What is between the giving up and the end is
somebody else's code: nothing here may matter to the trainer. Imports little, for it starts once for each answer.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Iterator

from muster.local import capabilities, landlock, seccomp

CAN_NOT_BE_SHUT_IN = 97
HAD_NO_MEMORY = 98
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_FILE_BYTES = 1 << 20  # of any file that it writes where files can't be closed: what it has to say needs a few
_OPEN_FILES = 64
# Shared libraries and what they read at start; the interpreter's own folders are added.
_SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime")


def main() -> None:
    """Run the order. Says its word at the end, and what was closed, a line each."""
    order = json.load(sys.stdin)
    said, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    try:
        closed = list(_give_up(int(order["megabytes"]), float(order["seconds"])))
    except (OSError, KeyError):
        os._exit(CAN_NOT_BE_SHUT_IN)
    space = {"__name__": "answer"}
    try:
        exec(compile(order["program"], "answer", "exec"), space)  # noqa: S102
        exec(compile(order["tests"], "tests", "exec"), space)  # noqa: S102
    except MemoryError:
        os._exit(HAD_NO_MEMORY)
    except BaseException:
        os._exit(1)
    os.write(said, "\n".join((order["word"], *closed)).encode())
    os._exit(0)


def _give_up(megabytes: int, seconds: float) -> Iterator[str]:
    """Raises OSError or KeyError where network and processes can't be given up. Yields what was."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # it is not to outlive the trainer
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        yield "a network namespace of its own"
    if landlock.version():
        _close_files()
        yield "files (Landlock)"
    capabilities.give_up()
    for what, most in (
        (resource.RLIMIT_AS, megabytes << 20),
        (resource.RLIMIT_CPU, math.ceil(seconds) + 1),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    signal.setitimer(signal.ITIMER_REAL, seconds)  # for one that sleeps; who started this kills it a little later
    seccomp.enter()
    yield "network, processes and programs (seccomp)"


def _close_files() -> None:
    """Keep the interpreter and the libraries, to be read; nothing may be written."""
    rules = landlock.LandlockRules()
    for path in {*_SYSTEM, sys.prefix, sys.base_prefix, *(path for path in sys.path if os.path.isabs(path))}:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rules.allow(descriptor, landlock.READ)
            finally:
                os.close(descriptor)
    rules.enter()


if __name__ == "__main__":
    main()
