"""Ports for servers that are started a moment after they were told where."""

import random
import socket

# Below those that the kernel gives to whoever asks for any (Linux: 32768 on), and beside the local world's own.
_PORTS = range(12_000, 19_000)


def free_port() -> int:
    """One that nobody listens on, and that nobody gets by chance before it is used."""
    for port in random.SystemRandom().sample(_PORTS, 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port among 200")
