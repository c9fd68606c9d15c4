"""The machine of a PostgreSQL server, as a client sees it over TCP: it may go dark, which ends no connection."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
from collections.abc import Iterator

from tests.integration.api.postgres import PostgresServer

_SO_ATTACH_FILTER = 26  # Linux; Python has no name for it
# A socket filter of one instruction (BPF_RET, 0): the kernel drops what arrives before TCP sees it.
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


class Machine:
    """Forwards a port of its own to the server's socket."""

    def __init__(self, server: PostgresServer) -> None:
        self._path = str(server.folder / ".s.PGSQL.5432")
        self._sockets: list[socket.socket] = []
        self._dark = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._serve(self._listener)

    def go_dark(self) -> None:
        """Lose the power: nothing is acknowledged, answered, refused or closed from now on."""
        self._dark = True
        program = bytes(_Program(1, ctypes.addressof(_DROP_ALL)))
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    def come_back(self) -> None:
        """Start anew at the same address: what was connected before is known no more."""
        self.close()
        self._dark = False
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._serve(self._listener)

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._sockets = []

    def _serve(self, listener: socket.socket) -> None:
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.socket(socket.AF_UNIX)
                try:
                    server.connect(self._path)
                except OSError:
                    client.close()
                    continue
                self._sockets.append(client)
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if self._dark:
                    return
                target.sendall(data)
        if not self._dark:
            for each in (source, target):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def machine_of(server: PostgresServer) -> Iterator[Machine]:
    machine = Machine(server)
    try:
        yield machine
    finally:
        machine.close()
