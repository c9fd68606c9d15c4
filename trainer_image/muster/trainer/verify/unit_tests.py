"""Runs a program that a model wrote in a process of its own, which has no network, files or other processes.

What the process gives up, it gives up itself before it reads a line of the program (`shut_in`). The clock is held here:
a process that is not done in time is killed.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import subprocess
import sys
from typing import BinaryIO, Final, NamedTuple

from muster.local import seccomp
from muster.trainer.verify.shut_in import CAN_NOT_BE_SHUT_IN

START_SECONDS = 10.0  # that Python may take to start, beside the program's own time; on a busy machine it takes one
_ENVIRONMENT: Final = {"LANG": "C.UTF-8"}  # nothing of the trainer's own, where secrets may be


class _Ended(NamedTuple):
    code: int | None  # None: it was killed after its time
    said: str


def passes(program: str, tests: str, timeout_seconds: float, memory_megabytes: int) -> bool:
    """Whether `program` and then `tests` run without an exception, in time and within the memory."""
    word = secrets.token_hex(16)  # the process says it when all has run: a program that ends it early knows no word
    ended = _run(program, tests, timeout_seconds, memory_megabytes, word)
    return ended.said.startswith(word)


@functools.cache
def what_is_closed() -> tuple[str, ...]:
    """What a program is kept from on this machine. Raises ValueError where it could not be kept from the network."""
    ended = _run("", "", START_SECONDS, 512, "closed") if seccomp.known() else _Ended(CAN_NOT_BE_SHUT_IN, "")
    if not ended.said.startswith("closed"):
        raise ValueError(
            "verifier unitTests runs programs that a model wrote, and this machine can't keep them from the network "
            "and from other processes (it takes Linux with seccomp, on x86-64 or ARM64); leave unitTests out"
        )
    return tuple(ended.said.splitlines()[1:])


def _run(program: str, tests: str, timeout_seconds: float, memory_megabytes: int, word: str) -> _Ended:
    order = {"program": program, "tests": tests, "word": word, "megabytes": memory_megabytes}
    order["seconds"] = timeout_seconds
    # Files (in memory) instead of pipes: nobody waits for a process that does not read, nor reads what one writes
    # without end.
    with _in_memory() as heard, _in_memory() as said:
        heard.write(json.dumps(order).encode())
        heard.seek(0)
        command = [sys.executable, "-I", "-m", "muster.trainer.verify.shut_in"]
        process = subprocess.Popen(
            command, stdin=heard, stdout=said, stderr=subprocess.DEVNULL, cwd="/", env=_ENVIRONMENT, close_fds=True
        )
        try:
            code: int | None = process.wait(timeout_seconds + START_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        return _Ended(code, said.read(1 << 10).decode(errors="replace"))


def _in_memory() -> BinaryIO:
    return os.fdopen(os.memfd_create("order"), "w+b", buffering=0)
