"""The rank's end of its upload process: started at once, given one save at a time, replaced when it dies.

The first is forked while the rank is young, for then it shares the rank's memory and costs no start of an interpreter.
One that replaces it is a program of its own: by then the rank has torch, its threads and a GPU, and can't be forked.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from typing import Protocol

from muster.storage.settings import S3Settings, share_client
from muster.trainer.checkpoint.channel import ChannelClosed
from muster.trainer.checkpoint.memory import SharedMemory
from muster.trainer.checkpoint.messages import (
    EndOrder,
    FrozenNamed,
    NewFrozen,
    NewLayout,
    NewMemory,
    SaveChannel,
    SaveMessage,
    SaveOrder,
    SaveProgress,
    SaveResult,
    TensorSlices,
    UploadInit,
    UploadReady,
)
from muster.trainer.checkpoint.snapshot import LAYOUTS_KEPT
from muster.words.address import parse_address

LIVES_PER_SAVE = 3


class ProcessHandle(Protocol):
    """The little of subprocess.Popen that is needed here."""

    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class ForkedProcess:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:  # else the number may be another process's by now
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._code is None:
            ended, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
            elif deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the upload process", timeout or 0.0)
            else:
                time.sleep(0.01)
        return self._code


_young: list[tuple[ProcessHandle, SaveChannel]] = []  # forked, and not asked for yet


def fork_while_young(uri: str) -> None:
    """Fork the upload process that this process will need, to save under `uri`. To be called before any thread is
    there, and torch."""
    from muster.trainer.checkpoint import uploader

    with contextlib.suppress(Exception):  # whatever is wrong is said when a store is opened
        if parse_address(uri).scheme == "s3":
            share_client(S3Settings.from_environment(os.environ))
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    gc.freeze()  # a search for garbage would write to what both share
    try:
        pid = os.fork()
    except OSError:  # no more processes: it is tried again when it is needed
        ours.close()
        theirs.close()
        return
    if pid == 0:
        code = 1
        try:
            ours.close()
            os.setpgid(0, 0)  # as below
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            uploader.main(parent, theirs)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    theirs.close()
    _young.append((ForkedProcess(pid), SaveChannel(ours)))


def _start_anew() -> tuple[ProcessHandle, SaveChannel]:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "muster.trainer.checkpoint.uploader", str(os.getpid()), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        process_group=0,  # what is done to the rank's group must not end it: it may have to outlive the rank
    )
    theirs.close()
    return process, SaveChannel(ours)


class UploadProcess:
    """Upload process of this rank. It is not thread-safe except for `send_save`, which a staging thread may call while
    the rank only polls."""

    def __init__(self, init: UploadInit, listener: socket.socket | None) -> None:
        self._init, self._listener = init, listener
        self._memories: dict[int, SharedMemory] = {}
        self._layouts: list[NewLayout] = []
        self._frozen: tuple[NewFrozen | FrozenNamed, int | None] | None = None
        self._save: SaveOrder | None = None
        self._lives_left = LIVES_PER_SAVE
        self.sent = 0  # bytes of the save in flight that the store has, as far as was heard
        self.ready = False
        self.refused: str | None = None  # why the store will take no save, as the process found when it was ready
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def use_memory(self, slot: int, memory: SharedMemory) -> None:
        self._memories[slot] = memory
        self._send(NewMemory(slot=slot, bytes=memory.size), memory.descriptor)

    def use_layout(self, layout: NewLayout) -> None:
        """Send a layout of the files, which the orders of saves and snapshots name."""
        self._layouts = [*self._layouts, layout][-LAYOUTS_KEPT:]
        self._send(layout)

    def use_frozen(self, memory: SharedMemory, size: int, slices: TensorSlices) -> None:
        """No COMMIT names this rank's frozen weights: they are to be written with the next save."""
        self._frozen = NewFrozen(memory=memory.size, bytes=size, slices=slices), memory.descriptor
        self._send(*self._frozen)

    def frozen_is_named(self, step: int, tell: bool) -> None:
        """Note that the commit of `step` names the frozen weights, where there are any. `tell` says that there are some
        and that the process does not know it yet.
        """
        if tell or self._frozen is not None:
            self._frozen = FrozenNamed(step=step), None
        if tell and self._frozen is not None:
            self._send(*self._frozen)

    def send_save(self, save: SaveOrder) -> None:
        self._save, self._lives_left, self.sent = save, LIVES_PER_SAVE, 0
        self._send(save)

    def poll(self, timeout_seconds: float = 0.0) -> SaveResult | None:
        """The result of the save in flight, when there is one. Starts a new process where the old one died."""
        try:
            while (message := self._channel.receive(timeout_seconds)) is not None:
                timeout_seconds = 0.0  # progress is no reason to wait longer than was asked
                if isinstance(message, UploadReady):
                    self.ready, self.refused = True, message.refused
                elif self._save is None:
                    continue
                elif isinstance(message, SaveProgress) and message.seq == self._save.seq:
                    self.sent += message.sent
                elif isinstance(message, SaveResult) and message.seq == self._save.seq:
                    self._save = None
                    return message
        except ChannelClosed:
            return self._replace()
        return None

    def abandon(self) -> None:
        """Give up the save in flight for good: a process that still read the memory would mix it with the next save."""
        self._save = None
        self._replace()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Say that what is in the memory is not wanted any more, and see the process end."""
        self._send(EndOrder())
        self._channel.close()
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._listener is not None:
            self._listener.close()

    def _replace(self) -> SaveResult | None:
        """A new process with all that the old one was told; the save in flight starts again, a limited number of
        times."""
        self._channel.close()
        self._process.kill()
        code = self._process.wait()
        self.sent = 0
        self._start()
        for message, descriptor in self._received():
            self._send(message, descriptor)
        if self._save is None:
            return None
        self._lives_left -= 1
        if self._lives_left > 0:
            self._send(replace(self._save, again=True))
            return None
        error = (
            f"the upload process died {LIVES_PER_SAVE} times, the last time with exit code {code}; see this rank's log"
        )
        failed, self._save = self._save, None
        self._send(replace(failed, again=True, failed=error))  # for rank 0 to know
        return SaveResult(seq=failed.seq, step=failed.step, error=error)

    def _received(self) -> list[tuple[SaveMessage, int | None]]:
        messages: list[tuple[SaveMessage, int | None]] = []
        for slot, memory in self._memories.items():
            messages.append((NewMemory(slot=slot, bytes=memory.size), memory.descriptor))
        messages += [(layout, None) for layout in self._layouts]
        if self._frozen is not None:
            messages.append(self._frozen)
        return messages

    def _send(self, message: SaveMessage, descriptor: int | None = None) -> None:
        try:
            self._channel.send(message, descriptor)
        except ChannelClosed:  # poll notices, and the next process is told all of it
            pass

    def _start(self) -> None:
        self._process, self._channel = _young.pop() if _young else _start_anew()
        self._send(self._init, None if self._listener is None else self._listener.fileno())
