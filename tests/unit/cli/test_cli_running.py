"""One `muster up` per state folder, and who it is."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from muster.cli import running
from muster.cli.errors import CliError, ExitStatus
from muster.words.state_folder import StateFolder


def test_the_lock_says_who_holds_it_and_is_free_afterwards(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "deep" / "state")
    assert running.who(state) is None
    lock = running.StateLock(state)
    assert not lock.crashed_before
    here = running.who(state)
    assert here is not None
    assert (here.pid, here.url) == (os.getpid(), "")
    lock.write(running.RunningPlatform(7, "http://127.0.0.1:1", 2.5))
    assert running.who(state) == running.RunningPlatform(7, "http://127.0.0.1:1", 2.5)
    with pytest.raises(CliError, match=r"already \(pid 7, http://127.0.0.1:1\)") as raised:
        running.StateLock(state)
    assert raised.value.exit_code == ExitStatus.USAGE
    lock.release()
    assert running.who(state) is None
    running.StateLock(state).release()


def test_whoever_was_killed_holds_nothing_but_is_remembered(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    code = (
        "import sys, os, signal; from pathlib import Path\n"
        "from muster.cli import running; from muster.words.state_folder import StateFolder\n"
        "running.StateLock(StateFolder(Path(sys.argv[1]))); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert state.running.read_text().strip()
    assert running.who(state) is None
    lock = running.StateLock(state)
    assert lock.crashed_before
    lock.release()


def test_a_child_does_not_inherit_the_lock(tmp_path: Path) -> None:
    lock = running.StateLock(StateFolder(tmp_path))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        lock.release()
        again = running.StateLock(StateFolder(tmp_path))
        assert child.poll() is None, "it still lives, and the lock was free"
        again.release()
        child.kill()


def test_asking_who_never_keeps_one_from_starting(tmp_path: Path) -> None:
    state = StateFolder(tmp_path)
    running.StateLock(state).release()
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            running.who(state)

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    try:
        for _ in range(30):
            lock = running.StateLock(state)
            assert not lock.crashed_before
            lock.release()
    finally:
        done.set()
        for asker in askers:
            asker.join()


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CliError, match=r"can't write to the state folder .*/file/state: not a directory") as raised:
        running.StateLock(StateFolder(tmp_path / "file" / "state"))
    assert raised.value.exit_code == ExitStatus.USAGE


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', '{"pid": 1}'])
def test_nonsense_in_the_file_is_nobody(tmp_path: Path, text: str) -> None:
    StateFolder(tmp_path).running.write_text(text)
    assert running.who(StateFolder(tmp_path)) is None
    lock = running.StateLock(StateFolder(tmp_path))
    assert not lock.crashed_before
    lock.release()


def test_the_stop_command_stops_this_platform_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_STATE", str(tmp_path / "usual"))
    assert running.stop_command(StateFolder(tmp_path / "usual")) == "muster down"
    other = StateFolder(tmp_path / "an other")
    assert running.stop_command(other) == f"muster down --state '{other.root}'"
    lock = running.StateLock(other)
    with pytest.raises(CliError) as raised:
        running.StateLock(other)
    lock.release()
    assert f"`muster down --state '{other.root}'`" in str(raised.value.next_step)
