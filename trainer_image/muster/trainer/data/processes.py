"""Tokenises in several processes: what goes in as batches comes out in the same order."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeVar

from muster.trainer.data.encode import BatchEncoder, EncodedDocuments, EncodingWork
from muster.trainer.errors import StorageError, UserError
from muster.worker.cores import usable_cores

# A process takes about half a second to start; this much text takes one core several seconds.
ALONE_BYTES_MAX = 16 << 20
PROCESSES_MAX: Final = 32  # of which one process that reads and writes can keep up with
ENVIRON: Final = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class WorkBatch(Protocol):
    @property
    def for_others(self) -> Sequence[Any]: ...


B = TypeVar("B", bound=WorkBatch)


class FailedBatch(str):
    """Reason for which another process could not encode a batch, where the batch is not at fault."""


class RefusedBatch(str):
    """Fault in a batch, as a message for the user."""


def processes_for(size: int) -> int:
    """Return the number of processes that prepare so many bytes; 1 means this process alone."""
    return 1 if size < ALONE_BYTES_MAX else min(usable_cores(), PROCESSES_MAX)


def in_order(batches: Iterable[B], work: EncodingWork, processes: int) -> Iterator[tuple[B, EncodedDocuments]]:
    """Each batch with what becomes of it. At most two for each process are on their way. Raises UserError for the first
    record that is wrong, StorageError where a process is lost."""
    if processes == 1:
        encoder = BatchEncoder(work)
        yield from ((batch, encoder.encode(batch.for_others)) for batch in batches)
        return
    with _started(work, processes) as submit:
        waiting = deque[tuple[B, Future[EncodedDocuments]]]()
        for batch in batches:
            waiting.append((batch, submit(batch.for_others)))
            if len(waiting) >= 2 * processes:
                first, encoded = waiting.popleft()
                yield first, encoded.result()
        for last, encoded in waiting:
            yield last, encoded.result()


@contextmanager
def _started(work: EncodingWork, count: int) -> Iterator[Callable[[Sequence[Any]], Future[EncodedDocuments]]]:
    idle = SimpleQueue[_EncodingProcess]()

    def ask(units: Sequence[Any]) -> EncodedDocuments:
        process = idle.get()
        try:
            return process.encode(units)
        finally:
            idle.put(process)

    with ExitStack() as ending:
        threads = ThreadPoolExecutor(count, "tokenise")
        ending.callback(threads.shutdown, cancel_futures=True)  # last, when no thread waits for a process any more
        for _ in range(count):
            process = _EncodingProcess(work)
            ending.callback(process.end)
            idle.put(process)
        yield lambda units: threads.submit(ask, units)


class _EncodingProcess:
    """A process of worker.py. It ends with this one, for then its connection does."""

    def __init__(self, work: EncodingWork) -> None:
        self._work: EncodingWork | None = work
        self._connection, theirs = Pipe()
        descriptor = theirs.fileno()
        command = [sys.executable, "-m", "muster.trainer.data.worker", str(descriptor)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[descriptor], env=os.environ | ENVIRON
        )
        theirs.close()

    def encode(self, units: Sequence[Any]) -> EncodedDocuments:
        """Raises UserError, StorageError."""
        try:
            if self._work is not None:
                self._connection.send(self._work)
                self._work = None
            self._connection.send(units)
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise StorageError(
                f"a process that tokenises ended with {self._process.wait()} (-9: it was killed, as where memory runs "
                "out); what was prepared is kept, so start again, with more memory or fewer cores"
            ) from None
        if isinstance(answer, RefusedBatch):
            raise UserError(str(answer))
        if isinstance(answer, FailedBatch):
            raise RuntimeError(f"a process that tokenises failed:\n{answer}")
        assert isinstance(answer, EncodedDocuments)
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(connection: Connection) -> None:
    """Do the work that comes through a connection until its other end is gone."""
    encoder: BatchEncoder | None = None
    while True:
        try:
            given = connection.recv()
        except EOFError:
            return
        if encoder is None:
            encoder = BatchEncoder(given)
            continue
        connection.send(_answer(encoder, given))


def _answer(encoder: BatchEncoder, units: Sequence[Any]) -> EncodedDocuments | RefusedBatch | FailedBatch:
    try:
        return encoder.encode(units)
    except UserError as error:
        return RefusedBatch(str(error))
    except Exception:
        return FailedBatch(traceback.format_exc())
