"""The tests of a module train on the same ranks, which end with it, as does all that was forked for them."""

from collections.abc import Iterator

import pytest
from tests import torch_server
from tests.integration.trainer import rank_pool


@pytest.fixture(autouse=True, scope="module")
def ranks_end_with_their_module(nothing_left_running: None) -> Iterator[None]:
    yield
    rank_pool.end_ranks()
    if left := torch_server.end_what_is_left():
        pytest.fail(f"forked workers left {len(left)} processes running (now killed): {left}")
