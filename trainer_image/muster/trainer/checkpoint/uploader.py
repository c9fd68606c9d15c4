"""The upload process of one rank: reads the staged file in shared memory, stores it, and reports.

Started and watched by the Saver. It imports no torch, so that it starts in a moment, and shares neither the interpreter
nor a process group with training. Where its rank dies without a farewell, it first saves what the rank left in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from muster.storage.errors import StoreError, StoreRefusal
from muster.storage.opening import open_store
from muster.storage.store import Store
from muster.trainer.checkpoint.channel import ChannelClosed
from muster.trainer.checkpoint.coordinator import OTHERS_SECONDS_MAX, SaveCoordinator, SavedJob
from muster.trainer.checkpoint.memory import SharedMemory
from muster.trainer.checkpoint.messages import (
    EndOrder,
    FrozenNamed,
    NewFrozen,
    NewLayout,
    NewMemory,
    PeerHello,
    PriorityRequest,
    SaveChannel,
    SaveMessage,
    SaveOrder,
    SaveProgress,
    SaveResult,
    ShareReport,
    StepChosen,
    StepsLeft,
    StepTimes,
    TensorSlices,
    UploadInit,
    UploadReady,
)
from muster.trainer.checkpoint.node_cache import node_cache
from muster.trainer.checkpoint.snapshot import LAYOUTS_KEPT, left_in
from muster.trainer.launch.process_control import die_with_adopter, has_adopter, name_process
from muster.words.checkpoint import FileEntry, frozen_key, shard_key
from muster.words.names import STEP_LOG, Env
from muster.worker.names import AFTER_CRASH_SECONDS_MAX

# Before the end that the log of steps had when a save was ordered: what it had for that save is behind it.
STEP_LOG_BYTES_BEFORE = 1 << 20


class FrozenShare:
    """This rank's part of the weights that are never trained, while no COMMIT names it."""

    def __init__(self, memory: SharedMemory, size: int, slices: TensorSlices) -> None:
        self._memory, self.data, self.slices = memory, memory.view(size), slices
        self.entry: FileEntry | None = None  # where it was written; None before that

    def close(self) -> None:
        self.data.release()
        self._memory.close()


