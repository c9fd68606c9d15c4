"""The first process of a worker of this machine that runs a program: what it fetches first, and what it says if it
can't."""

from __future__ import annotations

import sys

import pytest

from muster.trainer.launch.program import NotPrepared, prepare, runs_program
from muster.words.names import Env, ExitCode


def words(code: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, signal; {code}"]


def test_a_job_with_a_program_is_one() -> None:
    assert runs_program({Env.CONFIG: '{"program": {"command": ["train.py"]}, "checkpoint": {}}'})
    for config in ("", "{}", "[1]", "{", '{"training": {}}', '{"program": null}'):
        assert not runs_program({Env.CONFIG: config})
    assert not runs_program({})


def test_its_last_words_are_why_the_program_could_not_be_prepared(capfd: pytest.CaptureFixture[str]) -> None:
    prepare(words("print('ready', file=sys.stderr)"))
    assert capfd.readouterr().err == "ready\n"
    with pytest.raises(NotPrepared, match="the bucket is gone") as refused:
        prepare(words("print('reading\\nthe bucket is gone\\n\\n', file=sys.stderr); sys.exit(83)"))
    assert refused.value.exit_code == ExitCode.STORAGE


@pytest.mark.parametrize(
    ("code", "exit_code", "message"),
    [
        ("sys.exit(1)", ExitCode.PREFLIGHT_FAILED, "ended with exit code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", ExitCode.PREFLIGHT_FAILED, "was ended by signal 9"),
        ("sys.exit(80)", ExitCode.USER_ERROR, "ended with exit code 80"),
    ],
)
def test_a_preparation_that_dies_without_a_word(code: str, exit_code: int, message: str) -> None:
    with pytest.raises(NotPrepared, match=message) as refused:
        prepare(words(code))
    assert refused.value.exit_code == exit_code
