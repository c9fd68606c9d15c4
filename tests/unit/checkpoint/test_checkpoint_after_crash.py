"""What is done with what dead ranks left in memory: found whole or not at all, agreed on, and worth it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.polling import WAIT_SECONDS_MAX

from muster.storage.opening import open_store
from muster.trainer.checkpoint import snapshot
from muster.trainer.checkpoint.commits import read_commit
from muster.trainer.checkpoint.coordinator import SaveCoordinator, SavedJob
from muster.trainer.checkpoint.emergency_save import worth_a_commit
from muster.trainer.checkpoint.memory import SharedMemory
from muster.trainer.checkpoint.messages import (
    NewLayout,
    NewMemory,
    PeerHello,
    SaveChannel,
    SaveOrder,
    SaveResult,
    ShareReport,
    StepChosen,
    StepsLeft,
    StepTimes,
    UploadInit,
    encode,
)
from muster.trainer.checkpoint.optimizer_state import settings_of
from muster.trainer.checkpoint.staging import StagingMemory
from muster.trainer.checkpoint.uploader import STEP_LOG_BYTES_BEFORE, ShareUploader
from muster.trainer.launch.process_control import LAUNCHER
from muster.words.checkpoint import FileEntry
from muster.words.job import Keep
from muster.words.names import STEP_LOG, Env
from muster.worker.names import AFTER_CRASH_SECONDS_MAX


def test_an_order_is_left_only_while_the_bytes_are_whole() -> None:
    memory = SharedMemory.create(100 + snapshot.ORDER_BYTES)
    assert snapshot.left_in(memory) is None, "fresh memory"
    order = SaveOrder(seq=1, step=7, deadline_seconds=9.0, rng={"torch": "x" * 5000})
    snapshot.complete(memory, encode(order))
    assert snapshot.left_in(memory) == order
    snapshot.begin(memory)
    assert snapshot.left_in(memory) is None, "they are being changed"
    snapshot.complete(memory, encode(replace(order, rng={"torch": "x" * snapshot.ORDER_BYTES})))
    assert snapshot.left_in(memory) is None, "one that is too long is not left"
    memory.close()


def coordinator(folder: Path, world: int = 3) -> SaveCoordinator:
    job = SavedJob({}, "uid", attempt=1, worker=0, incarnation=1, fence=None, world_size=world, keep=Keep())
    return SaveCoordinator(open_store(f"file://{folder}"), job, None, "token")


def left(*steps: int, at: float = 1e12) -> StepTimes:
    return {step: (step, at) for step in steps}


ORDER = SaveOrder(seq=5, step=5, deadline_seconds=60.0)


def init(folder: Path, rank: int = 0, world_size: int = 1, identity: dict[str, Any] | None = None) -> UploadInit:
    return UploadInit(
        uri=folder.as_uri(),
        rank=rank,
        world_size=world_size,
        job_uid="uid",
        attempt=1,
        worker=0,
        incarnation=1,
        fence=None,
        token="token",
        host="127.0.0.1",
        port=0,
        keep=Keep(),
        identity=identity or {},
        entries=None,
    )


def report(rank: int, step: int = 5) -> ShareReport:
    file = FileEntry(key=f"of rank {rank}", bytes=0, checksum="0")
    return ShareReport(seq=step, step=step, file=file)


def chosen(there: SaveCoordinator, by_rank: list[StepTimes], seconds: float = WAIT_SECONDS_MAX) -> list[int | None]:
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
def test_the_newest_step_that_all_left_is_chosen(tmp_path: Path, by_rank: list[StepTimes], step: int | None) -> None:
    assert chosen(coordinator(tmp_path), by_rank) == [step] * 3


def test_who_never_tells_is_not_waited_for_without_end(tmp_path: Path) -> None:
    assert coordinator(tmp_path).choose(0, left(3), 0.05) is None


def test_a_save_that_a_dead_rank_had_no_copy_of_ends_at_once(tmp_path: Path) -> None:
    """Its peers may have begun to upload it: they must not wait for the report until the deadline."""
    there = coordinator(tmp_path, world=2)
    there.report(0, report(0))
    threading.Timer(0.05, lambda: there.choose(1, left(4), 0.0)).start()
    result = there.settle(ORDER, deadline=time.monotonic() + WAIT_SECONDS_MAX)
    assert (result.committed, result.error) == (False, "rank 1 died before its copy was whole")


def test_who_waits_for_a_save_that_rank_0_never_ordered_is_told_and_tells(tmp_path: Path) -> None:
    """Rank 0 died between the copies of its peers and its own order: they have the step, and so has its memory."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        job = SavedJob({}, "uid", attempt=1, worker=0, incarnation=1, fence=None, world_size=2, keep=Keep())
        there = SaveCoordinator(open_store(f"file://{tmp_path}"), job, listener, "token")
        peer = SaveChannel(socket.create_connection(listener.getsockname()[:2]))
        peer.send(PeerHello(token="token", rank=1))
        peer.send(report(1))
        answers: list[int | None] = []
        rank_0 = threading.Thread(target=lambda: answers.append(there.choose(0, left(4, 5), WAIT_SECONDS_MAX)))
        rank_0.start()
        assert peer.receive(WAIT_SECONDS_MAX) == SaveResult(
            seq=5, step=5, error="rank 0 died before its copy was whole"
        )
        peer.send(StepsLeft(left=left(4, 5)))
        assert peer.receive(WAIT_SECONDS_MAX) == StepChosen(step=5)
        rank_0.join()
        assert answers == [5]
        peer.send(report(1))  # this time it counts
        there.wait_for(5, [1], WAIT_SECONDS_MAX)
        assert str(there.settle(ORDER, deadline=0.0).error).startswith("no report came from rank 0")
        peer.close()


