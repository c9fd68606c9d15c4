"""Lines in the log that a worker's ranks share."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from muster.trainer.launch.rank_lines import MarkedLines, mark_lines
from muster.words.names import rank_mark

MARK = rank_mark(3)


@pytest.fixture
def written() -> io.BytesIO:
    return io.BytesIO()


@pytest.fixture
def marked(written: io.BytesIO) -> MarkedLines:
    return MarkedLines(io.TextIOWrapper(written, encoding="utf-8"), MARK)


def test_each_line_says_whose_it_is(marked: MarkedLines, written: io.BytesIO) -> None:
    print("one", "line", file=marked)
    marked.write("two\nthree\n\nfo")
    assert written.getvalue().decode() == f"{MARK}one line\n{MARK}two\n{MARK}three\n{MARK}\n"
    marked.write("ur\n")
    assert written.getvalue().decode().endswith(f"{MARK}four\n")


def test_a_line_that_is_shown_before_it_ends_is_marked_once(marked: MarkedLines, written: io.BytesIO) -> None:
    print("working", end="", flush=True, file=marked)
    assert written.getvalue().decode() == f"{MARK}working"
    print(" done", file=marked)
    print("next", file=marked)
    assert written.getvalue().decode() == f"{MARK}working done\n{MARK}next\n"


def test_the_first_rank_of_a_worker_writes_as_before() -> None:
    before = sys.stdout, sys.stderr
    mark_lines(rank=8, local_rank=0)
    assert (sys.stdout, sys.stderr) == before


def test_a_traceback_warnings_and_what_is_left_at_the_end_are_marked() -> None:
    program = """if True:
        import logging, sys, warnings
        from muster.trainer.launch.rank_lines import mark_lines
        mark_lines(9, 1)
        logging.warning("logged")
        warnings.warn("warned")
        sys.stdout.write("no end")
        sys.stdout.flush()
        raise ValueError("raised")
    """
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout == "[rank 9] no end"
    lines = ran.stderr.splitlines()
    assert {"WARNING:root:logged", "ValueError: raised"} <= {line.removeprefix("[rank 9] ") for line in lines}
    assert all(line.startswith("[rank 9] ") for line in lines)
