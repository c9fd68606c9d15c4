"""Heartbeats, exit codes, and the judgement over a worker's end."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from tests.polling import WAIT_SECONDS_MAX, eventually

from muster.trainer.errors import (
    NumericError,
    OutOfMemory,
    PeerLost,
    StaleAttempt,
    StorageError,
    UserError,
    exit_code,
    is_lost_peer,
    is_out_of_memory,
)
from muster.trainer.launch.verdict import RankEnd, is_unexplained, log_tail, oom_kills, read_end, root, worker_exit
from muster.trainer.train.metrics import RankMetrics, StepLog
from muster.trainer.train.rank_state import RankState
from muster.words.names import ExitCode
from muster.words.signals import Heartbeat, RankFailure, StepRecord, TrainerPhase


def record(step: int) -> StepRecord:
    return StepRecord(
        attempt=2,
        step=step,
        steps=9,
        at=1000.0 + step,
        loss=2.5,
        grad_norm=0.5,
        lr=0.1,
        tokens=64,
        tokens_per_second=640.0,
        step_seconds=0.1,
        data_wait_seconds=0.01,
        mfu=None,
        memory_bytes=77,
    )


def read(path: Path) -> Heartbeat:
    return Heartbeat.model_validate_json(path.read_text())


def beat_of(path: Path) -> Heartbeat | None:
    return read(path) if path.exists() else None


@pytest.mark.parametrize("stop_wanted", [True, False])
def test_a_gang_that_left_together_says_so(stop_wanted: bool) -> None:
    """Also where this worker was told nothing: it heard of it from a rank whose node goes."""
    left = worker_exit([RankEnd(0, int(ExitCode.PREEMPTED_COMMITTED), 1.0)], stop_wanted, 15.0)
    assert (left.exit_code, left.message) == (85, "all ranks stopped as requested, with a checkpoint")
    empty = worker_exit([RankEnd(0, int(ExitCode.PREEMPTED_NO_COMMIT), 1.0)], stop_wanted, 15.0)
    assert (empty.exit_code, empty.message) == (86, "all ranks stopped as requested")


def test_the_heartbeat_tells_the_story(tmp_path: Path) -> None:
    rank_state = RankState(tmp_path, attempt=2, rank=3, started_at=time.time() - 5)
    rank_state.activity.enter(TrainerPhase.LOAD)
    rank_state.resumed(4, committed_at=900.0, best_step=2)
    rank_state.activity.enter(TrainerPhase.STEP)
    rank_state.stepped(record(5))
    rank_state.heartbeats.beat()
    beat = read(tmp_path / "rank-3.json")
    assert (beat.attempt, beat.rank, beat.pid, beat.phase, beat.step) == (2, 3, os.getpid(), TrainerPhase.STEP, 5)
    assert (beat.last_commit_step, beat.last_commit_at, beat.best_step) == (4, 900.0, 2)
    assert beat.last_step == record(5)
    assert beat.last_evaluation is None
    assert beat.progressed_at == 1005.0
    assert beat.seconds.init >= 5
    evaluated = record(6).model_copy(update={"evaluation_loss": 2.0})
    rank_state.stepped(evaluated)
    rank_state.stepped(record(7))
    rank_state.committed(5, at=950.0, best=True, productive=0.0)
    rank_state.heartbeats.beat()
    beat = read(tmp_path / "rank-3.json")
    assert (beat.last_commit_step, beat.last_commit_at, beat.best_step) == (5, 950.0, 5)
    assert (beat.last_step, beat.last_evaluation) == (record(7), evaluated)
    assert beat.first_step_at == 1005.0


def test_seconds_sum_to_the_wall_clock(tmp_path: Path) -> None:
    started = time.time() - 2
    rank_state = RankState(tmp_path, attempt=1, rank=0, started_at=started)
    rank_state.activity.enter(TrainerPhase.STEP)
    with rank_state.activity.during(TrainerPhase.EVALUATION):
        assert rank_state.heartbeat().phase is TrainerPhase.EVALUATION
    with rank_state.activity.waiting_for_data():
        pass
    before = time.time() - started
    seconds = rank_state.activity.seconds()
    assert before <= sum(seconds.model_dump().values()) + 1e-3
    assert sum(seconds.model_dump().values()) <= time.time() - started + 1e-3
    assert seconds.init >= 2
    assert min(seconds.evaluation, seconds.data_wait, seconds.productive) > 0


LIVING = """
import sys, time
from pathlib import Path
from muster.words.signals import TrainerPhase
from muster.trainer.train.rank_state import RankState
rank_state = RankState(Path(sys.argv[1]), 1, 0, time.time())
rank_state.heartbeats.start()
phase = TrainerPhase(sys.argv[2])
rank_state.activity.enter(phase)
print("ready", flush=True)
import threading
lock = threading.Lock(); lock.acquire()
# Only where the ranks can agree on a step does the main thread itself look for the request to stop.
while phase in (TrainerPhase.INIT, TrainerPhase.DATA, TrainerPhase.LOAD) or not rank_state.stop_wanted:
    lock.acquire(timeout=0.05)
