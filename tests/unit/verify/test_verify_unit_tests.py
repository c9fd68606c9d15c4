"""Programs that a model wrote: they are run, and reach nothing."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from muster.local import landlock, seccomp
from muster.trainer.verify.unit_tests import TestOutcome, run, what_is_closed

pytestmark = pytest.mark.skipif(not seccomp.has_filter(), reason=f"no filter of system calls for {sys.platform}")


def passes(program: str, tests: str, timeout_seconds: float, memory_megabytes: int) -> bool:
    return run(program, tests, timeout_seconds, memory_megabytes).passed


# Each line is tried by a program; what works is told by its test.
REACHES = """
import ctypes, os, signal, socket, subprocess, threading
def worked(attempt):
    try:
        attempt()
    except BaseException:
        return False
    return True
attempts = dict(
    connects=lambda: socket.create_connection(("127.0.0.1", {port}), timeout=1),
    sockets=lambda: socket.socket(socket.AF_UNIX),
    kills=lambda: os.kill(os.getppid(), 0),
    forks=lambda: os.fork() or os._exit(0),
    starts=lambda: subprocess.run(["/bin/true"], check=True),
    spawns=lambda: os.posix_spawn("/bin/true", ["true"], {{}}),
    reads=lambda: open("{file}").read(),
    writes=lambda: open("{file}.new", "w"),
    looks=lambda: open(f"/proc/{{os.getppid()}}/environ").read(),
    limits=lambda: __import__("resource").prlimit(os.getppid(), __import__("resource").RLIMIT_NOFILE),
)
found = [name for name, attempt in attempts.items() if worked(attempt)]
"""


def test_programs_are_run() -> None:
    program = "Here it is:\n```python\nimport math\n\ndef double(x):\n    return 2 * x\n```\n"
    code = program.split("```")[1].removeprefix("python\n")
    assert passes(code, "assert double(4) == 8\nassert math.pi > 3", 10, 512)
    assert not passes(code, "assert double(4) == 9", 10, 512)
    assert not passes("def double(x) return 2", "", 10, 512)
    threads = "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()"
    assert passes(threads, "", 10, 512)


@pytest.mark.parametrize(
    "early", ["import os\nos._exit(0)", "raise SystemExit(0)", "import os\nos.write(3, b'x' * 9)\nos._exit(0)"]
)
def test_a_program_that_ends_before_its_tests_has_not_passed_them(early: str) -> None:
    assert not passes(early, "assert False", 10, 512)


@pytest.mark.parametrize(
    ("program", "limit"),
    [
        ("while True: pass", "out_of_time"),
        ("import time\ntime.sleep(1_000)", "out_of_time"),
        ("import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass", "out_of_time"),
        ("held = []\nwhile True: held.append(bytearray(1 << 24))", "out_of_memory"),
        ("x = 9 ** 9 ** 9 ** 9", "out_of_time"),
        ("1 / 0", None),
    ],
)
def test_what_hangs_or_eats_memory_is_killed_and_told_apart(program: str, limit: str | None) -> None:
    began, seconds = time.monotonic(), 0.5 if limit == "out_of_time" else 60.0
    assert run(program, "", seconds, 128) == TestOutcome(False, limit)
    assert time.monotonic() - began < 500


def test_a_program_reaches_nothing_beyond_itself(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("token")
    closed = landlock.version() > 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = REACHES.format(port=server.getsockname()[1], file=secret)
        expected = [] if closed else ["reads", "writes", "looks"]
        assert passes(program, f"assert found == {expected}, found", 20, 512)
    assert any("seccomp" in line for line in what_is_closed())
    assert not closed or any("Landlock" in line for line in what_is_closed())


def test_the_environment_of_the_trainer_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    assert passes("import os", "assert 'AWS_SECRET_ACCESS_KEY' not in os.environ", 10, 512)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] == "hidden"
