"""Children of `muster up`: restarted when they die, with pauses that grow, and their last words kept."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.polling import eventually

from muster.cli.supervise import HEALTHY_SECONDS, ChildProcess, backoff_seconds, how_it_ended


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildProcess]:
    """A module of ours that says what it was told, then waits for its standard input to end or a file to appear."""
    (tmp_path / "toy.py").write_text(
        "import sys, time\nprint('arguments', sys.argv[1:], flush=True)\n"
        "if 'die' in sys.argv: sys.exit('for a reason')\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = ChildProcess("the toy", "toy", ["live"], tmp_path / "logs" / "toy.log")
    yield made
    made.send_signal(signal.SIGKILL)
    made.reap()


def test_a_child_is_told_its_parent_and_has_a_session_of_its_own(child: ChildProcess) -> None:
    child.start()
    assert child.process is not None
    assert os.getsid(child.process.pid) == child.process.pid
    told = f"arguments ['live', '--parent-pid', '{os.getpid()}']"
    eventually(lambda: told in child.log_tail(), "the child's first line")


def test_a_killed_child_is_started_again_after_a_pause(child: ChildProcess) -> None:
    said: list[str] = []
    child.start()
    assert child.process is not None
    first = child.process
    first.kill()
    first.wait()
    now = child.started_at + 1
    child.watch(now, said.append)
    assert said == [f"the toy was killed by SIGKILL; starting it again in 0.5 s (log: {child.log})"]
    child.watch(now + 0.4, said.append)
    assert not is_alive(child)
    child.watch(now + 0.5, said.append)
    assert is_alive(child)
    assert child.process is not first
    assert len(said) == 1


def is_alive(child: ChildProcess) -> bool:
    """Asked anew each time: a type checker takes a property for a constant."""
    return child.alive


@pytest.mark.parametrize(("lived", "deaths"), [(HEALTHY_SECONDS - 1, 5), (HEALTHY_SECONDS, 1)])
def test_only_deaths_in_a_row_lengthen_the_pause(child: ChildProcess, lived: float, deaths: int) -> None:
    child.deaths = 4
    child.start()
    child.send_signal(signal.SIGKILL)
    child.reap()
    child.watch(child.started_at + lived, lambda _: None)
    assert child.deaths == deaths


def test_log_tail_is_that_of_this_life(child: ChildProcess) -> None:
    child.log.parent.mkdir()
    child.log.write_text("an older life\n")
    child.arguments = ["die"]
    child.start()
    assert child.process is not None
    assert child.process.wait() == 1
    assert child.log_tail().splitlines()[1:] == ["for a reason"]
    assert "older" not in child.log_tail()


def test_pauses_grow_to_a_limit() -> None:
    assert [backoff_seconds(n) for n in (1, 2, 3, 4, 5, 6, 100, 2_000)] == [0.5, 1, 2, 4, 8, 15, 15, 15]


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "ended with exit code 3"), (-15, "was killed by SIGTERM"), (-63, "was killed by signal 63")],
)
def test_how_it_ended(code: int, words: str) -> None:
    assert how_it_ended(code) == words


def test_this_python_runs_the_children(child: ChildProcess) -> None:
    child.start()
    assert child.process is not None
    assert child.process.args[0] == sys.executable  # type: ignore[index]
