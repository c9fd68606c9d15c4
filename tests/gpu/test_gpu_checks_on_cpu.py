"""The GPU rehearsal's checks at toy size on the CPU, so that they are known to run before a GPU is at hand."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable

import pytest
import torch

from tests.gpu import checks, measure, rehearsal
from tests.gpu.rehearsal import Item, Limits


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_what_torch_can_do_on_a_cpu(check: Callable[[str], str]) -> None:
    try:
        assert check("cpu")
    except checks.NotHere as reason:
        pytest.skip(str(reason))


def test_a_block_mask_that_leaks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = checks.attention._block_mask
    monkeypatch.setattr(checks.attention, "_block_mask", lambda documents: right(torch.zeros_like(documents)))
    with pytest.raises(AssertionError):
        checks.block_masked_attention("cpu")


def line(*words: str) -> rehearsal.Line:
    """A line of the table, made as `make test-gpu` makes it: by a process of its own."""
    command = (sys.executable, "-m", "tests.gpu.rehearsal_item", *words, "cpu")
    return rehearsal._run(Item("of a toy", command, seconds_max=800), Limits(time.monotonic() + 800, logs=None))


@pytest.mark.long
@pytest.mark.parametrize("case", measure.SPEEDS, ids=lambda case: case.name)
def test_what_is_timed_on_a_gpu_runs(case: measure.SpeedCase) -> None:
    told = line("speed_of", case.name)
    assert told.outcome == "ok", told.seen
    assert re.fullmatch(r"[\d,]+ tokens/s of a toy", told.seen)


@pytest.mark.long
def test_seconds_blocked_by_commits_are_measured() -> None:
    told = line("blocked_by_commits")
    assert told.outcome == "ok", told.seen
    assert re.fullmatch(r"-?[\d.]+ s for [\d.]+ GB; steps of [\d.]+ s before it, [\d.]+ s beside its upload", told.seen)
