"""Messages between processes: JSON behind four bytes of length, over a socket. A message may carry a file descriptor.
Nothing is pickled."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from typing import Any

Message = dict[str, Any]
_LENGTH = struct.Struct("!I")
_BYTES_MAX = 1 << 30
_DESCRIPTORS_MAX = 8


class ChannelClosed(Exception):
    """The other side is gone."""


class MessageChannel:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()
        self._sending = threading.Lock()  # messages of several threads must not mix
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, descriptor: int | None = None) -> None:
        self.send_bytes(json.dumps(message, separators=(",", ":")).encode(), descriptor)

    def send_bytes(self, body: bytes, descriptor: int | None = None) -> None:
        """Send a message that is JSON already. Raises ChannelClosed."""
        frame = memoryview(_LENGTH.pack(len(body)) + body)
        try:
            with self._sending:
                if descriptor is not None:
                    frame = frame[socket.send_fds(self._socket, [frame[:1]], [descriptor]) :]
                self._socket.sendall(frame)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_seconds: float | None = None) -> Message | None:
        """The next message; None when none came in time. Raises ChannelClosed."""
        body = self.receive_bytes(timeout_seconds)
        return None if body is None else json.loads(body)

    def receive_bytes(self, timeout_seconds: float | None = None) -> bytes | None:
        """The next message as JSON; None when none came in time. Raises ChannelClosed."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while (size := self._frame_bytes()) is None or len(self._received) < size:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if not select.select([self._socket], [], [], left)[0]:
                return None
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 20, _DESCRIPTORS_MAX)
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the other side closed the connection")
            self._received += data
            self._descriptors += descriptors
        body = bytes(self._received[_LENGTH.size : size])
        del self._received[:size]
        return body

    def take_descriptor(self) -> int:
        """The oldest descriptor that came and was not taken; one sent with a message is here when the message is."""
        return self._descriptors.pop(0)

    def close(self) -> None:
        self._socket.close()

    def _frame_bytes(self) -> int | None:
        if len(self._received) < _LENGTH.size:
            return None
        size: int = _LENGTH.unpack_from(self._received)[0]
        if size > _BYTES_MAX:
            raise ChannelClosed(f"a message claims {size} bytes")
        return _LENGTH.size + size
