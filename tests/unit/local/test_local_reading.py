"""What workers wrote is read with distrust, and clocks that jump change no age."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from muster.operator.local.processes import WorkerKey
from muster.operator.local.reading import HeartbeatReader, exit_without_record, log_tail, read_exit, redacted_exit
from muster.words.names import ExitCode
from muster.words.signals import Heartbeat, TrainerPhase
from muster.words.state_folder import StateFolder

KEY = WorkerKey("uid-1", attempt=3, worker=0)
STRANGE = b'{"attempt":%d,"rank":%d,"pid":1,"phase":"step","step":9,"at":1,"progressedAt":1,"startedAt":1}'


@dataclass
class Clocks:
    wall: float = 1_000.0
    steady: float = 50.0

    def pass_time(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    KEY.folder(StateFolder(tmp_path)).mkdir(parents=True)
    return StateFolder(tmp_path)


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def heartbeats(state: StateFolder, clocks: Clocks) -> HeartbeatReader:
    return HeartbeatReader(state, lambda: clocks.wall, lambda: clocks.steady)


def beat(state: StateFolder, clocks: Clocks, rank: int = 0, step: int = 0, **other: object) -> None:
    facts = {
        "attempt": KEY.attempt, "rank": rank, "pid": 1, "phase": "step", "step": step, "at": clocks.wall,
        "progressedAt": clocks.wall, "startedAt": 900.0,
    }  # fmt: skip
    write(state, f"rank-{rank}.json", json.dumps(facts | other).encode())


def write(state: StateFolder, name: str, content: bytes) -> None:
    temporary = KEY.folder(state) / "new"
    temporary.write_bytes(content)
    os.replace(temporary, KEY.folder(state) / name)


def test_heartbeats_come_in_rank_order_and_anew_when_replaced(
    state: StateFolder, clocks: Clocks, heartbeats: HeartbeatReader
) -> None:
    assert heartbeats.read(KEY) == ()
    for rank in (10, 2, 0):
        beat(state, clocks, rank, step=rank)
    assert [(found.rank, found.step) for found in heartbeats.read(KEY)] == [(0, 0), (2, 2), (10, 10)]
    beat(state, clocks, 2, step=3, phase="checkpoint")
    seen = heartbeats.read(KEY)[1]
    assert (seen.step, seen.phase) == (3, TrainerPhase.CHECKPOINT)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"",
        b'{"attempt": 3, "ra',
        b"\xff\xfe\x00garbage",
        b"[]",
        b"null",
        b'{"attempt": 3, "rank": "zero"}',
        STRANGE % (2, 0),
        STRANGE % (3, 7),
        (STRANGE % (3, 0)).replace(b"}", b',"incarnation":2}'),
    ],
    ids=["empty", "half", "bytes", "list", "null", "type", "another attempt", "another rank", "another life"],
)
def test_rubbish_is_no_news(state: StateFolder, clocks: Clocks, heartbeats: HeartbeatReader, rubbish: bytes) -> None:
    write(state, "rank-0.json", rubbish)
    assert heartbeats.read(KEY) == ()
    beat(state, clocks, step=4)
    assert [found.step for found in heartbeats.read(KEY)] == [4]
    write(state, "rank-0.json", rubbish)
    assert [found.step for found in heartbeats.read(KEY)] == [4], "the last good word stands"


def test_other_files_are_not_heartbeats(state: StateFolder, heartbeats: HeartbeatReader) -> None:
    for name in ("rank-0.failure.json", "rank-x.json", ".rank-0.json.tmp", "exit.json"):
        write(state, name, b"{}")
    assert heartbeats.read(KEY) == ()


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_a_jump_of_the_clock_ages_no_progress(
    state: StateFolder, clocks: Clocks, heartbeats: HeartbeatReader, jump: float
) -> None:
    beat(state, clocks, step=5)
    heartbeats.read(KEY)
    clocks.pass_time(7)
    clocks.wall += jump
    assert _age(heartbeats, clocks) == 7
    beat(state, clocks, step=5, progressedAt=clocks.wall - jump - 7)
    assert _age(heartbeats, clocks) == 7, "the rank still writes, but does not get on"
    beat(state, clocks, step=6)
    assert _age(heartbeats, clocks) == 0


def test_a_stall_is_seen_although_the_rank_keeps_writing(
    state: StateFolder, clocks: Clocks, heartbeats: HeartbeatReader
) -> None:
    beat(state, clocks, step=5)
    heartbeats.read(KEY)
    for _ in range(10):
        clocks.pass_time(30)
        beat(state, clocks, step=5, progressedAt=clocks.wall)
        heartbeats.read(KEY)
    assert _age(heartbeats, clocks) == 300


def test_a_new_operator_believes_the_rank_on_how_long_it_has_stood_still(
    state: StateFolder, clocks: Clocks, heartbeats: HeartbeatReader
) -> None:
    beat(state, clocks, step=5, progressedAt=clocks.wall - 40)
    assert _age(heartbeats, clocks) == 40


@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_silence_is_measured_whatever_the_clock_does(
    state: StateFolder, clocks: Clocks, heartbeats: HeartbeatReader, jump: float
) -> None:
    beat(state, clocks, step=5)
    heartbeats.read(KEY)
    clocks.pass_time(3)
    clocks.wall += jump
    (silent,) = heartbeats.read(KEY)
    assert clocks.wall - silent.at == 3
    beat(state, clocks, step=5, progressedAt=0.0)
    (spoken,) = heartbeats.read(KEY)
    assert (clocks.wall - spoken.at, clocks.wall - spoken.progressed_at) == (0, 3)


def test_a_new_operator_sees_how_long_a_rank_has_been_silent(
    state: StateFolder, clocks: Clocks, heartbeats: HeartbeatReader
) -> None:
    beat(state, clocks, step=5, at=clocks.wall - 70, progressedAt=clocks.wall - 80)
    (seen,) = heartbeats.read(KEY)
    assert (clocks.wall - seen.at, clocks.wall - seen.progressed_at) == (70, 80)


def _age(heartbeats: HeartbeatReader, clocks: Clocks) -> float:
    (seen,) = heartbeats.read(KEY)
    assert isinstance(seen, Heartbeat)
    return clocks.wall - seen.progressed_at


def test_a_death_without_a_record_is_written_down_with_the_end_of_the_log(state: StateFolder) -> None:
    (KEY.folder(state) / "log").write_text("x" * 5_000 + "\nlast words\n")
    ended = exit_without_record(state, KEY, 137, write=True)
    assert (ended.exit_code, ended.signal, ended.log_tail) == (137, 9, "last words\n")
    assert ended.unexplained
    assert ended.message == "its processes are gone and left no exit record (exit code 137)"
    assert read_exit(state, KEY) == ended


def test_a_death_that_nobody_saw_is_taken_for_a_kill(state: StateFolder) -> None:
    ended = exit_without_record(state, KEY, None, write=False)
    assert (ended.exit_code, ended.signal, ended.unexplained) == (137, None, False)
    assert ended.message.endswith("(its end was not seen; most likely it was killed)")
    assert read_exit(state, KEY) is None, "a guest writes nothing"


def test_a_port_that_was_taken_is_no_fault_of_the_user(state: StateFolder) -> None:
    (KEY.folder(state) / "log").write_text("torch.distributed.DistNetworkError: ... port: 29500, name: EADDRINUSE\n")
    ended = exit_without_record(state, KEY, 1, write=False)
    assert ended.exit_code == ExitCode.PREFLIGHT_FAILED
    assert ended.message.startswith("another process took the port")


def test_a_full_disk_hides_no_death(state: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("muster.operator.local.reading.write_whole", full)
    assert exit_without_record(state, KEY, 1, write=True).exit_code == 1


def test_the_log_tail_has_whole_lines_and_needs_no_log(state: StateFolder) -> None:
    path = KEY.folder(state) / "log"
    assert log_tail(path) == ""
    path.write_bytes("ä".encode() * 10 + b"\nsecond\nthird \xff\n")
    assert log_tail(path) == "ä" * 10 + "\nsecond\nthird \ufffd\n"
    assert log_tail(path, size=20) == "second\nthird \ufffd\n"


def test_a_secret_of_the_job_reaches_no_status(state: StateFolder) -> None:
    (KEY.folder(state) / "log").write_text("login with hunter2-hunter2\n")
    ended = exit_without_record(state, KEY, 1, write=False).model_copy(update={"message": "bad key hunter2-hunter2"})
    seen = redacted_exit(ended, {"WANDB_API_KEY": "hunter2-hunter2", "HF_TOKEN": "", "MODE": "login"})
    assert (seen.message, seen.log_tail) == ("bad key ***", "login with ***\n")
