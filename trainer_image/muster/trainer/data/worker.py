"""python -m muster.trainer.data.worker DESCRIPTOR: a process that tokenises for another one, which started it."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from muster.trainer.data.processes import serve


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a person's Ctrl-C is for the one that started this
    with suppress(BrokenPipeError, ConnectionResetError):  # it is gone: so is whoever wants the answer
        serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
