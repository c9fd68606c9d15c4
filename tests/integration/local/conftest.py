"""A house per test, and nothing left of it afterwards."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.local.house import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()


@pytest.fixture
def orders() -> Iterator[Path]:
    """A folder that ranks may write to: they rename the orders in it."""
    with tempfile.TemporaryDirectory(prefix="muster-orders-", dir="/dev/shm") as folder:
        yield Path(folder)