def test_an_upload_after_a_crash_must_be_worth_its_time() -> None:
    assert worth_a_commit(lost_seconds=0.3, upload_seconds=1.0), "nobody minds a second"
    assert worth_a_commit(lost_seconds=30.0, upload_seconds=20.0)
    assert not worth_a_commit(lost_seconds=10.0, upload_seconds=20.0)
    assert not worth_a_commit(lost_seconds=10_000.0, upload_seconds=AFTER_CRASH_SECONDS_MAX + 1), "taken for a hang"


class Copies:
    """The two copies that one rank keeps in memory, as its upload process sees them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.memories: dict[int, SharedMemory] = {}
        self.layouts: list[NewLayout] = []
        self.staging = StagingMemory(self.memories.__setitem__)
        self.staging.reserve(self.model, self.optimizer, 2)

    def take(self, step: int) -> None:
        if self.staging.lay_out(self.model, self.optimizer):
            share = self.staging.share
            layout = NewLayout(
                number=self.staging.layout,
                bytes=share.layout.size,
                slices=share.slices,
                stateless=share.stateless,
                groups=share.groups,
            )
            self.layouts.append(layout)
        commit = {
            "cursor": {"seed": 0, "epoch": 0, "sample": 0},
            "tokens": 0,
            "state": {},
            "metrics": {},
            "best": False,
        }
        records = [json.dumps({"step": number, "loss": 3}, separators=(",", ":")) for number in range(2, step + 1)]
        order = SaveOrder(
            seq=step,
            step=step,
            deadline_seconds=60.0,
            at=1e12,
            layout=self.staging.layout,
            records=tuple(records),
            commit=commit,
            settings=settings_of(self.optimizer),
        )
        self.staging.copy(self.optimizer, encode(order), None, lambda slot: None)

    def train(self) -> None:
        self.model(torch.ones(4)).sum().backward()
        self.optimizer.step()

    def left(self) -> dict[int, int]:
        """The layout of each step that is there."""
        orders = [snapshot.left_in(memory) for memory in self.memories.values()]
        return {order.step: order.layout for order in orders if order is not None}


def test_tensors_that_lie_elsewhere_give_up_one_copy_only() -> None:
    """After an evaluation FSDP's weights lie elsewhere. Who gave up both copies for the next had no step in common with
    a rank that died before it had that one, and so nothing was committed."""
    copies = Copies()
    copies.train()
    copies.take(1)
    copies.take(2)
    for parameter in copies.model.parameters():
        parameter.data = parameter.data.clone()
    copies.take(3)
    assert copies.left() == {2: 1, 3: 1}


def test_a_file_laid_out_anew_gives_up_one_copy_only() -> None:
    copies = Copies()
    copies.take(1)
    copies.take(2)
    copies.train()  # now there is a state of the optimizer
    copies.take(3)
    assert copies.left() == {2: 1, 3: 2}


def test_records_that_lie_far_behind_in_the_log_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quick job writes megabytes between two commits."""
    monkeypatch.setenv(Env.WORKER_DIR, str(tmp_path))
    rank, process = socket.socketpair()
    uploader = ShareUploader(SaveChannel(process), init(tmp_path / "uid", rank=1, world_size=2), None)
    lines, log = [f'{{"step":{number}}}' for number in range(1, 60_001)], tmp_path / STEP_LOG
    log.write_text("\n".join(lines[:40]) + "\n")
    monkeypatch.setattr(uploader, "_write", lambda key, order: report(1))
    monkeypatch.setattr(uploader, "_ask", lambda report, deadline: SaveResult(seq=1, step=41, committed=True))
    uploader._save(SaveOrder(seq=1, step=41, deadline_seconds=9.0, records=tuple(lines[39:41])))
    log.write_text("\n".join(lines * 3) + "\n")
    assert log.stat().st_size > STEP_LOG_BYTES_BEFORE
    size = log.stat().st_size
    uploader._write_missing_records()
    assert log.stat().st_size == size
    for held in (rank, process):
        held.close()


