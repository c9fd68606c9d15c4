"""Workers are started once, found again by whoever comes next, and never taken for strangers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.polling import eventually

from muster.operator.local import processes
from muster.operator.local.processes import WorkerKey, WorkerRecord
from muster.words.state_folder import StateFolder

KEY = WorkerKey("uid-1", attempt=1, worker=0)
SLEEP = ("sleep", "600")


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateFolder]:
    state = StateFolder(tmp_path)
    yield state
    eventually(lambda: not _swept(state), "every process of the test to be gone")


def _swept(state: StateFolder) -> list[psutil.Process]:
    left = [member.process for member in processes.scan(state)]
    processes.kill_all(left)
    processes.reap()
    return left


def start(state: StateFolder, key: WorkerKey = KEY, command: tuple[str, ...] = SLEEP) -> WorkerRecord | None:
    return processes.start(state, key, "local-0", command, dict(os.environ) | processes.marks(state, key))


def pids(state: StateFolder, key: WorkerKey = KEY) -> set[int]:
    return {process.pid for process in processes.members(processes.scan(state), key)}


def test_a_worker_is_started_once_however_often_it_is_asked_for(state: StateFolder) -> None:
    record = start(state)
    assert record is not None
    assert (record.node, record.command, record.key) == ("local-0", SLEEP, KEY)
    assert processes.alive(state, record)
    assert start(state) is None
    assert pids(state) == {record.pid}
    assert processes.read_record(state, KEY) == record


def test_many_starters_at_once_make_one_worker(state: StateFolder) -> None:
    made: list[WorkerRecord | None] = []
    errors: list[OSError] = []

    def race() -> None:
        try:
            made.append(start(state))
        except OSError as error:  # "ask again"
            errors.append(error)

    threads = [threading.Thread(target=race) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len([record for record in made if record]) == 1
    assert len(made) + len(errors) == 8
    assert len(pids(state)) == 1


def test_an_operator_that_dies_between_fork_and_record_is_followed_by_one_that_adopts(state: StateFolder) -> None:
    """The child ends as by kill -9 at the first moment at which a worker runs and no record of it exists."""
    died = subprocess.run(
        [sys.executable, "-c", _DIES_BEFORE_THE_RECORD, str(state.root)], capture_output=True, text=True
    )
    assert died.returncode == 9, died.stderr
    assert processes.read_record(state, KEY) is None
    assert processes.is_claimed(state, KEY)
    (orphan,) = pids(state)
    assert start(state) is None
    assert pids(state) == {orphan}
    record = processes.read_record(state, KEY)
    assert record is not None
    assert (record.pid, record.node) == (orphan, "local-0")


_DIES_BEFORE_THE_RECORD = f"""
import os, sys
from pathlib import Path
from muster.words.state_folder import StateFolder
from muster.operator.local import processes
from muster.operator.local.processes import WorkerKey
state, key = StateFolder(Path(sys.argv[1])), WorkerKey({KEY.job_uid!r}, 1, 0)
processes.write_whole = lambda *_: os._exit(9)
processes.start(state, key, "local-0", {SLEEP!r}, dict(os.environ) | processes.marks(state, key))
"""


def test_a_claim_is_seen_before_its_process_can_be_recognised(state: StateFolder) -> None:
    """Between fork and exec a process has no marks yet, but holds the lock already."""
    folder = KEY.folder(state)
    folder.mkdir(parents=True)
    with open(folder / processes.CLAIM, "w") as claim:
        unmarked = subprocess.Popen(
            SLEEP, pass_fds=(claim.fileno(),), preexec_fn=lambda: processes._lock(claim.fileno())
        )
    try:
        assert processes.is_claimed(state, KEY)
        with pytest.raises(BlockingIOError, match="ask again"):
            start(state)
        assert pids(state) == set()
    finally:
        unmarked.kill()
        unmarked.wait()
    assert not processes.is_claimed(state, KEY)
    assert start(state) is not None


def test_a_record_that_cannot_be_written_leaves_no_process(state: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(processes, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        start(state)
    eventually(lambda: not pids(state), "the worker without a record to be gone")
    monkeypatch.undo()
    assert start(state) is not None, "with room again it can be started"


def test_a_command_that_is_not_there_starts_nothing(state: StateFolder) -> None:
    with pytest.raises(FileNotFoundError):
        start(state, command=("no-such-command-anywhere",))
    assert start(state) is not None


def test_a_reused_pid_is_nobody_we_know(state: StateFolder) -> None:
    record = start(state)
    assert record is not None
    stranger = record.model_copy(update={"pid": os.getpid()})
    assert not processes.alive(state, stranger)
    other = WorkerKey("uid-1", attempt=2, worker=0)
    assert start(state, other) is not None
    newer = processes.read_record(state, other)
    assert newer is not None
    assert not processes.alive(state, record.model_copy(update={"pid": newer.pid})), "another attempt took the pid"


def test_a_jump_of_the_clock_does_not_hide_a_living_worker(state: StateFolder) -> None:
    """Start times are told in wall-clock time, which moves with the clock."""
    record = start(state)
    assert record is not None
    assert processes.alive(state, record.model_copy(update={"create_time": record.create_time - 86_400}))


def test_a_zombie_is_dead(state: StateFolder) -> None:
    marked = dict(os.environ) | processes.marks(state, KEY)
    child = subprocess.Popen(("true",), env=marked)
    eventually(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "the child to be a zombie")
    assert processes.marked(state, child.pid) is None
    assert not processes.is_running(psutil.Process(child.pid))
    child.wait()


def test_the_whole_tree_is_found_whatever_its_sessions(state: StateFolder) -> None:
    record = start(state, command=("sh", "-c", "setsid sleep 600 & (setsid setsid sleep 600 &) ; sleep 600"))
    assert record is not None
    eventually(lambda: len(pids(state)) == 4, "the shell and its three sleepers")
    top = processes.top_of(processes.members(processes.scan(state), KEY))
    assert top is not None
    assert top.pid == record.pid


def test_the_launcher_is_the_oldest_also_when_numbers_of_processes_begin_anew() -> None:
    class Started:
        def __init__(self, pid: int, at: float) -> None:
            self.pid, self.at = pid, at

        def create_time(self) -> float:
            return self.at

        def ppid(self) -> int:
            return 1

    launcher, orphan = Started(32_766, 100.0), Started(303, 100.1)
    assert processes.top_of([orphan, launcher]) is launcher  # type: ignore[comparison-overlap,list-item]


def test_another_state_folder_is_none_of_our_business(
    state: StateFolder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = StateFolder(tmp_path_factory.mktemp("other"))
    assert start(other) is not None
    assert pids(state) == set()
    assert len(pids(other)) == 1
    eventually(lambda: not _swept(other), "the other folder's worker to be gone")


def test_how_a_child_ended_is_told_as_a_shell_would(state: StateFolder) -> None:
    quick = start(state, command=("sh", "-c", "exit 7"))
    killed = start(state, WorkerKey("uid-1", 1, 1))
    assert quick is not None
    assert killed is not None
    psutil.Process(killed.pid).kill()
    assert eventually(lambda: processes.exit_code_of(quick.pid), "the first to end") == 7
    assert eventually(lambda: processes.exit_code_of(killed.pid), "the second to end") == 137
    assert processes.exit_code_of(os.getpid()) is None


def test_a_removed_worker_may_be_made_again_and_its_log_goes_on(state: StateFolder) -> None:
    record = start(state, command=("sh", "-c", "echo first"))
    assert record is not None
    eventually(lambda: not processes.alive(state, record), "it to end")
    (KEY.folder(state) / "exit.json").write_text("{}")
    assert start(state) is None, "it had its life"
    processes.mark_removed(state, KEY)
    assert not processes.exists(state, KEY)
    again = start(state, command=("sh", "-c", "echo second; sleep 600"))
    assert again is not None
    assert not (KEY.folder(state) / "exit.json").exists()
    eventually(lambda: (KEY.folder(state) / "log").read_text() == "first\nsecond\n", "the log of both lives")


def test_the_lock_goes_no_further_than_the_launcher(state: StateFolder) -> None:
    """A rank's helper that outlives everybody must not hold the claim for ever."""
    record = start(state, command=(sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '600'])"))
    assert record is not None
    eventually(lambda: len(pids(state)) == 2, "the launcher and its child")
    psutil.Process(record.pid).kill()
    eventually(lambda: not processes.is_claimed(state, KEY), "the claim to be free")
    assert len(pids(state)) == 1
