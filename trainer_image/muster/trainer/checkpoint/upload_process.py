"""The rank's end of its upload process: started at once, given one save at a time, replaced when it dies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

from muster.trainer.checkpoint.channel import Channel, Closed, Message
from muster.trainer.checkpoint.memory import SharedMemory

LIVES_PER_SAVE = 3


class UploadProcess:
    """Not thread-safe but for `send_save`, which a staging thread may call while the rank only polls."""

    def __init__(self, init: Message, listener: socket.socket | None) -> None:
        self._init, self._listener = init, listener
        self._memories: dict[int, SharedMemory] = {}
        self._layout: Message | None = None
        self._save: Message | None = None
        self._lives_left = LIVES_PER_SAVE
        self.sent = 0  # bytes of the save in flight that the store has, as far as was heard
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def use_memory(self, slot: int, memory: SharedMemory) -> None:
        self._memories[slot] = memory
        self._tell({"do": "memory", "slot": slot, "bytes": memory.size}, memory.descriptor)

    def use_layout(self, size: int, pieces: dict[str, list[Any]]) -> None:
        self._layout = {"do": "layout", "bytes": size, "pieces": pieces}
        self._tell(self._layout)

    def send_save(self, save: Message) -> None:
        self._save, self._lives_left, self.sent = save, LIVES_PER_SAVE, 0
        self._tell(save)

    def poll(self, timeout_seconds: float = 0.0) -> Message | None:
        """The outcome of the save in flight, when there is one. Starts a new process where the old one died."""
        try:
            while (message := self._channel.receive(timeout_seconds)) is not None:
                timeout_seconds = 0.0  # progress is no reason to wait longer than was asked
                if self._save is None or message.get("seq") != self._save["seq"]:
                    continue
                if message["event"] == "outcome":
                    self._save = None
                    return message
                self.sent += message["sent"]
        except Closed:
            return self._replace()
        return None

    def abandon(self) -> None:
        """Give up the save in flight for good: a process that still read the memory would mix it with the next save."""
        self._save = None
        self._replace()

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Say that what is in the memory is not wanted any more, and see the process end."""
        self._tell({"do": "end"})
        self._channel.close()
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._listener is not None:
            self._listener.close()

    def _replace(self) -> Message | None:
        """A new process with all that the old one was told; the save in flight starts again, a limited number of
        times."""
        self._channel.close()
        self._process.kill()
        code = self._process.wait()
        self.sent = 0
        self._start()
        for message, descriptor in self._told():
            self._tell(message, descriptor)
        if self._save is None:
            return None
        self._lives_left -= 1
        if self._lives_left > 0:
            self._tell(self._save | {"again": True})
            return None
        error = (
            f"the upload process died {LIVES_PER_SAVE} times, the last time with exit code {code}; see this rank's log"
        )
        failed, self._save = self._save, None
        self._tell(failed | {"again": True, "failed": error})  # for rank 0 to know
        return {"event": "outcome", "seq": failed["seq"], "step": failed["step"], "committed": False, "error": error}

    def _told(self) -> list[tuple[Message, int | None]]:
        told: list[tuple[Message, int | None]] = []
        for slot, memory in self._memories.items():
            told.append(({"do": "memory", "slot": slot, "bytes": memory.size}, memory.descriptor))
        if self._layout is not None:
            told.append((self._layout, None))
        return told

    def _tell(self, message: Message, descriptor: int | None = None) -> None:
        try:
            self._channel.send(message, descriptor)
        except Closed:  # poll notices, and the next process is told all of it
            pass

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        passed = [theirs.fileno()] + ([self._listener.fileno()] if self._listener else [])
        module = "muster.trainer.checkpoint.uploader"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(os.getpid()), *map(str, passed)],
            pass_fds=passed,
            stdin=subprocess.DEVNULL,
            process_group=0,  # what is done to the rank's group must not end it: it may have to outlive the rank
        )
        theirs.close()
        self._channel = Channel(ours)
        self._tell(self._init)
