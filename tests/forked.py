"""Programs of Muster that need not be loaded first: each is a fork of a process that has loaded them.

To load the API takes longer than most of the tests that start it. That the commands start from nothing is tested on
`python -m` itself.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pytest", "muster.api.__main__", "muster.operator.__main__", "muster.cli.main"])


class ForkedProgram:
    """`python -m MODULE ARGUMENTS`, with what the tests use of `subprocess.Popen`. `log` gets what it writes to stderr,
    and what it writes to stdout where `stdout` is None; else `stdout` is where its words are read."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str | Path],
        log: Path,
        environment: Mapping[str, str] | None = None,
        read_stdout: bool = False,
    ) -> None:
        self.stdout: TextIO | None = None
        words, environ = [str(word) for word in arguments], dict(os.environ if environment is None else environment)
        reader, writer = _CONTEXT.Pipe(duplex=False)
        with reader, writer:
            out = writer if read_stdout else None
            self._process = _CONTEXT.Process(target=_run, args=(module, words, os.getcwd(), str(log), environ, out))
            self._process.start()
            if read_stdout:
                self.stdout = os.fdopen(os.dup(reader.fileno()))
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, sign: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sign)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code


def _run(
    module: str, arguments: list[str], folder: str, log: str, environ: dict[str, str], out: Connection | None
) -> None:
    os.chdir(folder)
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(errors, 2)
    os.dup2(errors if out is None else out.fileno(), 1)
    os.close(errors)
    if out is not None:
        out.close()
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [module, *arguments]
    sys.modules.pop(f"{module}.__main__", None)  # runpy warns of a module that is there already
    runpy.run_module(module, run_name="__main__", alter_sys=True)
