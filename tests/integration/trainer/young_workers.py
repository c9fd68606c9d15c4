"""Workers whose processes are forked from one that has loaded torch, launcher and ranks: for tests of what a gang does,
not of how its processes are started.

The launcher forks as many ranks as it will need while it has no thread. Each waits until the launcher would have
started a process: it then gets that process' environment and standard output, and a session of its own.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import sys
from types import SimpleNamespace
from typing import Any, NoReturn

from tests.fork_server import Order, end_with, must_have_no_threads

from muster.trainer.checkpoint.channel import ChannelClosed, MessageChannel
from muster.worker import ranks

RANK = [sys.executable, "-u", "-m", "muster.trainer"]


class YoungRank:
    """A rank that was forked and has nothing to do yet; from `start` on, what the launcher takes for a Popen."""

    def __init__(self, older: list[YoungRank]) -> None:
        must_have_no_threads()
        ours, theirs = socket.socketpair()
        launcher = os.getpid()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for each in older:
                each._channel.close()
            ours.close()
            _wait_and_train(MessageChannel(theirs), launcher)
        theirs.close()
        self._channel = MessageChannel(ours)

    def start(self, environment: dict[str, str]) -> None:
        with contextlib.suppress(ChannelClosed):  # it was killed, which whoever waits for it hears
            self._channel.send({"environment": environment})
        self._channel.close()

    def wait(self) -> int:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _wait_and_train(orders: MessageChannel, launcher: int) -> NoReturn:
    try:
        end_with(launcher)
        order = orders.receive()
        assert order is not None
    except BaseException:
        os._exit(0)
    orders.close()
    os.setsid()
    os.environ.clear()
    os.environ.update(order["environment"])
    if "MUSTERTESTS_KILL" in os.environ:
        _die_in_a_step()
    run_module("muster.trainer")


def _die_in_a_step() -> None:
    """Do what hooks/sitecustomize.py does in a process that is still to load torch."""
    from tests.integration.trainer.hooks import sitecustomize

    from muster.trainer.data.loader import RankLoader

    RankLoader.next = sitecustomize.deadly(RankLoader.next)  # type: ignore[method-assign]


def run_module(name: str) -> NoReturn:
    """Run a program of Muster, which ends this process."""
    signal.set_wakeup_fd(-1)
    sys.argv = [name]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it lasts as long as the process
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    os._exit(1)  # it should have ended by itself


def launcher(connection: socket.socket, order: Order) -> None:
    """Be the launcher of a worker. order: its folder, and how many ranks it starts."""
    connection.close()
    os.setsid()
    os.chdir(order["directory"])
    log = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    waiting: list[YoungRank] = []
    while len(waiting) < order["ranks"]:
        waiting.append(YoungRank(waiting))

    def start(command: list[str], *, env: dict[str, str], **about: Any) -> YoungRank:
        assert command == RANK
        assert about == {
            "cwd": None, "stdin": ranks.subprocess.DEVNULL, "stdout": None, "stderr": None, "start_new_session": True,
            "preexec_fn": None,
        }  # fmt: skip
        young = waiting.pop(0)
        young.start(env)
        return young

    ranks.subprocess = SimpleNamespace(Popen=start, DEVNULL=ranks.subprocess.DEVNULL)  # type: ignore[assignment]
    run_module("muster.trainer.launch")
