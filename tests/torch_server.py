"""The process that has loaded torch, from which tests have ranks and workers forked: `python -m tests.torch_server`.

It is started by the first test of a session that needs it, and ends with the session.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.fork_server import ForkedProcess, ForkServer, Order, Work, serve
from tests.polling import WAIT_SECONDS_MAX

ROOT = Path(__file__).parents[1]
GRACE_SECONDS = WAIT_SECONDS_MAX
_servers: list[tuple[ForkServer, subprocess.Popen[bytes]]] = []


def start(work: Work, order: Order, environment: Mapping[str, str] = os.environ) -> tuple[ForkedProcess, socket.socket]:
    """Fork a process that does `work`, a function of a module of the tests, with the order; and a connection to it."""
    named = order | {"module": work.__module__, "function": work.__qualname__}
    return _server().start(named, environment)


def _server() -> ForkServer:
    if not _servers:
        ours, theirs = socket.socketpair()
        with theirs:
            # A library that looks for a GPU when it is loaded must not begin to use it: CUDA survives no fork. That of
            # numpy starts threads when it is loaded, for every core that it is not forbidden.
            environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OPENBLAS_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "tests.torch_server", str(theirs.fileno())]
            process = subprocess.Popen(
                command, env=environment, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        _servers.append((ForkServer(ours), process))
        atexit.register(end)
    return _servers[0][0]


def end_what_is_left() -> list[int]:
    """End all that was forked and still runs, and return its process ids. What was asked to end may need a moment."""
    started = [child for _, process in _servers for child in psutil.Process(process.pid).children(recursive=True)]
    _, left = psutil.wait_procs([child for child in started if _runs(child)], GRACE_SECONDS)
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    return [child.pid for child in left]


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def end() -> None:
    """End the server, and with it all that it forked."""
    while _servers:
        server, process = _servers.pop()
        server.close()
        process.kill()
        process.wait()


def load_torch() -> None:
    """Load what nearly every rank loads sooner or later, and start no thread."""
    import prometheus_client  # noqa: F401
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    import muster.trainer.train.loop  # noqa: F401

    gc.freeze()  # a search for garbage would write to what all that are forked share


def work(connection: socket.socket, order: Order) -> None:
    getattr(importlib.import_module(order["module"]), order["function"])(connection, order)


if __name__ == "__main__":
    load_torch()
    serve(socket.socket(fileno=int(sys.argv[1])), work)
