"""The GPU rehearsal's checks at toy size on the CPU, so that they are known to run before a GPU is at hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gpu import checks


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