print("stops at a boundary", flush=True)
"""


def living(directory: Path, phase: TrainerPhase) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", LIVING, str(directory), phase.value], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("phase", [TrainerPhase.STEP, TrainerPhase.EVALUATION, TrainerPhase.CHECKPOINT])
def test_asked_to_stop_where_ranks_can_agree(tmp_path: Path, phase: TrainerPhase, number: signal.Signals) -> None:
    process = living(tmp_path, phase)
    process.send_signal(number)
    assert process.communicate(timeout=WAIT_SECONDS_MAX)[0] == "stops at a boundary\n"
    assert process.returncode == 0


@pytest.mark.parametrize("phase", [TrainerPhase.INIT, TrainerPhase.DATA, TrainerPhase.LOAD])
def test_asked_to_stop_before_the_first_step(tmp_path: Path, phase: TrainerPhase) -> None:
    process = living(tmp_path, phase)
    process.terminate()
    assert process.communicate(timeout=WAIT_SECONDS_MAX)[0] == ""
    assert process.returncode == ExitCode.PREEMPTED_NO_COMMIT
    failure = RankFailure.model_validate_json((tmp_path / "rank-0.failure.json").read_text())
    assert (failure.exit_code, failure.message) == (86, f"asked to stop in phase {phase.value}, before any new step")


def test_the_heart_beats_without_progress(tmp_path: Path) -> None:
    process = living(tmp_path, TrainerPhase.STEP)
    try:
        first = eventually(lambda: beat_of(tmp_path / "rank-0.json"), "a first heartbeat")
        assert first
        earliest = first.at + 1
        later = eventually(lambda: (beat := read(tmp_path / "rank-0.json")).at > earliest and beat, "a later heartbeat")
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert later
    assert later.progressed_at <= first.at + 1  # only `at` moved


def test_step_lines_are_written_once_also_where_nobody_listens(tmp_path: Path) -> None:
    class Deaf(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(32, "nobody reads it")

    log = StepLog(tmp_path, Deaf())
    for number in (1, 2):
        log.write(record(number))
        for _ in range(3):
            with contextlib.suppress(OSError):  # as the heartbeat's thread does
                log.flush()
    assert [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [1, 2]


def test_step_lines_and_metrics(tmp_path: Path) -> None:
    out = (tmp_path / "stdout").open("w+")
    log = StepLog(tmp_path, out)
    log.write(record(1))
    assert (tmp_path / "steps.jsonl").read_text() == ""  # a step does not wait for the disk
    assert [StepRecord.model_validate_json(line) for line in log.unwritten()] == [record(1)]
    log.flush()
    assert log.unwritten() == ()
    log.flush()
    out.seek(0)
    line = (tmp_path / "steps.jsonl").read_text()
    assert out.read() == line
    assert json.loads(line)["type"] == "step"
    assert StepRecord.model_validate_json(line) == record(1)
    log.write(record(2))
    log.close()
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 2

    rank_state = RankState(tmp_path, attempt=2, rank=3, started_at=time.time())
    metrics = RankMetrics(3, rank_state.heartbeat)
    metrics.stepped(record(1).model_copy(update={"values": {"kl": 0.5}}), samples=2, own_data_wait=0.01)
    metrics.learning.evaluated(4.0, {"code/loss": 3.0, "code/exactMatch": 0.25})
    metrics.commits.committed(1, 950.0, 0.5, 1234)
    text = generate_latest(metrics.registry).decode()
    for line in (
        "muster_trainer_steps_total 1.0",
        "muster_trainer_tokens_total 64.0",
        "muster_trainer_samples_total 2.0",
        "muster_trainer_loss 2.5",
        "muster_trainer_evaluation_loss 4.0",
        'muster_trainer_objective{name="kl"} 0.5',
        'muster_trainer_evaluation_objective{name="code/loss"} 3.0',
        'muster_trainer_evaluation_objective{name="code/exactMatch"} 0.25',
        "muster_trainer_mfu_ratio NaN",
        'muster_trainer_rank_step_seconds{rank="3"} 0.1',
        "muster_trainer_last_commit_step 1.0",
        "muster_trainer_checkpoint_bytes_total 1234.0",
        'muster_trainer_phase{phase="init"} 1.0',
        'muster_trainer_phase{phase="step"} 0.0',
    ):
        assert line in text.splitlines()
    assert 'muster_trainer_goodput_seconds_total{state="init"}' in text


# --- what errors mean ---


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError(), 80),
        (OutOfMemory(), 81),
        (MemoryError(), 81),
        (NumericError(), 82),
        (StorageError(), 83),
        (StaleAttempt(), 87),
        (PeerLost(), 88),
        (ValueError(), 1),
    ],
)
def test_exit_codes(error: Exception, code: int) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize(
    ("kind", "text", "lost"),
    [
        ("RuntimeError", "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:17310.", True),
        ("RuntimeError", "[pair.cc:534] Read error [127.0.0.1]: Connection reset by peer", True),
        ("DistBackendError", "NCCL error: ncclRemoteError: A call failed possibly due to a network error", True),
        ("DistNetworkError", "failed to recv, got 0 bytes", True),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", False),
        ("UserError", "connection refused by s3", False),
    ],
)
def test_lost_peers_are_told_from_our_own_mistakes(kind: str, text: str, lost: bool) -> None:
    assert is_lost_peer(kind, text) is lost


def test_out_of_memory_is_recognised() -> None:
    allocator = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
    assert is_out_of_memory("RuntimeError", allocator)
    assert is_out_of_memory("OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB")
    assert not is_out_of_memory("RuntimeError", "index out of bounds")


# --- the verdict ---

LOST, KILLED, USER = int(ExitCode.PEER_LOST), -9, int(ExitCode.USER_ERROR)


@pytest.mark.parametrize(
    ("ends", "stop_wanted", "expected"),
    [
        ([(0, 80, 5.0), (1, 82, 4.0)], False, 1),  # the earliest
        ([(0, LOST, 4.0), (1, KILLED, 4.2)], False, 1),  # a reason before a lost peer, though noticed later
        ([(0, LOST, 4.0), (1, LOST, 3.0)], False, 1),
        ([(0, KILLED, 30.0), (1, LOST, 4.0)], False, 1),  # killed by the agent after the others ended
        ([(0, 86, 4.1), (1, USER, 4.0)], False, 1),
        ([(0, -15, 3.9), (1, 1, 4.0)], False, 1),  # the agent's own SIGTERM
        ([(0, 86, 4.0), (1, 85, 4.1)], True, 1),
        ([(0, 85, 4.0), (1, 83, 4.1)], True, 1),
        ([(0, LOST, 3.0), (1, 86, 4.1)], True, 1),
    ],
)
def test_the_root_of_a_failure(ends: list[tuple[int, int, float]], stop_wanted: bool, expected: int) -> None:
    found = root([RankEnd(*end) for end in ends], stop_wanted, shutdown_seconds=15)
    assert found.rank == expected


def test_a_killed_rank_as_a_shell_shows_it() -> None:
    end = worker_exit([RankEnd(2, -9, 4.0, step=7)], False, 15)
    assert (end.exit_code, end.signal, end.rank, end.step) == (137, 9, 2, 7)
    assert end.message == "rank 2 was killed by SIGKILL"


@pytest.mark.parametrize(
    ("number", "before", "now", "unexplained"),
    [(9, 3, 3, True), (24, 0, 0, True), (9, 3, 4, False), (9, None, None, False), (11, 3, 3, False)],
)
def test_a_signal_that_nobody_known_has_sent(
    number: int, before: int | None, now: int | None, unexplained: bool
) -> None:
    end = worker_exit([RankEnd(0, -number, 4.0)], False, 15)
    assert is_unexplained(end, before, now) == unexplained


def test_the_kernel_counts_whom_it_kills_for_memory() -> None:
    assert isinstance(oom_kills(), int)


def test_a_rank_stopped_while_it_started() -> None:
    assert worker_exit([RankEnd(0, -15, 4.0)], True, 15).exit_code == ExitCode.PREEMPTED_NO_COMMIT
    assert worker_exit([RankEnd(0, -15, 4.0)], False, 15).exit_code == 143


def test_what_a_rank_left_behind(tmp_path: Path) -> None:
    rank_state = RankState(tmp_path, attempt=1, rank=0, started_at=time.time())
    rank_state.step = 12
    rank_state.fail(80, "no such file")
    rank_state.heartbeats.beat()
    now = time.time()
    assert read_end(tmp_path, 0, 80, now, since=0) == RankEnd(
        0,
        80,
        RankFailure.model_validate_json((tmp_path / "rank-0.failure.json").read_text()).at,
        12,
        "no such file",
    )
    assert read_end(tmp_path, 0, -9, now, since=0) == RankEnd(0, -9, now, 12)  # it did not end as it had said
    assert read_end(tmp_path, 0, 80, now, since=now + 1) == RankEnd(0, 80, now)  # words of another attempt
    assert read_end(tmp_path, 5, 80, now, since=0) == RankEnd(5, 80, now)


def test_the_log_tail_leaves_step_records_out(tmp_path: Path) -> None:
    assert log_tail(tmp_path) == ""
    lines = [f"line {number}" for number in range(100)]
    (tmp_path / "log").write_text("\n".join(line + '\n{"type":"step"}' for line in lines))
    assert log_tail(tmp_path).splitlines() == lines[-40:]
