"""The upload process of one rank: reads the staged file in shared memory, stores it, and reports.

Started and watched by the Saver; it dies with its rank. It imports no torch, so that it starts in a moment, and shares
neither the interpreter nor a process group with training.
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
from typing import Any

from muster.contract.checkpoint import shard_key
from muster.contract.spec import Keep
from muster.trainer.checkpoint.channel import Channel, Closed, Message
from muster.trainer.checkpoint.coordinator import Coordinator, Job
from muster.trainer.checkpoint.local_tier import local_tier
from muster.trainer.checkpoint.memory import SharedMemory
from muster.trainer.checkpoint.store import Store, StoreError, open_store

_PR_SET_PDEATHSIG = 1


class Uploader:
    """init: {uri, rank, world_size, job_uid, attempt, fence, token, coordinator: [host, port], identity, keep, …}."""

    def __init__(self, rank_process: Channel, init: Message, listener: socket.socket | None) -> None:
        self._to_rank, self._init = rank_process, init
        self._rank, self._world = int(init["rank"]), int(init["world_size"])
        self._store: Store = open_store(init["uri"])
        self._memory: SharedMemory | None = None
        self._layout: Message = {}
        self._tier = local_tier(init["uri"], init["job_uid"])
        self._coordinator = self._make_coordinator(listener) if self._rank == 0 else None
        self._peer: Channel | None = None

    def warm_up(self) -> None:
        with contextlib.suppress(StoreError):  # a save will say so, should it still be so
            self._store.warm_up()
        gc.collect()
        with contextlib.suppress(AttributeError):  # glibc's: what starting took and needs no more
            ctypes.CDLL(None).malloc_trim(0)

    def run(self) -> None:
        while True:
            order = self._to_rank.receive()
            assert order is not None
            if order["do"] == "memory":
                self._attach(self._to_rank.take_descriptor(), int(order["bytes"]))
            elif order["do"] == "layout":
                self._layout = order
            elif order["do"] == "save":
                outcome = self._save(order)
                self._to_rank.send(outcome)
                if outcome["committed"] and self._coordinator is not None:
                    self._coordinator.collect(order["step"])

    def _save(self, order: Message) -> Message:
        started, deadline = time.monotonic(), time.monotonic() + float(order["deadline_seconds"])
        key = shard_key(order["step"], self._init["attempt"], self._rank, self._world)
        again = bool(order.get("again"))
        if again and self._coordinator is not None and self._coordinator.committed(order["step"], key):
            return {"event": "outcome", "seq": order["seq"], "step": order["step"], "committed": True, "error": None}
        if not again:
            self._let_others_go_first(order)
        with self._copy_to_tier(key, order) as copied:
            report = {"seq": order["seq"], "step": order["step"], "again": again} | self._write(key, order)
            if self._coordinator is not None:
                self._coordinator.report(0, report)
                outcome = self._coordinator.settle(order, deadline)
            else:
                outcome = self._ask(report, deadline)
        if self._tier is not None and outcome["committed"] and copied.is_set():
            self._tier.drop_all_but(order["step"])
        written = (report.get("file") or {}).get("bytes", 0)
        return outcome | {"bytes": written, "seconds": time.monotonic() - started}

    @contextlib.contextmanager
    def _copy_to_tier(self, key: str, order: Message) -> Iterator[threading.Event]:
        """Meanwhile, keep a copy on the node; over before the memory may be used again. Set: there is a whole one."""
        done = threading.Event()
        if self._tier is None or self._memory is None or order.get("failed"):
            yield done
            return
        tier, data = self._tier, self._memory.view(int(self._layout["bytes"]))

        def keep() -> None:
            if tier.keep(key, data):
                done.set()

        copy = threading.Thread(target=keep, name="local-tier")
        copy.start()
        try:
            yield done
        finally:
            copy.join()
            data.release()

    def _write(self, key: str, order: Message) -> Message:
        """The report on this rank's file: written and verified, or why not."""
        if order.get("failed"):
            return {"error": order["failed"]}
        assert self._memory is not None

        def told(sent: int) -> None:
            self._to_rank.send({"event": "progress", "seq": order["seq"], "sent": sent})

        try:
            entry = self._store.write(key, self._memory.view(int(self._layout["bytes"])), told)
            self._store.verify(entry)
        except (StoreError, OSError) as error:
            return {"error": str(error)}
        return {"file": entry.model_dump(mode="json"), "pieces": self._layout["pieces"], "rng": order["rng"]}

    def _let_others_go_first(self, order: Message) -> None:
        """Leave the store to ranks whose nodes are about to go, until they have written or the time for it is over."""
        ranks, seconds = order.get("first", ()), float(order.get("first_seconds", 0))
        if not ranks or self._rank in ranks or order.get("failed"):
            return
        if self._coordinator is not None:
            return self._coordinator.wait_for(order["seq"], ranks, seconds)
        try:
            if self._peer is None:
                self._peer = self._connect(seconds)
            self._peer.send({"seq": order["seq"], "first": ranks, "first_seconds": seconds})
            self._peer.receive(seconds)
        except (Closed, OSError):  # then all go at once, and the report is sent over a new connection
            self._peer = None

    def _ask(self, report: Message, deadline: float) -> Message:
        """Report to rank 0 and wait for the outcome, through lost connections and a replaced coordinator."""
        while (left := deadline - time.monotonic()) > 0:
            try:
                if self._peer is None:
                    self._peer = self._connect(left)
                self._peer.send(report)
                while (answer := self._peer.receive(max(deadline - time.monotonic(), 0))) is not None:
                    if answer.get("event") == "outcome" and answer.get("seq") == report["seq"]:
                        return answer
            except (Closed, OSError):
                if self._peer is not None:
                    self._peer.close()
                self._peer, report = None, report | {"again": True}
                time.sleep(0.05)
        error = "rank 0 did not say in time whether the checkpoint was committed"
        return {"event": "outcome", "seq": report["seq"], "step": report["step"], "committed": False, "error": error}

    def _connect(self, timeout_seconds: float) -> Channel:
        host, port = self._init["coordinator"]
        connection = socket.create_connection((host, int(port)), timeout=min(timeout_seconds, 5))
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel = Channel(connection)
        channel.send({"token": self._init["token"], "rank": self._rank})
        return channel

    def _attach(self, descriptor: int, size: int) -> None:
        if self._memory is not None:
            self._memory.close()
        self._memory = SharedMemory.attach(descriptor, size)

    def _make_coordinator(self, listener: socket.socket | None) -> Coordinator:
        init: dict[str, Any] = self._init
        job = Job(
            identity=init["identity"],
            job_uid=init["job_uid"],
            attempt=int(init["attempt"]),
            fence=init["fence"],
            world_size=self._world,
            keep=Keep.model_validate(init["keep"]),
        )
        return Coordinator(self._store, job, listener, init["token"])


def main(arguments: list[str]) -> int:
    """`python -m muster.trainer.checkpoint.uploader <parent's pid> <socket> [<listening socket>]`"""
    # The rank answers signals: its emergency save needs this process until the rank itself ends.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent, descriptor, *listening = (int(argument) for argument in arguments)
    if os.getppid() != parent:  # it died before the line above
        return 0
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        init = channel.receive()
        assert init is not None
        uploader = Uploader(channel, init, socket.socket(fileno=listening[0]) if listening else None)
        uploader.warm_up()
        channel.send({"event": "ready"})
        uploader.run()
    except Closed:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
