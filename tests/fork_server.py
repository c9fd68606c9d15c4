"""Processes that are forked from one that has already loaded what they need.

To load torch takes a rank ten times longer than many a test trains. A server loads it once, stays without any thread,
and forks itself for each process that is asked of it. It ends when whoever asks it is gone, and its children with it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from muster.trainer.checkpoint.channel import ChannelClosed, MessageChannel

Order = dict[str, Any]
Work = Callable[[socket.socket, Order], None]
PR_SET_PDEATHSIG = 1


class ForkedProcess:
    """Child of a server, with the little of subprocess.Popen that is needed of it. It is reached by its descriptor: its
    number could be another's as soon as the server has read its exit code."""

    def __init__(self, server: MessageChannel, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._server, self._descriptor = server, descriptor
        self._code: int | None = None

    def send_signal(self, number: int) -> None:
        if self._code is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        if self._code is None:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            os.close(self._descriptor)
            self._server.send({"wait": self.pid})
            answer = self._server.receive()
            assert answer is not None
            self._code = int(answer["code"])
        return self._code


class ForkServer:
    """The asking side of a server."""

    def __init__(self, connection: socket.socket) -> None:
        self._channel = MessageChannel(connection)

    def start(self, order: Order, environment: Mapping[str, str] = os.environ) -> tuple[ForkedProcess, socket.socket]:
        """Fork a process that carries out `order`, and return it with a connection to it."""
        ours, theirs = socket.socketpair()
        self._channel.send({"order": order, "environment": dict(environment)}, theirs.fileno())
        theirs.close()
        answer = self._channel.receive()
        assert answer is not None
        return ForkedProcess(self._channel, answer["pid"], self._channel.take_descriptor()), ours

    def close(self) -> None:
        self._channel.close()


def fork_server(work: Work) -> ForkServer:
    """Fork a server from this process as it is now, to fork children that each do `work`."""
    must_have_no_threads()
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        end_with(parent)
        serve(theirs, work)
    theirs.close()
    return ForkServer(ours)


def serve(connection: socket.socket, work: Work) -> NoReturn:
    """Fork this process for each order that comes, until whoever orders is gone."""
    orders = MessageChannel(connection)
    try:
        while (message := orders.receive()) is not None:
            if "wait" in message:
                orders.send({"code": os.waitstatus_to_exitcode(os.waitpid(message["wait"], 0)[1])})
                continue
            must_have_no_threads()
            server, theirs = os.getpid(), orders.take_descriptor()
            pid = os.fork()
            if pid == 0:
                orders.close()
                _carry_out(work, server, socket.socket(fileno=theirs), message)
            descriptor = os.pidfd_open(pid)
            orders.send({"pid": pid}, descriptor)
            os.close(descriptor)
            os.close(theirs)
    except ChannelClosed:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _carry_out(work: Work, server: int, connection: socket.socket, message: dict[str, Any]) -> NoReturn:
    code = 1
    try:
        end_with(server)
        os.environ.clear()
        os.environ.update(message["environment"])
        work(connection, message["order"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_with(parent: int) -> None:
    """End this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def must_have_no_threads() -> None:
    """Raise AssertionError where this process has more than one thread: a lock that another one holds at the fork would
    never be opened in the child."""
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads"
