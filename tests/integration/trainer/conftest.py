"""The tests of a module train on the same ranks, which end with it."""

from collections.abc import Iterator

import pytest
from tests.integration.trainer import rank_pool


@pytest.fixture(autouse=True, scope="module")
def ranks_end_with_their_module(nothing_left_running: None) -> Iterator[None]:
    yield
    rank_pool.end_all()