@pytest.mark.parametrize("written", ['{"step":1}\n', '{"step":1}\n{"step":2,"lo', '{"step":1}\n{"step":2,"loss":3}\n'])
def test_what_a_rank_left_is_saved_as_it_was_laid_out_although_nobody_hears_that_the_process_is_ready(
    tmp_path: Path, written: str
) -> None:
    """The rank died while it copied a step that is laid out otherwise, before its upload process began to listen."""
    copies = Copies()
    copies.take(2)
    weight = copies.model.weight.detach().clone()
    copies.train()
    copies.take(3)
    for memory in copies.memories.values():
        if (order := snapshot.left_in(memory)) and order.step == 3:
            snapshot.begin(memory)
    assert copies.left() == {2: 1}

    rank, process = socket.socketpair()
    (tmp_path / STEP_LOG).write_text(written)
    listener, channel, folder = socket.create_server(("127.0.0.1", 0)), SaveChannel(rank), tmp_path / "uid"
    fixed = {"job": "job", "job_uid": "uid", "attempt": 1, "config": {}, "architecture": {}}
    channel.send(init(folder, identity=fixed), listener.fileno())
    for slot, memory in copies.memories.items():
        channel.send(NewMemory(slot=slot, bytes=memory.size), memory.descriptor)
    for layout in copies.layouts:
        channel.send(layout)
    channel.close()
    ended = subprocess.run(
        [sys.executable, "-m", "muster.trainer.checkpoint.uploader", str(os.getpid()), str(process.fileno())],
        pass_fds=[process.fileno()],
        env=os.environ | {LAUNCHER: str(os.getpid()), Env.WORKER_DIR: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=3 * WAIT_SECONDS_MAX,
    )
    assert "step 2 was committed from what the ranks left in memory" in ended.stderr + ended.stdout
    lines = (tmp_path / STEP_LOG).read_text().splitlines()
    assert [line for line in lines if line.endswith("}")] == ['{"step":1}', '{"step":2,"loss":3}']
    assert ('{"step":2,"loss":3}' in ended.stdout) == ('"loss":3}' not in written)
    commit = read_commit(folder.as_uri(), 2)
    assert sorted(commit.stateless) == ["bias", "weight"]
    assert sorted(commit.tensors) == ["model/bias", "model/weight"]
    (stored,) = commit.files
    assert torch.equal(load_file(folder / stored.key)["model/weight"], weight)
    for held in (process, listener):
        held.close()
