"""Lines that libraries log on their import and that help no user are left out; all others are not."""

import logging
import subprocess
import sys

import pytest

import muster.trainer  # noqa: F401


@pytest.mark.parametrize(
    ("logger", "words", "left_out"),
    [
        ("torchao", "Failed to load /x/torchao/_C_mxfp8.so: Could not load this library", True),
        ("torchao", "something else is wrong", False),
        ("torch.utils._pytree", "<enum 'X'>: Calling register_constant() on Enum subclasses is deprecated", True),
        ("torch.utils._pytree", "something else is wrong", False),
        ("torch", "Failed to load a library", False),
    ],
)
def test_only_what_helps_nobody_is_left_out(logger: str, words: str, left_out: bool) -> None:
    record = logging.getLogger(logger).makeRecord(logger, logging.WARNING, "", 0, words, (), None)
    assert bool(logging.getLogger(logger).filter(record)) is not left_out


@pytest.mark.long
def test_the_import_of_torchao_logs_nothing() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import muster.trainer, torchao"], capture_output=True, text=True, check=True
    )
    assert (run.stdout, run.stderr) == ("", "")