class ShareUploader:
    """Uploader of a rank's share of each save. `listener` is the socket on which the coordinator meets the other ranks'
    uploaders; None but on rank 0."""

    def __init__(self, rank_process: SaveChannel, init: UploadInit, listener: socket.socket | None) -> None:
        self._to_rank, self._init = rank_process, init
        self._rank, self._world = init.rank, init.world_size
        self._store: Store = open_store(init.uri)
        self._memories: dict[int, SharedMemory] = {}
        self._layouts: dict[int, NewLayout] = {}
        self._frozen: FrozenShare | None = None
        self._frozen_named = False  # by a COMMIT
        self._cache = node_cache(init.uri, init.job_uid)
        self._coordinator = self._make_coordinator(listener) if self._rank == 0 else None
        self._peer: SaveChannel | None = None
        self._rank_is_dead = False
        self._committed_records: list[str] = []  # of the newest step that was committed
        self._records_from = 0  # the byte of the log of steps behind which they are written, if they are

    def warm_up(self) -> str | None:
        """Make ready for the first save. Returns why the store will take none, where it says so for good."""
        refused: str | None = None
        if (entries := self._init.entries) is not None:
            entries.register()
        try:
            self._store.warm_up()
        except StoreRefusal as error:
            refused = str(error)
        except StoreError:  # a save will say so, should it still be so
            pass
        if self._coordinator is None:
            with contextlib.suppress(ChannelClosed, OSError):  # a save will try again
                self._peer = self._connect(5.0)
        gc.collect()
        with contextlib.suppress(AttributeError):  # glibc's: what starting took and needs no more
            ctypes.CDLL(None).malloc_trim(0)
        return refused

    def run(self) -> None:
        """Until the rank says that it needs us no more; or dies, and then until what it left is saved."""
        try:
            while self._obey(self._to_rank.receive()):
                pass
        except ChannelClosed:
            if has_adopter():
                self._save_what_is_left()
                self._write_missing_records()

    def _obey(self, order: SaveMessage | None) -> bool:
        """Do what the rank orders. False means that there is nothing more to do."""
        match order:
            case NewMemory():
                self._attach(order.slot, self._to_rank.take_descriptor(), order.bytes)
            case NewLayout():
                self._layouts = dict([*self._layouts.items(), (order.number, order)][-LAYOUTS_KEPT:])
            case NewFrozen():
                memory = SharedMemory.attach(self._to_rank.take_descriptor(), order.memory)
                self._use_frozen(FrozenShare(memory, order.bytes, order.slices), named=False)
            case FrozenNamed():
                self._use_frozen(None, named=True)
                if self._coordinator is not None:
                    self._coordinator.use_frozen(order.step)
            case SaveOrder():
                result = self._save(order)
                self._notify_rank(result)
                if result.committed and self._coordinator is not None:
                    self._coordinator.collect(order.step)
        return not isinstance(order, EndOrder)

    def _save_what_is_left(self) -> None:
        """Commit the newest step that the memories of all ranks hold, if there is one and it is worth it."""
        deadline, self._rank_is_dead = time.monotonic() + AFTER_CRASH_SECONDS_MAX, True
        leftovers = [(slot, left_in(memory)) for slot, memory in self._memories.items()]
        whole = ((slot, order) for slot, order in leftovers if order is not None and order.layout in self._layouts)
        orders = {order.step: replace(order, slot=slot) for slot, order in whole}
        step = self._agree_on({step: (order.seq, order.at) for step, order in orders.items()})
        if step not in orders:
            return
        result = self._save(replace(orders[step], deadline_seconds=deadline - time.monotonic()))
        if self._coordinator is not None:
            how = "committed from" if result.committed else f"not committed ({result.error}) from"
            print(f"step {step} was {how} what the ranks left in memory", file=sys.stderr, flush=True)

    def _write_missing_records(self) -> None:
        """Write what the dead rank has not written any more of the log of its steps up to the one that is committed:
        the next attempt begins after it, and would leave a hole in every curve."""
        if not (folder := os.environ.get(Env.WORKER_DIR)) or not self._committed_records:
            return
        with contextlib.suppress(OSError), Path(folder, STEP_LOG).open("rb+") as file:
            file.seek(self._records_from)
            lacking, last = dict.fromkeys(self._committed_records), b"\n"
            for last in file:
                lacking.pop(last.decode(errors="replace").rstrip("\n"), None)
            missing = "".join(f"{line}\n" for line in lacking)
            # A line that was broken off ends here, and is written whole.
            file.write((b"" if last.endswith(b"\n") else b"\n") + missing.encode())
            sys.stdout.write(missing)
            sys.stdout.flush()

    def _agree_on(self, left: StepTimes) -> int | None:
        """The step that all ranks save now that they are dead; None where no step can be saved."""
        if self._coordinator is not None:
            return self._coordinator.choose(0, left, OTHERS_SECONDS_MAX)
        try:
            if self._peer is None:
                self._peer = self._connect(1.0)
            self._peer.send(StepsLeft(left=left))
            deadline = time.monotonic() + OTHERS_SECONDS_MAX
            while (answer := self._peer.receive(max(deadline - time.monotonic(), 0))) is not None:
                if isinstance(answer, StepChosen):
                    return answer.step
        except (ChannelClosed, OSError):  # rank 0's is gone: nobody can commit
            pass
        return None

    def _notify_rank(self, message: SaveMessage) -> None:
        with contextlib.suppress(ChannelClosed):  # it has died: what is under way is finished first
            self._to_rank.send(message)

    def _save(self, order: SaveOrder) -> SaveResult:
        started, deadline = time.monotonic(), time.monotonic() + order.deadline_seconds
        records_from = max(0, _step_log_bytes() - STEP_LOG_BYTES_BEFORE)
        key = shard_key(order.step, self._init.attempt, self._rank, self._world)
        if order.again and self._coordinator is not None and self._coordinator.committed(order.step, key):
            return SaveResult(seq=order.seq, step=order.step, committed=True)
        if not order.again:
            self._let_others_go_first(order)
        with self._copy_to_cache(key, order) as copied:
            report = self._write(key, order)
            if self._coordinator is not None:
                self._coordinator.report(0, report)
                result = self._coordinator.settle(order, deadline)
            else:
                result = self._ask(report, deadline)
        if result.committed and (entries := self._init.entries) is not None:
            try:
                entries.reveal(order.step)
            except OSError as error:
                result = replace(result, committed=False, error=f"{entries.watched}: {error}")
        if result.committed:
            self._committed_records, self._records_from = list(order.records), records_from
            if self._cache is not None and copied.is_set():
                self._cache.drop_all_but(order.step, frozen_too=self._frozen is not None)
            self._use_frozen(None, named=self._frozen is not None or self._frozen_named)
        written = sum(file.bytes for file in (report.file, report.frozen_file) if file is not None)
        return replace(result, bytes=written, seconds=time.monotonic() - started)

    @contextlib.contextmanager
    def _copy_to_cache(self, key: str, order: SaveOrder) -> Iterator[threading.Event]:
        """Keep a copy on the node while the block runs; the copying is over before the memory may be used again. The
        event that is given is set where there is a whole copy.
        """
        done = threading.Event()
        if self._cache is None or order.failed:
            yield done
            return
        cache, data, frozen = self._cache, self._file(order), self._frozen

        def keep() -> None:
            if frozen is not None:
                cache.keep(self._frozen_key(order), frozen.data)
            if cache.keep(key, data):
                done.set()

        copy = threading.Thread(target=keep, name="node-cache")
        copy.start()
        try:
            yield done
        finally:
            copy.join()
            data.release()

    def _write(self, key: str, order: SaveOrder) -> ShareReport:
        """Write and verify this rank's file, and return the report on it."""
        report = ShareReport(seq=order.seq, step=order.step, again=order.again, error=order.failed)
        if order.failed:
            return report

        def progress(sent: int) -> None:
            self._notify_rank(SaveProgress(seq=order.seq, sent=sent))

        layout, frozen = self._layouts[order.layout], self._frozen
        try:
            file = self._store.write(key, self._file(order), progress)
            self._store.verify(file)
            if frozen is not None and frozen.entry is None:
                written = self._store.write(self._frozen_key(order), frozen.data, progress)
                self._store.verify(written)
                frozen.entry = written
            if (entries := self._init.entries) is not None:
                entries.add_shards(order.step, key)
        except (StoreError, OSError) as error:
            return replace(report, error=str(error), refused=isinstance(error, StoreRefusal))
        return replace(
            report,
            file=file,
            slices=layout.slices,
            stateless=layout.stateless,
            groups=layout.groups,
            rng=order.rng,
            frozen_file=frozen.entry if frozen is not None else None,
            frozen_slices=frozen.slices if frozen is not None else {},
            frozen_named=self._frozen_named,
        )

    def _frozen_key(self, order: SaveOrder) -> str:
        """Return the key of this rank's frozen weights, which may not be written yet."""
        if self._frozen is not None and self._frozen.entry is not None:
            return self._frozen.entry.key
        return frozen_key(order.step, self._init.attempt, self._rank, self._world)

    def _use_frozen(self, frozen: FrozenShare | None, named: bool) -> None:
        if self._frozen is not None:
            self._frozen.close()
        self._frozen, self._frozen_named = frozen, named

    def _let_others_go_first(self, order: SaveOrder) -> None:
        """Leave the store to ranks whose nodes are about to go, until they have written or the time for it is over."""
        ranks, seconds = order.first, order.first_seconds
        if not ranks or self._rank in ranks or order.failed:
            return
        if self._coordinator is not None:
            return self._coordinator.wait_for(order.seq, ranks, seconds)
        try:
            if self._peer is None:
                self._peer = self._connect(seconds)
            self._peer.send(PriorityRequest(seq=order.seq, first=ranks, first_seconds=seconds))
            self._peer.receive(seconds)
        except (ChannelClosed, OSError):  # then all go at once, and the report is sent over a new connection
            self._peer = None

    def _ask(self, report: ShareReport, deadline: float) -> SaveResult:
        """Report to rank 0 and wait for the result, through lost connections and a replaced coordinator."""
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self._peer is None:
                    self._peer = self._connect(left)
                self._peer.send(report)
                while (answer := self._peer.receive(max(deadline - time.monotonic(), 0))) is not None:
                    if isinstance(answer, SaveResult) and answer.seq == report.seq:
                        return answer
            except (ChannelClosed, OSError):
                if self._peer is not None:
                    self._peer.close()
                if self._rank_is_dead:  # so is rank 0, and nobody replaces its process
                    break
                self._peer, report = None, replace(report, again=True)
                time.sleep(0.05)
        error = "rank 0 did not say in time whether the checkpoint was committed"
        return SaveResult(seq=report.seq, step=report.step, error=error)

    def _connect(self, timeout_seconds: float) -> SaveChannel:
        connection = socket.create_connection((self._init.host, self._init.port), timeout=min(timeout_seconds, 5))
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = SaveChannel(connection)
        channel.send(PeerHello(token=self._init.token, rank=self._rank))
        return channel

    def _attach(self, slot: int, descriptor: int, size: int) -> None:
        if slot in self._memories:
            self._memories.pop(slot).close()
        self._memories[slot] = SharedMemory.attach(descriptor, size)

    def _file(self, order: SaveOrder) -> memoryview:
        return self._memories[order.slot].view(self._layouts[order.layout].bytes)

    def _make_coordinator(self, listener: socket.socket | None) -> SaveCoordinator:
        init = self._init
        job = SavedJob(
            identity=init.identity,
            job_uid=init.job_uid,
            attempt=init.attempt,
            worker=init.worker,
            incarnation=init.incarnation,
            fence=init.fence,
            world_size=init.world_size,
            keep=init.keep,
            entries=init.entries,
        )
        return SaveCoordinator(self._store, job, listener, init.token)


def _step_log_bytes() -> int:
    """The size of the log of steps by now; 0 where there is none."""
    with contextlib.suppress(OSError, KeyError):
        return Path(os.environ[Env.WORKER_DIR], STEP_LOG).stat().st_size
    return 0


def main(parent: int, connection: socket.socket) -> None:
    """Serve the rank whose process is `parent` and that has the other end of `connection`."""
    # The rank answers signals: its emergency save needs this process until the rank itself ends.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_with_adopter(parent)
    name_process("muster-upload")
    channel = SaveChannel(connection)
    with contextlib.suppress(ChannelClosed):
        init = channel.receive()
        assert isinstance(init, UploadInit)
        listener = socket.socket(fileno=channel.take_descriptor()) if init.rank == 0 else None
        uploader = ShareUploader(channel, init, listener)
        refused = uploader.warm_up()
        with contextlib.suppress(ChannelClosed):  # the rank has died already: what it left is saved all the same
            channel.send(UploadReady(refused=refused))
        uploader.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
