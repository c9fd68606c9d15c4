"""Programs of Muster that need not be loaded first: each is a fork of a process that has loaded them.

To load the API takes longer than most of the tests that start it. That the commands start from nothing is tested on
`python -m` itself.
"""

from __future__ import annotations

import multiprocessing
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TextIO

import muster.cli
from tests.polling import WAIT_SECONDS_MAX

# The command line imports what a command needs when it is called, so each of its modules is named.
_COMMANDS = [f"muster.cli.{module.name}" for module in pkgutil.iter_modules(muster.cli.__path__)]
_PROGRAMS = ["muster.api.__main__", "muster.operator.__main__", "muster.client.connection", *_COMMANDS]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["pytest", *(name for name in _PROGRAMS if name != "muster.cli.__main__")])


# An exit code can be read once, and multiprocessing reads those of all its processes whenever it starts another one: of
# two threads that read one at the same moment, the second would take the process for failed.
_READING = threading.Lock()


def _started(target: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    with _READING:
        process = _CONTEXT.Process(target=target, args=arguments)
        process.start()
        return process


def _exit_code(process: ForkServerProcess, timeout: float | None) -> int | None:
    wait([process.sentinel], timeout)
    with _READING:
        return process.exitcode


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
            self._process = _started(_run, module, words, os.getcwd(), str(log), environ, out)
            if read_stdout:
                self.stdout = os.fdopen(os.dup(reader.fileno()))
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return _exit_code(self._process, 0.0)

    def send_signal(self, sign: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sign)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if (code := _exit_code(self._process, timeout)) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code


def run(
    module: str,
    arguments: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout: float = WAIT_SECONDS_MAX,
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ARGUMENTS` to its end, as subprocess.run does that captures what it writes."""
    words, environ = [str(word) for word in arguments], dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory(prefix="muster-forked-") as streams:
        files = [os.path.join(streams, name) for name in ("stdin", "stdout", "stderr")]
        for file, text in zip(files, (stdin, "", ""), strict=True):
            Path(file).write_text(text)
        process = _started(_run_on_files, module, words, str(folder or os.getcwd()), files, environ)
        if (code := _exit_code(process, timeout)) is None:
            process.kill()
            _exit_code(process, None)
            raise subprocess.TimeoutExpired([module, *words], timeout)
        written = [Path(file).read_text() for file in files[1:]]
        return subprocess.CompletedProcess([module, *words], code, *written)


def _run_on_files(module: str, arguments: list[str], folder: str, files: list[str], environ: dict[str, str]) -> None:
    os.chdir(folder)
    for number, file in enumerate(files):
        descriptor = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has put an empty one there
    _become(module, arguments, environ)


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
    _become(module, arguments, environ)


def _become(module: str, arguments: list[str], environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [module, *arguments]
    sys.modules.pop(f"{module}.__main__", None)  # runpy warns of a module that is there already
    runpy.run_module(module, run_name="__main__", alter_sys=True)
