"""Runs a program that a model wrote in a process of its own, which has no network, files or other processes.

What the process gives up, it gives up itself before it reads a line of the program (`shut_in`). The clock is held here:
a process that is not done in time is killed.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from typing import BinaryIO, Final, NamedTuple

from muster.local import seccomp
from muster.recipe.verifiers import OUT_OF_MEMORY, OUT_OF_TIME
from muster.trainer.verify.shut_in import CAN_NOT_BE_SHUT_IN, HAD_NO_MEMORY

START_SECONDS = 10.0  # that Python may take to start, beside the program's own time; on a busy machine it takes one
_ENVIRONMENT: Final = {"LANG": "C.UTF-8"}  # nothing of the trainer's own, where secrets may be


class TestOutcome(NamedTuple):
    """Outcome of a program and its tests."""

    passed: bool  # both ran without an exception, in time and within the memory
    limit: str | None = None  # the one of LIMITS that stopped it


class _EndedProcess(NamedTuple):
    code: int | None  # None: it was killed after its time
    said: str
    seconds: float = 0.0


def run(program: str, tests: str, timeout_seconds: float, memory_megabytes: int) -> TestOutcome:
    """Run `program` and then `tests`."""
    word = secrets.token_hex(16)  # the process says it when all has run: a program that ends it early knows no word
    ended = _run(program, tests, timeout_seconds, memory_megabytes, word)
    if ended.said.startswith(word):
        return TestOutcome(True)
    return TestOutcome(False, _limit(ended, timeout_seconds))


@functools.cache
def what_is_closed() -> tuple[str, ...]:
    """Return the restrictions of a program on this machine. Raises ValueError where it could not be kept from the
    network."""
    ended = (
        _run("", "", START_SECONDS, 512, "closed") if seccomp.has_filter() else _EndedProcess(CAN_NOT_BE_SHUT_IN, "")
    )
    if not ended.said.startswith("closed"):
        raise ValueError(
            "verifier unitTests runs programs that a model wrote, and this machine can't keep them from the network "
            "and from other processes (it takes Linux with seccomp, on x86-64 or ARM64); leave unitTests out"
        )
    return tuple(ended.said.splitlines()[1:])


def _run(program: str, tests: str, timeout_seconds: float, memory_megabytes: int, word: str) -> _EndedProcess:
    order = {"program": program, "tests": tests, "word": word, "megabytes": memory_megabytes}
    order["seconds"] = timeout_seconds
    # Files (in memory) instead of pipes: nobody waits for a process that does not read, nor reads what one writes
    # without end.
    with _in_memory() as heard, _in_memory() as said:
        heard.write(json.dumps(order).encode())
        heard.seek(0)
        command = [sys.executable, "-I", "-m", "muster.trainer.verify.shut_in"]
        began = time.monotonic()
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
        return _EndedProcess(code, said.read(1 << 10).decode(errors="replace"), time.monotonic() - began)


def _limit(ended: _EndedProcess, timeout_seconds: float) -> str | None:
    """The limit that ended a process which has not passed; None where it was none."""
    if ended.code in (None, -signal.SIGALRM, -signal.SIGXCPU):
        return OUT_OF_TIME
    if ended.code == -signal.SIGKILL:  # of a program deaf to SIGALRM by its limit of CPU time, else by the kernel
        return OUT_OF_TIME if ended.seconds >= timeout_seconds else OUT_OF_MEMORY
    return OUT_OF_MEMORY if ended.code == HAD_NO_MEMORY else None


def _in_memory() -> BinaryIO:
    return os.fdopen(os.memfd_create("order"), "w+b", buffering=0)
