"""What is done with what dead ranks left in memory: found whole or not at all, agreed on, and worth it."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from muster.contract.spec import Keep
from muster.storage.store import open_store
from muster.trainer.checkpoint import snapshot
from muster.trainer.checkpoint.channel import Channel
from muster.trainer.checkpoint.coordinator import Coordinator, Job
from muster.trainer.checkpoint.emergency_save import AFTER_CRASH_SECONDS_MAX, worth_a_commit
from muster.trainer.checkpoint.memory import SharedMemory


def test_an_order_is_left_only_while_the_bytes_are_whole() -> None:
    memory = SharedMemory.create(100 + snapshot.ORDER_BYTES)
    assert snapshot.left_in(memory) is None, "fresh memory"
    snapshot.complete(memory, json.dumps({"step": 7, "rng": {"torch": "x" * 5000}}).encode())
    assert snapshot.left_in(memory) == {"step": 7, "rng": {"torch": "x" * 5000}}
    snapshot.begin(memory)
    assert snapshot.left_in(memory) is None, "they are being changed"
    snapshot.complete(memory, json.dumps({"rng": "x" * snapshot.ORDER_BYTES}).encode())
    assert snapshot.left_in(memory) is None, "one that is too long is not left"
    memory.close()


def coordinator(folder: Path, world: int = 3) -> Coordinator:
    job = Job({}, "uid", attempt=1, fence=None, world_size=world, keep=Keep())
    return Coordinator(open_store(f"file://{folder}"), job, None, "token")


def left(*steps: int, at: float = 1e12) -> dict[str, list[float]]:
    return {str(step): [step, at] for step in steps}


def chosen(there: Coordinator, by_rank: list[dict[str, list[float]]], seconds: float = 20.0) -> list[int | None]:
    """What each rank is told; the last to tell is rank 0."""
    answers: dict[int, int | None] = {}

    def tell(rank: int) -> None:
        answers[rank] = there.choose(rank, by_rank[rank], seconds)

    threads = [threading.Thread(target=tell, args=(rank,)) for rank in reversed(range(len(by_rank)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[rank] for rank in range(len(by_rank))]


@pytest.mark.parametrize(
    ("by_rank", "step"),
    [
        ([left(8, 9), left(9, 10), left(8, 9)], 9),
        ([left(8, 9), left(9), left(8)], None),
        ([left(8, 9), left(), left(8, 9)], None),
        ([left(9, at=0.0), left(9), left(9)], 9),
    ],
)
def test_the_newest_step_that_all_left_is_chosen(
    tmp_path: Path, by_rank: list[dict[str, list[float]]], step: int | None
) -> None:
    assert chosen(coordinator(tmp_path), by_rank) == [step] * 3


def test_who_never_tells_is_not_waited_for_without_end(tmp_path: Path) -> None:
    assert coordinator(tmp_path).choose(0, left(3), 0.05) is None


def test_a_save_that_a_dead_rank_had_no_copy_of_ends_at_once(tmp_path: Path) -> None:
    """Its peers may have begun to upload it: they must not wait for the report until the deadline."""
    there = coordinator(tmp_path, world=2)
    there.report(0, {"seq": 5, "step": 5, "file": {}, "slices": {}, "rng": {}})
    threading.Timer(0.05, lambda: there.choose(1, left(4), 0.0)).start()
    outcome = there.settle({"seq": 5, "step": 5}, deadline=time.monotonic() + 60)
    assert (outcome["committed"], outcome["error"]) == (False, "rank 1 died before its copy was whole")


def test_who_waits_for_a_save_that_rank_0_never_ordered_is_told_and_tells(tmp_path: Path) -> None:
    """Rank 0 died between the copies of its peers and its own order: they have the step, and so has its memory."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        job = Job({}, "uid", attempt=1, fence=None, world_size=2, keep=Keep())
        there = Coordinator(open_store(f"file://{tmp_path}"), job, listener, "token")
        peer = Channel(socket.create_connection(listener.getsockname()[:2]))
        peer.send({"token": "token", "rank": 1})
        report = {"seq": 5, "step": 5, "file": {"key": "of rank 1"}, "slices": {}, "rng": {}}
        peer.send(report)
        answers: list[int | None] = []
        rank_0 = threading.Thread(target=lambda: answers.append(there.choose(0, left(4, 5), 20.0)))
        rank_0.start()
        told = peer.receive(20)
        assert told is not None
        assert (told["seq"], told["error"]) == (5, "rank 0 died before its copy was whole")
        peer.send({"left": left(4, 5)})
        assert peer.receive(20) == {"event": "chosen", "step": 5}
        rank_0.join()
        assert answers == [5]
        peer.send(report)  # this time it counts
        there.wait_for(5, [1], 20.0)
        assert there.settle({"seq": 5, "step": 5}, deadline=0.0)["error"].startswith("no report came from rank 0")
        peer.close()


def test_an_upload_after_a_crash_must_be_worth_its_time() -> None:
    assert worth_a_commit(lost_seconds=0.3, upload_seconds=1.0), "nobody minds a second"
    assert worth_a_commit(lost_seconds=30.0, upload_seconds=20.0)
    assert not worth_a_commit(lost_seconds=10.0, upload_seconds=20.0)
    assert not worth_a_commit(lost_seconds=10_000.0, upload_seconds=AFTER_CRASH_SECONDS_MAX + 1), "taken for a hang"
